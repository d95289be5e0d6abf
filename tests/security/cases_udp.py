"""Bypass cases: datagrams. They are carried where a rule says so, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import Any

from cases import NONE, OPEN, Try, case
from town_kit import FOREIGN
from world_kit import A4, A6, B4, B6, METADATA4, NETD4, NETD6, PRIVATE4

from cloche_server.core.network import GATEWAY_IP4, GATEWAY_IP6, GUEST_IP4

UDP = "datagrams"
#: The port on which the hosts of the world send back what they hear.
ECHO = 7000


def rules(*allowed: dict[str, Any], mode: str = "allow-list", **more: Any) -> dict[str, Any]:
    made = [{"action": "allow", "protocol": "udp", "ports": [ECHO], **one} for one in allowed]
    return {"mode": mode, "rules": made, **more}


ALL = rules({"cidr": "0.0.0.0/0", "ports": ["1-65535"]}, {"cidr": "::/0", "ports": ["1-65535"]})


@case(UDP, "rule by network", "opens its addresses and ports, v4 and v6, and nothing beside them",
      rules({"cidr": A4}, {"cidr": A6}))  # fmt: skip
def _(t: Try) -> None:
    for address in (A4, A6):
        assert t.guest.udp(address, ECHO, b"hello") == b"hello", address
        assert t.guest.udp(address, 443) == "refused", address
    for address in (B4, B6, "8.8.8.8"):
        assert t.guest.udp(address, ECHO) == "refused", address
    assert t.guest.tcp(A4, ECHO, b"x") == "reset", "TCP is another matter"
    seen = {(one["verdict"], one["address"], one["port"]) for one in t.site.log() if one["kind"] == "udp"}
    assert {("allow", A4, ECHO), ("allow", A6, ECHO), ("deny", A4, 443), ("deny", B4, ECHO)} <= seen


@case(UDP, "rule by name", "opens the addresses that the resolver gives for it; a claimed address is none",
      rules({"domain": "a.test"}, {"domain": "*.wild.test", "ports": [443]}))  # fmt: skip
def _(t: Try) -> None:
    assert t.guest.udp(A4, ECHO, b"one") == b"one", "a name that is stated is looked up"
    assert t.guest.udp(B4, ECHO) == "refused"
    assert t.denied(kind="udp", rule="not-resolved", address=B4)
    assert t.guest.udp(A4, 443) == "refused", "that a wildcard has it was not heard of yet"
    assert t.guest.dns("x.wild.test") == [A4]
    assert t.guest.udp(A4, 443, b"two") == b"two"
    assert t.guest.dns("b.test") == ["REFUSED"]


@case(UDP, "name that leads inside", "its private addresses stay closed",
      rules({"domain": "rebind.a.test"}, {"domain": "toprivate.a.test"}, mode="open"))  # fmt: skip
def _(t: Try) -> None:
    for name in ("rebind.a.test", "toprivate.a.test"):
        assert t.guest.dns(name) == ["NODATA"], name
    for address in (PRIVATE4, METADATA4, NETD4, "127.0.0.2"):
        assert t.guest.udp(address, ECHO) in {"refused", "silent"}, address


@case(UDP, "rules that do not say UDP", "open TCP only, QUIC stays closed, in every mode", {
    "mode": "open", "rules": [{"action": "allow", "cidr": "0.0.0.0/0", "protocol": "any", "ports": [443, ECHO]},
                              {"action": "allow", "domain": "a.test"}]})  # fmt: skip
def _(t: Try) -> None:
    t.guest.dns("a.test")
    for port in (443, ECHO):
        assert t.guest.udp(A4, port) == "refused", port
    t.site.policy(**rules({"domain": "a.test"}, mode="open"))
    assert t.guest.udp(A4, ECHO, b"x") == b"x"
    for address in (A4, B4, B6):
        assert t.guest.udp(address, 443) == "refused", address


@case(UDP, "QUIC that a rule opens", "carried on port 443 to the name, and to nobody else",
      rules({"domain": "a.test", "ports": [443]}))  # fmt: skip
def _(t: Try) -> None:
    hello = b"\xc3\x00\x00\x00\x01" + bytes(1195)
    assert t.guest.udp(A4, 443, hello) == hello
    assert t.guest.udp(B4, 443, hello) == "refused"


@case(UDP, "deny rule before", "the first rule that matches decides, also one for both protocols", {
    "mode": "allow-list", "rules": [{"id": "no", "action": "deny", "cidr": B4},
                                    {"id": "yes", "action": "allow", "protocol": "udp", "cidr": "45.90.0.0/16",
                                     "ports": [ECHO]}]})  # fmt: skip
def _(t: Try) -> None:
    assert t.guest.udp(A4, ECHO, b"x") == b"x"
    assert t.guest.udp(B4, ECHO) == "refused"
    assert t.denied(kind="udp", rule="no")


@case(UDP, "datagrams in mode none", "refused, whatever rules say", {**ALL, **NONE})
def _(t: Try) -> None:
    for address in (A4, A6, B4):
        assert t.guest.udp(address, ECHO) == "refused", address
    assert not t.site.world.a.lines


@case(UDP, "places that are not public", "stay closed under a rule for all networks and ports", ALL)
def _(t: Try) -> None:
    t.site.town.settle()
    closed = (METADATA4, NETD4, NETD6, "169.254.1.1", GATEWAY_IP4, GATEWAY_IP6, FOREIGN, "198.19.0.1", "fd00:ec2::254",
              "64:ff9b::7f00:1", "2002:a9fe:a9fe::1")  # fmt: skip
    for address in closed:
        for port in (ECHO, 5300, 5302):
            assert t.guest.udp(address, port) == "refused", (address, port)
    assert t.site.town.heard == []
    assert t.guest.udp(A4, ECHO, b"x") == b"x"


@case(UDP, "metadata address that a rule opens for UDP", "opened, because somebody meant it",
      rules({"cidr": f"{METADATA4}/32"}, {"cidr": f"{PRIVATE4}/32"}), reaches=True)  # fmt: skip
def _(t: Try) -> None:
    assert t.guest.udp(METADATA4, ECHO, b"x") == b"x"
    assert t.guest.udp(PRIVATE4, ECHO, b"x") == b"x"
    assert t.guest.udp(A4, ECHO) == "refused"


def packet(source: str, target: str, port: int, payload: bytes, *, own_port: int = 4000, more: int = 0) -> bytes:
    """An IPv4 packet with a datagram in it; `more`: its field of flags and fragments."""
    udp = struct.pack("!HHHH", own_port, port, 8 + len(payload), 0) + payload
    return _ip(source, target, udp, more)


def _ip(source: str, target: str, content: bytes, more: int) -> bytes:
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(content), 77, more, 64, 17, 0)
    return head + socket.inet_aton(source) + socket.inet_aton(target) + content


def send_raw(*packets: tuple[str, bytes]) -> None:
    """Whole packets, each to the one who is named beside it."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for target, one in packets:
            sock.sendto(one, (target, 0))


def _heard(t: Try) -> list[str]:
    """What host A has heard, once everything that was sent before has arrived."""
    assert t.guest.udp(A4, ECHO, b"last") == b"last"
    return [line for line in t.site.world.a.lines if line.startswith("datagram")]


@case(UDP, "datagram with another source", "dropped: a guest has one address", ALL)
def _(t: Try) -> None:
    sources = ("192.168.127.1", "192.168.127.3", "10.0.0.1", "198.19.7.1", "127.0.0.1", B4, NETD4)
    t.guest.run(lambda: send_raw(*((A4, packet(one, A4, ECHO, b"spoofed")) for one in sources)))

    def by_link_local() -> None:
        os.system("ip addr add fe80::7/64 dev eth0 nodad; ip addr add fd00:dead::7/128 dev eth0 nodad")
        try:
            for source in ("fe80::7", "fd00:dead::7"):
                with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
                    sock.bind((source, 0, 0, socket.if_nametoindex("eth0") if source == "fe80::7" else 0))
                    sock.sendto(b"spoofed", (A6, ECHO))
        finally:
            os.system("ip addr del fe80::7/64 dev eth0; ip addr del fd00:dead::7/128 dev eth0")

    t.guest.run(by_link_local)
    assert len(_heard(t)) == 1


@case(UDP, "broadcast and multicast", "dropped, also under a rule for everything", ALL)
def _(t: Try) -> None:
    targets = ("255.255.255.255", "224.0.0.251", "239.255.255.250", "45.90.0.255", "192.168.127.3")
    t.guest.run(lambda: send_raw(*((one, packet(GUEST_IP4, one, ECHO, b"all")) for one in targets)))

    def multicast6() -> None:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, socket.if_nametoindex("eth0"))
            sock.sendto(b"all", ("ff02::fb", ECHO))

    t.guest.run(multicast6)
    assert len(_heard(t)) == 1
    assert not [one for one in t.site.log() if one["verdict"] == "allow" and one["address"] in targets]


@case(UDP, "addresses that mean the host itself", "0.0.0.0 and :: are nobody's", ALL)
def _(t: Try) -> None:
    got: list[bytes] = []

    def listen() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 7077))
        sock.setblocking(False)
        return sock

    with t.site.host(listen) as inside:
        targets = ("0.0.0.0", "127.0.0.1", "127.1.2.3")
        t.guest.run(lambda: send_raw(*((A4, packet(GUEST_IP4, one, 7077, b"in")) for one in targets)))
        assert len(_heard(t)) == 1
        with contextlib.suppress(BlockingIOError):
            got.append(inside.recv(100))
    assert got == []


@case(UDP, "fragments", "put together before they are judged; what is incomplete or overlaps goes nowhere", ALL)
def _(t: Try) -> None:
    large = os.urandom(20_000)
    assert t.guest.udp(A4, ECHO, large[:4000]) == large[:4000]
    assert t.guest.udp(A6, ECHO, large[:4000]) == large[:4000]
    t.site.world.a.clear()
    # The first piece is for a place that is closed, or there is none; the second one names another port.
    whole = struct.pack("!HHHH", 4000, ECHO, 8 + 64, 0) + bytes(64)
    t.guest.run(
        lambda: send_raw(
            (A4, _ip(GUEST_IP4, A4, whole[32:], 4)),
            (METADATA4, _ip(GUEST_IP4, METADATA4, whole[:32], 0x2000)),
            (A4, _ip(GUEST_IP4, A4, whole[32:], 4)),
            (A4, _ip(GUEST_IP4, A4, whole[:32], 0x2000 | 1)),
        )
    )
    assert len(_heard(t)) == 1


@case(UDP, "large datagrams", "go through whole, in both directions, up to what a datagram can be", ALL)
def _(t: Try) -> None:
    for address in (A4, A6):
        for size in (0, 1, 1472, 1473, 9000, 65_000):
            sent = os.urandom(size)

            def talk(address: str = address, sent: bytes = sent) -> bytes:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                with socket.socket(family, socket.SOCK_DGRAM) as sock:
                    sock.settimeout(3)
                    sock.connect((address, ECHO))
                    sock.send(sent)
                    return sock.recv(70_000)

            assert t.guest.run(talk) == sent, (address, size)


@case(UDP, "port 53 under a rule for all ports", "the platform's resolver answers, and nothing reaches the address",
      rules({"domain": "a.test"}, {"cidr": "45.90.0.0/16", "ports": ["1-65535"]}))  # fmt: skip
def _(t: Try) -> None:
    for address in (B4, A4, "8.8.8.8"):
        assert t.guest.dns("a.test", server=address) == [A4], address
        assert t.guest.dns("b.test", server=address) == ["REFUSED"], address
        assert t.guest.udp(address, 53, b"no question at all") != b"no question at all"
    assert t.site.world.b.lines == []
    assert all(name.startswith("a.test") for name in t.site.world.zone.lines)


@case(UDP, "datagram from port 53", "carried or refused as any other",
      rules({"cidr": A4}))  # fmt: skip
def _(t: Try) -> None:
    def from_53(address: str) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(1)
            sock.bind(("0.0.0.0", 53))
            sock.connect((address, ECHO))
            try:
                sock.send(b"x")
                return sock.recv(10).decode()
            except OSError as error:
                return type(error).__name__

    assert t.guest.run(lambda: from_53(A4)) == "x"
    assert t.guest.run(lambda: from_53(B4)) != "x"


@case(UDP, "answer from another source", "only who was asked can answer",
      rules({"cidr": A4, "ports": [7100]}))  # fmt: skip
def _(t: Try) -> None:
    def world(address: str, port: int) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.settimeout(3)
        sock.bind((address, port))
        return sock

    space = t.site.world.inside
    asked, stranger, other_port = (space(lambda at=at: world(*at)) for at in ((A4, 7100), (B4, 7100), (A4, 7101)))
    with asked, stranger, other_port:

        def ask() -> bytes:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.settimeout(3)
                sock.bind(("0.0.0.0", 0))
                sock.sendto(b"question", (A4, 7100))
                _, caller = asked.recvfrom(100)
                stranger.sendto(b"wrong", caller)
                other_port.sendto(b"wrong", caller)
                asked.sendto(b"right", caller)
                answer, source = sock.recvfrom(100)
                assert source == (A4, 7100)
                return answer

        assert t.guest.run(ask) == b"right"


@case(UDP, "port that nobody listens on", "refused as by its host",
      rules({"cidr": A4, "ports": [7999]}, {"cidr": A6, "ports": [7999]}))  # fmt: skip
def _(t: Try) -> None:
    for address in (A4, A6):
        assert t.guest.udp(address, 7999) == "refused", address
        assert not t.denied(kind="udp", address=address)


@case(UDP, "policy that changes while a flow is open", "cut at once, and open again at once", rules({"cidr": A4}))
def _(t: Try) -> None:
    assert t.guest.udp(A4, ECHO, b"1") == b"1"
    assert t.site.policy(mode="none") == 1
    assert t.guest.udp(A4, ECHO) == "refused"
    t.site.policy(**rules({"cidr": B4}))
    assert t.guest.udp(A4, ECHO) == "refused"
    t.site.policy(**rules({"cidr": A4}))
    assert t.guest.udp(A4, ECHO, b"2") == b"2"
    ends = [one for one in t.site.log() if one["end"] and one["kind"] == "udp"]
    assert [(one["bytes_sent"], one["bytes_received"], one["reason"]) for one in ends] == [
        (1, 1, "cut: the policy changed")
    ]


@case(UDP, "limits of datagrams", "flows are connections, their bytes count, and what is used up is cut",
      rules({"cidr": A4, "ports": ["1-65535"]}, limits={"total_mb": 1, "connections": 2}))  # fmt: skip
def _(t: Try) -> None:
    assert t.guest.udp(A4, ECHO, b"x") == b"x"
    assert t.guest.udp(A4, 443, b"x") == b"x"
    assert t.guest.udp(A4, ECHO, b"x") == "refused", "another port of the guest is another flow"
    assert t.denied(kind="udp", rule="limit")
    t.site.renew(**rules({"cidr": A4}, limits={"total_mb": 1}))

    def push() -> int:
        carried = 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(1)
            sock.connect((A4, ECHO))
            try:
                while carried < 8 << 20:
                    sock.send(bytes(30_000))
                    carried += len(sock.recv(40_000))
            except OSError:
                pass
        return carried

    assert t.guest.run(push) < 1 << 20
    assert t.guest.udp(A4, ECHO) == "refused"


@case(UDP, "flood of flows", "the oldest make room, others and names go on, and the log is told a part", ALL)
def _(t: Try) -> None:
    def flood() -> None:
        for number in range(1500):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                with_error = sock.connect_ex((A4 if number % 3 else METADATA4, 8000 + number))
                assert with_error == 0
                sock.send(b"x")

    t.guest.run(flood)
    answers = (t.guest.udp(A4, ECHO, b"still") for _ in range(20))
    assert next(one for one in answers if one != "silent") == b"still"
    assert t.guest.dns("b.test") == ["REFUSED"]
    assert t.guest.tcp(A4, ECHO, b"x") == "reset"
    assert t.site.netd.call("stats", sandbox="box")["open"] <= 513


@case(UDP, "learning", "what was refused is proposed, but not QUIC, which falls back", {**OPEN, "learn": True})
def _(t: Try) -> None:
    t.guest.dns("a.test")
    for port in (443, ECHO):
        assert t.guest.udp(A4, port) == "refused"
    found = t.site.netd.call("learned", sandbox="box")["rules"]
    assert {(one["domain"], *one.get("ports", ()), one.get("protocol")) for one in found} == {
        ("a.test", ECHO, "udp"),
    }
    began = time.monotonic()
    assert t.guest.udp(B4, 123) == "refused"
    assert time.monotonic() - began < 3
