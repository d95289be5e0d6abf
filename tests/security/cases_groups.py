"""Bypass cases: private networks. Who is in a group reaches its members, and nobody else does."""

from __future__ import annotations

import os
import socket
import time

from cases import NONE, ONLY_A, OPEN, Try, case
from town_kit import BOX, DB, FOREIGN, UDP, hello, member

from cloche_server.core.network import GUEST_IP4

GROUPS = "groups"
NAMES = ("db", "db.team.internal", "DB.Team.Internal.")
ALL = {"mode": "allow-list", "rules": [{"id": "wide", "action": "allow", "cidr": "198.18.0.0/15"}]}


def _quick(t: Try, address: str, port: int = 9000) -> bool:
    """Whether a connection is refused, and at once."""
    began = time.monotonic()
    answer = t.guest.tcp(address, port, b"x")
    return answer in {"reset", "refused"} and time.monotonic() - began < 3


@case(GROUPS, "member by its names", "resolved and reached without any internet, and it sees who calls", NONE)
def _(t: Try) -> None:
    t.site.town.settle()
    for name in NAMES:
        assert t.guest.dns(name) == [DB], name
        assert t.guest.dns(name, "AAAA") == ["NODATA"], name
    assert t.guest.dns("db", tcp=True) == [DB]
    assert t.guest.dns("b.test") == ["REFUSED"]
    for port in (80, 443, 9000, 53):
        assert hello(t.guest.tcp(DB, port, b"ping\n", until=b"ping\n")) == f"db hears {BOX}", port
    assert t.site.world.zone.lines == []
    seen = [one for one in t.site.log() if one["kind"] == "tcp" and not one["end"]]
    assert {(one["verdict"], one["rule"], one["name"], one["address"]) for one in seen} == {
        ("allow", "group", "db", DB)
    }


@case(GROUPS, "group beside a policy", "rules neither open nor close what is inside a group", {
    "mode": "open", "rules": [{"id": "no", "action": "deny", "cidr": "0.0.0.0/0"},
                              {"id": "nor", "action": "deny", "domain": "db"}]})  # fmt: skip
def _(t: Try) -> None:
    t.site.town.settle()
    assert t.guest.dns("db") == [DB]
    assert hello(t.guest.tcp(DB, 9000, b"x\n", until=b"x\n")) == f"db hears {BOX}"


@case(GROUPS, "group of the same name in another workspace", "neither its names nor its addresses lead there", OPEN)
def _(t: Try) -> None:
    t.site.town.settle()
    for name in ("foreign.team.internal", "foreign"):
        assert t.guest.dns(name) == ["NXDOMAIN"], name
    assert _quick(t, FOREIGN)
    # The same number is somebody else there.
    t.site.town.groups(member("foreign", DB), workspace="x")
    assert hello(t.guest.tcp(DB, 9000, b"x\n", until=b"x\n")) == f"db hears {BOX}"
    assert [one for one, _ in t.site.town.heard] == ["db"]


@case(GROUPS, "sandbox without a group", "sees no member, by name or by address", ONLY_A)
def _(t: Try) -> None:
    t.site.town.settle()
    t.site.town.groups(member("db", DB))
    for name in NAMES:
        assert t.guest.dns(name) == ["REFUSED"], name
    assert all(_quick(t, DB, port) for port in (9000, 22, 5432))
    assert t.site.town.heard == []
    assert t.denied(rule="group", address=DB)


@case(GROUPS, "addresses of members that are nobody's", "refused at once, also where a rule opens the range", ALL)
def _(t: Try) -> None:
    t.site.town.settle()
    for address in ("198.19.0.1", "198.19.255.254", FOREIGN, "64:ff9b::c613:703", "2002:c613:703::1"):
        assert _quick(t, address), address
    for port in (5301, 5300, 22):
        assert _quick(t, "198.19.0.1", port), port
    assert t.guest.udp("198.19.0.1", 9000) == "refused"
    assert t.denied(rule="group", address="198.19.0.1")
    assert t.site.town.heard == []


@case(GROUPS, "public name with the address of a member", "taken out of the answer, like everything inside", OPEN)
def _(t: Try) -> None:
    t.site.town.settle()
    assert t.guest.dns("togroup.a.test") == ["NODATA"]


@case(GROUPS, "name in the zone of the group", "does not exist unless it is a member's, and nobody is asked", OPEN)
def _(t: Try) -> None:
    t.site.town.settle()
    assert t.guest.dns("secret-data.team.internal") == ["NXDOMAIN"]
    assert t.guest.dns("secret-data.db.team.internal", "TXT") == ["NXDOMAIN"]
    assert t.site.world.zone.lines == []


@case(GROUPS, "member that is named like a host of the internet", "does not take its place", OPEN)
def _(t: Try) -> None:
    t.site.town.settle()
    t.site.town.groups(member("box", BOX), member("db", DB, shown="a.test"))
    assert t.guest.dns("a.test") == ["45.90.1.10"]
    assert t.guest.dns("a.test.team.internal") == [DB]
    assert t.guest.dns("db") == [DB]


@case(
    GROUPS, "member that leaves while it is called", "the connection is cut, its name is gone, others are refused", NONE
)
def _(t: Try) -> None:
    t.site.town.settle()

    def held() -> str:
        with socket.create_connection((DB, 9000), timeout=5) as sock:
            assert sock.recv(100)
            t.site.town.groups(member("box", BOX))
            try:
                sock.sendall(b"more")
                return "cut" if sock.recv(10) == b"" else "open"
            except OSError:
                return "cut"

    assert t.guest.run(held) == "cut"
    assert t.guest.dns("db.team.internal") == ["NXDOMAIN"]
    assert t.guest.dns("db") == ["REFUSED"]
    assert _quick(t, DB)


@case(GROUPS, "caller that leaves while it calls", "its connection is cut, and it sees nobody any more", NONE)
def _(t: Try) -> None:
    t.site.town.settle()

    def held() -> str:
        with socket.create_connection((DB, 9000), timeout=5) as sock:
            assert sock.recv(100)
            t.site.town.groups(member("db", DB))
            try:
                return "cut" if sock.recv(10) == b"" else "open"
            except OSError:
                return "cut"

    assert t.guest.run(held) == "cut"
    assert t.guest.dns("db") == ["REFUSED"]
    assert _quick(t, DB)


@case(GROUPS, "member whose machine ends", "its connections end at once; new ones are refused and say why", NONE)
def _(t: Try) -> None:
    t.site.town.settle()

    def held() -> str:
        with socket.create_connection((DB, 9000), timeout=5) as sock:
            assert sock.recv(100)
            t.site.town.detach("db")
            try:
                return "cut" if sock.recv(10) == b"" else "open"
            except OSError:
                return "cut"

    assert t.guest.run(held) == "cut"
    t.site.town.groups(member("box", BOX), member("db", DB, status="hibernated"))
    assert t.guest.dns("db") == [DB], "it lives"
    assert _quick(t, DB)
    assert t.denied(rule="group", reason="the member is hibernated")
    t.site.town.attach("db")
    t.site.town.groups(member("box", BOX), member("db", DB))
    assert hello(t.guest.tcp(DB, 9000, b"x\n", until=b"x\n")) == f"db hears {BOX}"


@case(GROUPS, "member that is paused", "refused at once, instead of an answer that never comes", NONE)
def _(t: Try) -> None:
    t.site.town.settle()
    t.site.town.groups(member("box", BOX), member("db", DB, status="paused"))
    assert _quick(t, DB)
    assert t.denied(rule="group", reason="the member is paused")


@case(GROUPS, "port of a member that nobody listens on", "reset at once", NONE)
def _(t: Try) -> None:
    t.site.town.settle()
    assert all(_quick(t, DB, port) for port in (1, 22, 5432, 65535))


@case(GROUPS, "packets with the address of another member", "dropped: a guest has one address", NONE)
def _(t: Try) -> None:
    t.site.town.settle()

    def spoof() -> str:
        os.system(f"ip addr add {BOX}/32 dev eth0; ip addr add 198.19.7.9/32 dev eth0")
        try:
            for source in (BOX, "198.19.7.9"):
                with socket.socket() as sock:
                    sock.settimeout(0.7)
                    sock.bind((source, 0))
                    try:
                        sock.connect((DB, 9000))
                        return "answered"
                    except OSError:
                        pass
        finally:
            os.system(f"ip addr del {BOX}/32 dev eth0; ip addr del 198.19.7.9/32 dev eth0")
        return "refused"

    assert t.guest.run(spoof) == "refused"
    assert t.site.town.heard == []


@case(GROUPS, "itself, by its name in the group", "reaches its own servers, and no other's", NONE)
def _(t: Try) -> None:
    t.site.town.settle()

    def self_call() -> bytes:
        with socket.create_server(("0.0.0.0", 9100)) as server:
            with socket.create_connection((BOX, 9100), timeout=5) as sock:
                server.settimeout(5)
                peer, caller = server.accept()
                with peer:
                    peer.sendall(caller[0].encode())
                    return sock.recv(100)

    assert t.guest.run(self_call) == BOX.encode()
    assert t.guest.tcp(GUEST_IP4, 9000, b"x") in {"reset", "refused"}, "its own address is its own"


@case(GROUPS, "limits", "what is carried inside a group counts, and ends with them", {
    "mode": "none", "limits": {"total_mb": 1}})  # fmt: skip
def _(t: Try) -> None:
    t.site.town.settle()

    def push() -> int:
        carried = 0
        try:
            with socket.create_connection((DB, 9000), timeout=5) as sock:
                while carried < 8 << 20:
                    sock.sendall(bytes(65536))
                    carried += len(sock.recv(65536))
        except OSError:
            pass
        return carried

    assert t.guest.run(push) < 2 << 20
    assert _quick(t, DB)
    assert t.denied(rule="limit", address=DB)


@case(GROUPS, "datagrams to a member", "carried without any rule, it sees who sends, and only it answers", NONE)
def _(t: Try) -> None:
    t.site.town.settle()
    for size in (0, 4, 9000, 60_000):
        sent = os.urandom(size)

        def talk(sent: bytes = sent) -> bytes:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.settimeout(5)
                sock.connect((DB, UDP))
                sock.send(sent)
                return sock.recv(65535)

        assert t.guest.run(talk) == f"db hears {BOX}\n".encode() + sent, size
    assert t.guest.udp(BOX, UDP) == "silent", "itself, where nobody listens"
    for address in (FOREIGN, "198.19.0.1", "45.90.1.10"):
        assert t.guest.udp(address, UDP) == "refused", address
    assert {one for one, _ in t.site.town.heard} == {"db"}
    begun = [one for one in t.site.log() if one["kind"] == "udp" and one["address"] == DB and not one["end"]]
    assert {(one["verdict"], one["rule"], one["name"]) for one in begun} == {("allow", "group", "db")}
    theirs = t.site.netd.call("log", sandbox="db", limit=100)["entries"]
    assert theirs == [], "an answer is no call of its own"


@case(GROUPS, "datagrams to who is no member", "refused, from outside of the group and to who has left it", OPEN)
def _(t: Try) -> None:
    t.site.town.settle()
    t.site.town.groups(member("db", DB))
    assert t.guest.udp(DB, UDP) == "refused", "in no group"
    t.site.town.groups(member("box", BOX))
    assert t.guest.udp(DB, UDP) == "refused"
    assert t.guest.udp(FOREIGN, UDP) == "refused"
    assert t.site.town.heard == []


@case(GROUPS, "datagrams when a member leaves, sleeps or ends", "the flow is cut, others are refused and say why", NONE)
def _(t: Try) -> None:
    t.site.town.settle()

    def held() -> list[str]:
        found: list[str] = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(5)
            sock.connect((DB, UDP))
            for act in (
                lambda: None,
                lambda: t.site.town.groups(member("box", BOX), member("db", DB, status="paused")),
                lambda: t.site.town.groups(member("box", BOX), member("db", DB)),
                lambda: t.site.town.detach("db"),
                lambda: t.site.town.attach("db"),
                lambda: t.site.town.groups(member("box", BOX)),
            ):
                act()
                try:
                    sock.send(b"x")
                    found.append(sock.recv(100).decode())
                except ConnectionError:
                    found.append("refused")
                except PermissionError:
                    found.append("refused")
                except OSError as error:
                    found.append("refused" if error.errno in {1, 13, 113} else repr(error))
        return found

    answer = f"db hears {BOX}\nx"
    assert t.guest.run(held) == [answer, "refused", answer, "refused", answer, "refused"]
    assert t.denied(rule="group", reason="the member is paused")
    ends = [one["reason"] for one in t.site.log() if one["kind"] == "udp" and one["end"]]
    assert ends == ["upstream: the member is paused", "upstream: the member has no network now",
                    "cut: one of the two has left the group"]  # fmt: skip


@case(GROUPS, "datagrams with the address of another member", "dropped: a guest has one address", NONE)
def _(t: Try) -> None:
    t.site.town.settle()

    def spoof() -> None:
        for source in (BOX, DB, "198.19.7.9"):
            os.system(f"ip addr add {source}/32 dev eth0")
            try:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                    sock.bind((source, 0))
                    sock.sendto(b"spoofed", (DB if source != DB else BOX, UDP))
            finally:
                os.system(f"ip addr del {source}/32 dev eth0")

    t.guest.run(spoof)
    assert t.guest.udp(DB, UDP, b"x") == f"db hears {BOX}\nx".encode()
    assert len(t.site.town.heard) == 1


@case(GROUPS, "limits of datagrams in a group", "flows and bytes count, and end with them", {
    "mode": "none", "limits": {"total_mb": 1, "connections": 1}})  # fmt: skip
def _(t: Try) -> None:
    t.site.town.settle()
    assert t.guest.udp(DB, UDP, b"x") == f"db hears {BOX}\nx".encode()
    assert t.guest.udp(DB, UDP) == "refused", "another port of the guest is another flow"
    assert t.denied(kind="udp", rule="limit")
    t.site.renew(mode="none", limits={"total_mb": 1})
    t.site.town.groups(member("box", BOX), member("db", DB))

    def push() -> int:
        carried = 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(3)
            sock.connect((DB, UDP))
            try:
                while carried < 8 << 20:
                    sock.send(bytes(30_000))
                    carried += len(sock.recv(40_000))
            except OSError:
                pass
        return carried

    assert t.guest.run(push) < 1 << 20
    assert t.guest.udp(DB, UDP) == "refused"
