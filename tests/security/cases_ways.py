"""Bypass cases: other protocols, other destinations, limits and live changes."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable

from cases import NONE, ONLY_A, OPEN, Try, case
from guest_kit import client_hello
from world_kit import A4, A6, B4, B6, METADATA4, NETD4, NETD4_INNER, NETD6, PRIVATE4

WAYS = "other ways out"
PLACES = "places"
LIVE = "live"


@case(WAYS, "deny-all: TCP", "refused at once on every port, v4 and v6", NONE)
def _(t: Try) -> None:
    for address in (A4, A6, B4, B6, "8.8.8.8"):
        assert t.guest.tcp(address, 7000, b"x") == "reset"
    assert t.guest.tls(A4, "a.test") == "alert"
    assert t.guest.http(A4, "a.test").startswith(b"HTTP/1.1 403")  # type: ignore[union-attr]
    assert not t.site.world.a.lines


@case(WAYS, "QUIC and other UDP", "refused at once, so that clients fall back", OPEN)
def _(t: Try) -> None:
    for address in (A4, B4, A6):
        for port in (443, 80, 5300, 4500):
            assert t.guest.udp(address, port) == "refused", (address, port)


@case(WAYS, "NTP", "refused", OPEN)
def _(t: Try) -> None:
    assert t.guest.udp(B4, 123, b"\x1b" + bytes(47)) == "refused"


@case(WAYS, "mDNS, SSDP and DHCP", "no answer", OPEN)
def _(t: Try) -> None:
    for address, port in (("224.0.0.251", 5353), ("239.255.255.250", 1900), ("192.168.127.1", 67)):
        assert t.guest.udp(address, port) in {"refused", "silent"}


def _ping(address: str) -> str:
    family, protocol = (socket.AF_INET6, 58) if ":" in address else (socket.AF_INET, 1)
    with socket.socket(family, socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(0.7)
        kind = 128 if ":" in address else 8
        message = struct.pack("!BBHHH", kind, 0, 0, 7, 1) + b"SECRET"
        total = sum(struct.unpack(f"!{len(message) // 2}H", message))
        total = (total >> 16) + (total & 0xFFFF)
        message = message[:2] + struct.pack("!H", ~total & 0xFFFF) + message[4:]
        try:
            sock.sendto(message, (address, 0))
            while True:
                data = sock.recv(2048)
                answer = data[0] if ":" in address else data[20]
                if answer in {0, 129}:
                    return "answered"
        except TimeoutError:
            return "silent"
        except OSError:
            return "refused"


@case(WAYS, "ICMP with a payload", "no echo from anywhere but the gateway", OPEN)
def _(t: Try) -> None:
    for address in (B4, B6, NETD4):
        assert t.guest.run(lambda address=address: _ping(address)) != "answered", address


@case(WAYS, "SCTP, GRE and raw IP", "nothing comes back", OPEN)
def _(t: Try) -> None:
    def raw(protocol: int) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, protocol) as sock:
            sock.settimeout(0.3)
            try:
                sock.sendto(bytes(32), (B4, 0))
                sock.recv(2048)
            except TimeoutError:
                return "silent"
            except OSError:
                return "refused"
            return "answered"

    for protocol in (132, 47, 50, 99):
        assert t.guest.run(lambda protocol=protocol: raw(protocol)) != "answered", protocol


@case(WAYS, "CONNECT to a host that is allowed", "refused under an allow-list: there is no proxy", ONLY_A)
def _(t: Try) -> None:
    for host in ("a.test:443", "b.test:443", f"{B4}:443"):
        answer = t.guest.tcp(A4, 80, f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(), until=b"}")
        assert isinstance(answer, bytes)
        assert answer.startswith(b"HTTP/1.1 403")
    assert not t.site.world.a.lines


@case(WAYS, "CONNECT and SOCKS to the gateway", "no proxy answers there", OPEN)
def _(t: Try) -> None:
    assert t.guest.tcp("192.168.127.1", 5301, b"CONNECT b.test:443 HTTP/1.1\r\n\r\n") in {"reset", "refused"}
    assert t.guest.tcp("192.168.127.1", 1080, b"\x05\x01\x00") in {"reset", "refused"}


@case(WAYS, "HTTP to B by Host of A", "refused with a reason that curl shows", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test")
    answer = t.guest.http(B4, "a.test")
    assert isinstance(answer, bytes)
    assert answer.startswith(b"HTTP/1.1 403")
    assert b'"code": "network.denied"' in answer
    assert b'"rule": "not-resolved"' in answer


@case(WAYS, "HTTP to B by its own Host", "refused with a reason", ONLY_A)
def _(t: Try) -> None:
    answer = t.guest.http(B4, "b.test")
    assert isinstance(answer, bytes)
    assert b'"host": "b.test"' in answer


@case(WAYS, "two Host headers", "refused", ONLY_A)
def _(t: Try) -> None:
    head = b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n"
    assert b" 403 " in t.guest.tcp(A4, 80, head, until=b"}")  # type: ignore[operator]
    assert not t.site.world.a.lines


@case(WAYS, "Host header with folding or spaces", "refused", ONLY_A)
def _(t: Try) -> None:
    for line in (b"Host : a.test", b"X: y\r\n Host: a.test", b"Host: a.test b.test", b"Host: a.test\x00"):
        answer = t.guest.tcp(A4, 80, b"GET / HTTP/1.1\r\n" + line + b"\r\n\r\n", until=b"}")
        assert isinstance(answer, bytes), line
        assert answer.startswith(b"HTTP/1.1 403"), line
    assert not t.site.world.a.lines


@case(WAYS, "request line for another host", "refused: it and the Host header have to agree", ONLY_A)
def _(t: Try) -> None:
    head = b"GET http://b.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n"
    assert b" 403 " in t.guest.tcp(A4, 80, head, until=b"}")  # type: ignore[operator]
    assert not t.site.world.a.lines


@case(WAYS, "HTTP/0.9 and bare line ends", "refused", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test")
    for head in (b"GET /\r\n", b"\x20GET / HTTP/1.1\n\n"):
        assert t.guest.tcp(A4, 80, head) == "reset", head
    assert not t.site.world.a.lines


# ------------------------------------------------------------------ places


@case(PLACES, "metadata address", "refused in every mode", OPEN)
def _(t: Try) -> None:
    assert b" 403 " in t.guest.http(METADATA4, "169.254.169.254", "/latest/meta-data/")  # type: ignore[operator]
    assert t.guest.tcp("fd00:ec2::254", 7000, b"x") == "reset"
    assert t.denied(rule="private-address", address=METADATA4)


@case(PLACES, "metadata under a rule for everything", "`0.0.0.0/0` does not open it", {
    "mode": "allow-list", "rules": [{"id": "all", "action": "allow", "cidr": "0.0.0.0/0"},
                                    {"id": "local", "action": "allow", "cidr": "169.254.0.0/16"}]})  # fmt: skip
def _(t: Try) -> None:
    assert t.guest.tcp(METADATA4, 7000, b"x") == "reset"
    assert t.guest.tcp(NETD4, 7000, b"x") == "reset"


@case(PLACES, "metadata under a rule for exactly it", "opened, because somebody meant it", {
    "mode": "allow-list", "rules": [{"id": "meta", "action": "allow", "cidr": f"{METADATA4}/32"}]},
    reaches=True)  # fmt: skip
def _(t: Try) -> None:
    assert t.guest.tcp(METADATA4, 7000, b"echo\n", until=b"\n") == b"echo\n"


@case(PLACES, "private networks", "refused in an open sandbox", OPEN)
def _(t: Try) -> None:
    for address in (PRIVATE4, "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd00::1", "fc00::1"):
        assert t.guest.tcp(address, 7000, b"x") == "reset", address


@case(PLACES, "addresses of the host", "refused, also where a rule opens the networks around them", {
    "mode": "open", "rules": [{"id": "wide", "action": "allow", "cidr": "45.90.0.0/24"},
                              {"id": "wide6", "action": "allow", "cidr": "2a0f:9400::/64"}]})  # fmt: skip
def _(t: Try) -> None:
    for address in (NETD4, NETD6):
        assert t.guest.tcp(address, 7000, b"x") == "reset", address
        assert t.guest.tcp(address, 22, b"x") == "reset", address
    assert t.denied(rule="private-address", address=NETD4)


@case(PLACES, "public neighbours of the host", "reached: they are public", OPEN, reaches=True)
def _(t: Try) -> None:
    assert t.guest.tcp(NETD4_INNER, 7000, b"echo\n", until=b"\n") == b"echo\n"


@case(PLACES, "loopback through the gateway", "refused", OPEN)
def _(t: Try) -> None:
    assert t.guest.tcp("::ffff:127.0.0.1", 7000, b"x") in {"reset", "refused"}
    assert t.guest.tcp("0.0.0.0", 7000, b"x") in {"reset", "refused"}


@case(PLACES, "ports of the gateway", "nothing answers but the resolver", OPEN)
def _(t: Try) -> None:
    for port in (22, 80, 443, 5300, 5301, 8000, 9090):
        for address in ("192.168.127.1", "fd00:c10c:e::1"):
            answer = t.guest.tcp(address, port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", until=b"}")
            assert answer in {"reset", "refused"} or b" 403 " in answer, (address, port)  # type: ignore[operator]


@case(PLACES, "link-local addresses of the gateway", "refused", OPEN)
def _(t: Try) -> None:
    def reach() -> str:
        index = socket.if_nametoindex("eth0")
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.settimeout(2)
            try:
                sock.connect(("fe80::c1:cff:fe00:1", 7000, 0, index))
                return "reset" if sock.recv(10) == b"" else "answered"
            except OSError:
                return "refused"

    assert t.guest.run(reach) != "answered"


@case(PLACES, "IPv4 inside IPv6", "6to4, NAT64 and Teredo are judged by what they carry", OPEN)
def _(t: Try) -> None:
    for address in ("64:ff9b::a4d:a", "2002:a4d:a::1", "64:ff9b::7f00:1", "2002:7f00:1::1", "64:ff9b:1::1"):
        assert t.guest.tcp(address, 7000, b"x") in {"reset", "refused"}, address


@case(PLACES, "multicast, broadcast and reserved addresses", "refused", OPEN)
def _(t: Try) -> None:
    for address in ("240.0.0.1", "203.0.113.1", "198.18.0.1", "192.0.2.1", "2001:db8::1", "0.1.2.3", "192.0.0.8"):
        assert t.guest.tcp(address, 7000, b"x") in {"reset", "refused"}, address


@case(PLACES, "addresses in decimal and octal", "they end at the same address and the same refusal", OPEN)
def _(t: Try) -> None:
    for text in ("2852039166", "0251.0376.0251.0376", "0xa9fea9fe", "169.16689662"):
        packed = socket.inet_ntoa(socket.inet_aton(text))
        assert packed == METADATA4
        assert t.guest.tcp(text, 7000, b"x") in {"reset", "refused"}, text


@case(PLACES, "literal address under an allow-list", "only a rule with a network opens it", {
    "mode": "allow-list",
    "rules": [{"id": "net", "action": "allow", "cidr": A4, "ports": [7000, "440-450"]}]})  # fmt: skip
def _(t: Try) -> None:
    assert t.guest.tcp(A4, 7000, b"echo\n", until=b"\n") == b"echo\n"
    assert t.guest.tls(A4, None) == "ok"
    assert t.guest.tcp(A4, 22) == "reset"
    assert t.guest.tcp(B4, 7000, b"x") == "reset"
    assert t.guest.dns("a.test") == ["REFUSED"]


# ------------------------------------------------------------------ live


def _held(address: str, port: int, change: Callable[[], object]) -> str:
    with socket.create_connection((address, port), timeout=5) as sock:
        sock.sendall(b"one")
        assert sock.recv(10) == b"one"
        change()
        try:
            sock.sendall(b"two")
            return "cut" if sock.recv(10) == b"" else "open"
        except OSError:
            return "cut"


@case(LIVE, "policy to none while a connection is open", "the connection is cut at once", OPEN)
def _(t: Try) -> None:
    cut: list[int] = []
    assert t.guest.run(lambda: _held(A4, 7000, lambda: cut.append(t.site.policy(mode="none")))) == "cut"
    assert cut == [1]


@case(LIVE, "policy to another host while a connection is open", "cut; what stays allowed stays open", OPEN)
def _(t: Try) -> None:
    other = {"mode": "allow-list", "rules": [{"action": "allow", "cidr": A4}]}
    assert t.guest.run(lambda: _held(A4, 7000, lambda: t.site.policy(**other))) == "open"
    other = {"mode": "allow-list", "rules": [{"action": "allow", "cidr": B4}]}
    assert t.guest.run(lambda: _held(A4, 7000, lambda: t.site.policy(**other))) == "cut"


@case(
    LIVE, "open connection to B that claims A, then a policy for A", "cut: the name was never true", OPEN, reaches=True
)
def _(t: Try) -> None:
    hello = client_hello(b"a.test")

    def lie() -> str:
        with socket.create_connection((B4, 7000), timeout=5) as sock:
            sock.sendall(hello)
            assert sock.recv(len(hello)) == hello
            t.site.policy(**ONLY_A)
            try:
                sock.sendall(b"more")
                return "cut" if sock.recv(10) == b"" else "open"
            except OSError:
                return "cut"

    assert t.guest.run(lie) == "cut"


@case(LIVE, "answers kept from an earlier policy", "a name that is not allowed any more is refused", OPEN)
def _(t: Try) -> None:
    assert t.guest.dns("a.test") == [A4]
    t.site.policy(mode="allow-list", rules=[{"action": "allow", "domain": "b.test"}])
    assert t.guest.dns("a.test") == ["REFUSED"]
    assert t.guest.tls(A4, "a.test") == "alert"


@case(LIVE, "limit of connections", "one more is refused, and the log says why", {
    "mode": "open", "limits": {"connections": 1}})  # fmt: skip
def _(t: Try) -> None:
    found: list[object] = []
    assert t.guest.run(lambda: _held(A4, 7000, lambda: found.append(t.guest.tcp(A4, 7000, b"x")))) == "open"
    assert found == ["reset"]
    assert t.denied(rule="limit")


@case(LIVE, "limit of bytes", "everything is cut when it is used up", {
    "mode": "open", "limits": {"total_mb": 1}})  # fmt: skip
def _(t: Try) -> None:
    def push() -> int:
        with socket.create_connection((A4, 7000), timeout=5) as sock:
            carried = 0
            with contextlib.suppress(OSError, EOFError):
                while carried < 8 * 1024 * 1024:
                    sock.sendall(bytes(65536))
                    end = carried + 65536
                    while carried < end:
                        got = len(sock.recv(65536))
                        if not got:
                            raise EOFError
                        carried += got
            return carried

    assert t.guest.run(push) < 2 * 1024 * 1024
    assert t.guest.tcp(A4, 7000, b"x") == "reset"


@case(LIVE, "connection that waits while the policy changes", "judged by the policy that holds when it speaks", ONLY_A)
def _(t: Try) -> None:
    def late() -> str:
        with socket.create_connection((A4, 443), timeout=5) as sock:
            time.sleep(0.1)
            t.site.policy(mode="none")
            sock.sendall(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n")
            try:
                return "refused" if b" 403 " in sock.recv(1000) else "answered"
            except OSError:
                return "refused"

    t.guest.dns("a.test")
    assert t.guest.run(late) == "refused"
    assert not t.site.world.a.lines
