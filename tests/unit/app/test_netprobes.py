"""Probes of the network: what the host has seen counts, what a guest says is only what it says."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from cloche_server.app import netprobes
from cloche_server.app.netprobes import NetworkProbes
from cloche_server.app.selftest import Target
from cloche_server.core.errors import ClocheError
from cloche_server.core.network import NetworkMode, NetworkPolicy, Rule, RuleAction
from cloche_server.core.probes import Probe, Skipped
from cloche_server.guest.frames import Output
from cloche_server.host import witness

NONE = NetworkPolicy(NetworkMode.NONE)
LOCAL = "127.0.0.9"
"""Stands for an address of the host that others know it by."""


class Call:
    def __init__(self, output: bytes) -> None:
        self._output = output

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def __aiter__(self) -> AsyncIterator[Output]:
        # What it did happened before it tells of it.
        await asyncio.sleep(0.05)
        yield Output(1, 0, self._output)


class Guest:
    """`says` is given the plan, and may do more than talk."""

    def __init__(self, says: Any) -> None:
        self._says = says
        self.plan: list[list[Any]] = []

    def exec(self, wanted: Any) -> Call:
        if isinstance(self._says, ClocheError):
            raise self._says
        self.plan = json.loads(re.findall(r"'(\[\[.*\]\])'", wanted.argv[-1])[0])
        return Call(self._says(self.plan))


class Slot:
    """A network that opens what stands in `opened`, by address."""

    def __init__(self, opened: Mapping[str, str] | None = None) -> None:
        self.opened = opened

    async def inquire(self, op: str, machine_id: str, **fields: Any) -> Mapping[str, Any]:
        assert op == "explain"
        if self.opened is None:
            raise ClocheError("network.off", "nothing is carried here")
        rule = self.opened.get(fields["host"])
        return {"verdict": {"allowed": rule is not None, "rule": rule or "private-address"}}

    async def examine(self, machine_id: str) -> list[Probe | Skipped]:
        return [Probe("network.slot", True, "looked at")]


def all_say(word: str) -> Any:
    return lambda plan: "".join(f"{number} {word}\n" for number in range(len(plan))).encode()


@pytest.fixture(autouse=True)
def one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netprobes.witness, "outward", lambda: [LOCAL])


async def told(
    says: Any, policy: NetworkPolicy = NONE, opened: Mapping[str, str] | None = None, api: int | None = 8600
) -> dict[str, Probe | Skipped]:
    slot: Any = Slot(opened)
    machine: Any = None
    guest: Any = Guest(says)
    target = Target("s", machine, guest, Path("disk"), Path("mem"), policy)
    return {one.name: one for one in await NetworkProbes(slot, api).probe(target)}


async def test_what_is_refused_has_held() -> None:
    found = await told(all_say("refused"))
    assert all(isinstance(one, Probe) and one.held for name, one in found.items() if name != "network.host6")
    assert {f"network.{one}" for one in ("host", "api", "udp", "icmp", "dns", "metadata", "slot")} <= set(found)
    assert isinstance(found["network.host6"], Skipped)


@pytest.mark.parametrize(
    "says",
    [
        lambda plan: b"",
        lambda plan: b"\0\xff" * 40000,
        lambda plan: b"0 fine\n1 ok\n2 held\n",
        lambda plan: b"99999999999999999999 refused\n-1 refused\n\xd9\xa1 refused\n" * 100,
        ClocheError("sandbox.unreachable", "the agent does not answer"),
        lambda plan: b"none\n",
    ],
)
async def test_a_guest_that_says_nothing_of_use_is_no_proof(says: Any) -> None:
    found = await told(says)
    claimed = {name for name, one in found.items() if isinstance(one, Probe) and one.held}
    assert claimed == {"network.private", "network.slot"}, "what the host can tell by itself"
    assert all(one.reason for one in found.values() if isinstance(one, Skipped))


async def test_without_tools_it_says_so() -> None:
    found = await told(lambda plan: b"none\n")
    one = found["network.host"]
    assert isinstance(one, Skipped)
    assert "no tool in the guest" in one.reason


def _reaches(plan: list[list[Any]]) -> bytes:
    for kind, address, port, token in plan:
        if address == LOCAL and kind == "udp":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.sendto(token.encode(), (address, port))
        if address == LOCAL and kind == "tcp" and port != 8600:
            sender = socket.create_connection((address, port), 2)
            sender.sendall(token.encode())
            sender.close()
    return bytes(all_say("refused")(plan))


async def test_a_guest_that_lies_about_what_it_has_reached() -> None:
    found = await told(_reaches)
    for name in ("network.host", "network.udp"):
        one = found[name]
        assert isinstance(one, Probe)
        assert not one.held
        assert "it has arrived" in one.detail


async def test_what_a_rule_opens_is_told_and_no_failure() -> None:
    rules = tuple(Rule(one, RuleAction.ALLOW, cidr="0.0.0.0/0") for one in ("mine", "cloud", "lan"))
    policy = NetworkPolicy(NetworkMode.ALLOW_LIST, rules)
    opened = {LOCAL: "mine", netprobes.METADATA: "cloud", "10.0.0.1": "lan"}
    found = await told(_reaches, policy, opened)
    assert all(one.held for one in found.values() if isinstance(one, Probe))
    details = {name: one.detail for name, one in found.items() if isinstance(one, Probe)}
    assert "the rule mine opens it" in details["network.host"]
    assert "not tried: the rule cloud opens" in details["network.metadata"]
    assert "10.0.0.1 (lan)" in details["network.private"]
    assert isinstance(found["network.dns"], Skipped)


async def test_what_is_open_without_a_rule_is_a_failure() -> None:
    found = await told(all_say("refused"), NetworkPolicy(), {"10.0.0.1": "mode"})
    one = found["network.private"]
    assert isinstance(one, Probe)
    assert not one.held


async def test_an_answer_counts_when_the_host_cannot_see_it() -> None:
    found = await told(all_say("answered"))
    held = {name for name, one in found.items() if isinstance(one, Probe) and one.held}
    assert held == {"network.private", "network.slot"}


async def test_where_no_server_runs_its_port_is_not_tried() -> None:
    found = await told(all_say("refused"), api=None)
    assert isinstance(found["network.api"], Skipped)


@pytest.mark.thorough
async def test_the_program_of_the_guest_really_tries() -> None:
    """Run here, where nothing is in the way."""
    async with witness.listening([LOCAL], 0) as watching:
        plan = [
            ["tcp", LOCAL, watching.ports[LOCAL, "tcp"], "words-of-tcp"],
            ["udp", LOCAL, watching.ports[LOCAL, "udp"], "words-of-udp"],
            ["tcp", LOCAL, 1, "x"],
        ]
        words = [sys.executable, "-I", "-c", netprobes._PROGRAM, json.dumps(plan)]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=True)
        assert watching.saw("words-of-tcp")
        assert watching.saw("words-of-udp")
        assert not watching.saw("other words")
    assert set(done.stdout.splitlines()) == {"0 answered", "1 silent", "2 refused"}
