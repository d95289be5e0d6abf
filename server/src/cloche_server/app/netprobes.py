"""Attempts of root in a guest to reach what is not its own, and what the host has seen of them.

Nothing is sent to a foreign machine: what is aimed at are addresses of this host, the link of the sandbox, and the
metadata address unless a rule opens that. What may be a machine of somebody (private networks) is only asked about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cloche_server.app.selftest import Target, output
from cloche_server.core.errors import ClocheError
from cloche_server.core.network import GATEWAY_IP4, GATEWAY_IP6, NetworkMode
from cloche_server.core.ports import Network
from cloche_server.core.probes import Probe, Skipped
from cloche_server.host import witness
from cloche_server.host.clock import random_bytes
from cloche_server.host.witness import Witness

METADATA: Final = "169.254.169.254"
_QUIC: Final = 443
_MOST_ADDRESSES: Final = 3
#: One of each range that is not public and belongs to nobody here. Only asked about.
_PRIVATE: Final = ("10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "127.0.0.1", "169.254.1.1", "fd00::1")
_SEEN: Final = {
    "refused": "refused",
    "silent": "no answer",
    "unreachable": "no way there",
    "answered": "it has answered",
}

#: Says by its number what came of each attempt. Programs of a guest may be old: nothing new of Python.
_PROGRAM: Final = r"""
import json, os, socket, struct, sys, threading
plan = json.loads(sys.argv[1])
def family(a): return socket.AF_INET6 if ":" in a else socket.AF_INET
def tcp(a, p, d):
    s = socket.socket(family(a), socket.SOCK_STREAM); s.settimeout(4)
    s.connect((a, p)); s.sendall(("GET /%s HTTP/1.0\r\nHost: %s\r\n\r\n" % (d, d)).encode())
    got = b""
    while len(got) < 4000:
        part = s.recv(4000)
        if not part: break
        got += part
    return "refused" if b"network.denied" in got or not got else "answered"
def udp(a, p, d):
    s = socket.socket(family(a), socket.SOCK_DGRAM); s.settimeout(2)
    s.connect((a, p)); s.send(d.encode()); s.recv(4000)
    return "answered"
def icmp(a, p, d):
    six = ":" in a
    s = socket.socket(family(a), socket.SOCK_RAW, 58 if six else 1); s.settimeout(2)
    m = struct.pack("!BBHHH", 128 if six else 8, 0, 0, 7, 1) + b"cloche"
    t = sum(struct.unpack("!7H", m)); t = (t >> 16) + (t & 65535)
    s.sendto(m[:2] + struct.pack("!H", ~t & 65535) + m[4:], (a, 0))
    while True:
        got, whence = s.recvfrom(4000)
        if whence[0] == a and (got[0] == 129 if six else got[20] == 0): return "answered"
def dns(a, p, d):
    s = socket.socket(family(a), socket.SOCK_DGRAM); s.settimeout(3)
    name = b"".join(struct.pack("B", len(x)) + x.encode() for x in d.split(".")) + b"\0"
    s.sendto(struct.pack("!6H", 7, 256, 1, 0, 0, 0) + name + b"\0\1\0\1", (a, p))
    return "refused" if s.recv(4000)[3] & 15 == 5 else "answered"
def run(i, k, a, p, d):
    try: saw = {"tcp": tcp, "udp": udp, "icmp": icmp, "dns": dns}[k](a, p, d)
    except socket.timeout: saw = "silent"
    except ConnectionError: saw = "refused"
    except OSError as e: saw = "refused" if e.errno in (1, 13) else "unreachable"
    sys.stdout.write("%d %s\n" % (i, saw)); sys.stdout.flush()
ts = [threading.Thread(target=run, args=[i] + one) for i, one in enumerate(plan)]
for t in ts: t.start()
for t in ts: t.join()
"""
_SCRIPT: Final = "command -v python3 >/dev/null 2>&1 || { echo none; exit 0; }\nexec python3 -I -c %s %s\n"


@dataclass(frozen=True, slots=True)
class _Try:
    """One attempt of the probe `name`. `token`: words that the host recognises, where it watches the place."""

    name: str
    kind: str
    address: str
    port: int
    token: str

    @property
    def place(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"ICMP to {host}" if self.kind == "icmp" else f"{self.kind.upper()} {host}:{self.port}"


class NetworkProbes:
    """`api_port`: of this server; None where none runs."""

    def __init__(self, network: Network, api_port: int | None) -> None:
        self._network = network
        self._api_port = api_port

    async def probe(self, target: Target) -> Sequence[Probe | Skipped]:
        """What the sandbox's own policy opens is no failure, and is told."""
        found: list[Probe | Skipped] = []
        addresses = [str(one) for one in witness.outward()]
        four = [one for one in addresses if ":" not in one][:_MOST_ADDRESSES]
        six = [one for one in addresses if ":" in one][:_MOST_ADDRESSES]
        async with witness.listening([*four, *six], _QUIC) as watching:
            tries = self._plan(watching, four, six)
            opened = {one: await self._opened_by(target, one) for one in tries}
            if target.policy.mode is NetworkMode.NONE:
                tries.append(_Try("network.dns", "dns", GATEWAY_IP4, 53, "cloche-probe.invalid"))
            else:
                found.append(
                    Skipped("network.dns", "the policy of the sandbox answers names; it is tried in mode none")
                )
            for one in [one for one in tries if one.name == "network.metadata" and opened[one]]:
                tries.remove(one)  # whatever answers there is not ours
                found.append(Probe(one.name, True, f"not tried: the rule {opened[one]} opens {one.place}"))
            told = await self._run(target, tries)
            found += _judged(tries, told, opened, watching)
        if not four:
            reason = "this host has no IPv4 address but loopback"
            found += [Skipped(f"network.{name}", reason) for name in ("host", "udp", "icmp", "api")]
        elif self._api_port is None:
            found.append(Skipped("network.api", "no server runs here"))
        if not six:
            found.append(Skipped("network.host6", "this host has no IPv6 address but loopback and link-local ones"))
        found.append(await self._private(target))
        found += await self._network.examine(target.sandbox_id)
        return sorted(found, key=lambda one: one.name)

    def _plan(self, watching: Witness, four: Sequence[str], six: Sequence[str]) -> list[_Try]:
        def token() -> str:
            return "cloche-probe-" + random_bytes(8).hex()

        tries = []
        for name, addresses in (("network.host", four), ("network.host6", six)):
            for address in addresses:
                if (port := watching.ports.get((address, "tcp"))) is not None:
                    tries.append(_Try(name, "tcp", address, port, token()))
                if ":" in address:
                    tries.append(_Try(name, "icmp", address, 0, ""))
        for address in four:
            if (port := watching.ports.get((address, "udp"))) is not None:
                tries.append(_Try("network.udp", "udp", address, port, token()))
            tries.append(_Try("network.icmp", "icmp", address, 0, ""))
            if self._api_port is not None:
                tries.append(_Try("network.api", "tcp", address, self._api_port, token()))
        tries += [_Try("network.neighbours", "tcp", one, 80, "") for one in (GATEWAY_IP4, GATEWAY_IP6)]
        tries.append(_Try("network.metadata", "tcp", METADATA, 80, "latest/meta-data/"))
        return tries

    async def _opened_by(self, target: Target, one: _Try) -> str | None:
        """The rule of the policy that opens a place; None when it is closed."""
        if one.kind not in {"tcp", "udp"}:
            return None
        verdict = await self._verdict(target, one.address, one.port, one.kind)
        return str(verdict.get("rule") or "?") if verdict.get("allowed") else None

    async def _verdict(self, target: Target, host: str, port: int, protocol: str) -> Mapping[str, Any]:
        try:
            asked = {"host": host, "port": port, "protocol": protocol}
            answer = await self._network.inquire("explain", target.sandbox_id, **asked)
        except ClocheError:  # nothing is carried, and so nothing is open
            return {}
        verdict: Mapping[str, Any] = answer["verdict"]
        return verdict

    async def _run(self, target: Target, tries: Sequence[_Try]) -> Mapping[int, str] | str:
        """What the guest says of each attempt, or why there was none."""
        plan = [[one.kind, one.address, one.port, one.token] for one in tries]
        script = _SCRIPT % (_quoted(_PROGRAM), _quoted(json.dumps(plan)))
        try:
            lines = (await output(target.guest, script)).splitlines()
        except ClocheError as error:
            return f"it could not be tried: {error.message}"
        if lines[:1] == ["none"]:
            return "not probed: no tool in the guest (there is no python3)"
        told: dict[int, str] = {}
        for line in lines[: 4 * len(plan)]:
            number, _, saw = line.partition(" ")
            if number.isascii() and number.isdigit() and len(number) < 4 and saw in _SEEN:
                told[int(number)] = saw
        return told

    async def _private(self, target: Target) -> Probe:
        """What netd would decide; nothing is sent, for it could meet somebody."""
        rules = {rule.id for rule in target.policy.rules}
        opened: list[str] = []
        through: list[str] = []
        for host in _PRIVATE:
            verdict = await self._verdict(target, host, 443, "tcp")
            if verdict.get("allowed"):
                (opened if verdict.get("rule") in rules else through).append(f"{host} ({verdict.get('rule')})")
        if through:
            return Probe("network.private", False, f"open without a rule of the sandbox: {', '.join(through)}")
        told = f"open by rules of the sandbox: {', '.join(opened)}" if opened else f"closed: {', '.join(_PRIVATE)}"
        return Probe("network.private", True, f"asked, not sent: {told}")


def _judged(
    tries: Sequence[_Try], told: Mapping[int, str] | str, opened: Mapping[_Try, str | None], watching: Witness
) -> list[Probe | Skipped]:
    """One answer for each name: what got through counts, whatever else was tried under it."""
    found: list[Probe | Skipped] = []
    for name in dict.fromkeys(one.name for one in tries):
        bad: list[str] = []
        good: list[str] = []
        missing: list[str] = []
        for number, one in enumerate(tries):
            if one.name != name:
                continue
            arrived = bool(one.token) and watching.saw(one.token)
            saw = None if isinstance(told, str) else told.get(number)
            if arrived or saw == "answered":
                through = f"{one.place}: {'it has arrived' if arrived else _SEEN['answered']}"
                rule = opened.get(one)
                (bad if rule is None else good).append(
                    through if rule is None else f"{through}, the rule {rule} opens it"
                )
            elif saw is None:
                missing.append(one.place)
            else:
                good.append(f"{one.place}: {_SEEN[saw]}")
        if bad:
            found.append(Probe(name, False, "; ".join(bad)))
        elif missing:
            why = told if isinstance(told, str) else "the guest has told nothing"
            found.append(Skipped(name, why))
        else:
            found.append(Probe(name, True, "; ".join(good)))
    return found


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
