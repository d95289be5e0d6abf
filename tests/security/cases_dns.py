"""Bypass cases: names, resolvers and what can be carried in them."""

from __future__ import annotations

import dns.message
import dns.rdatatype
from cases import NONE, ONLY_A, OPEN, Try, case
from world_kit import A4, A6, B4, DNS4

NAMES = "names"
REBIND = "rebinding"


@case(NAMES, "deny-all resolves nothing", "refused at once, nothing leaves", NONE)
def _(t: Try) -> None:
    for server in ("192.168.127.1", "8.8.8.8", DNS4):
        assert t.guest.dns("secret.x.b.test", server=server) == ["REFUSED"]
    assert t.guest.dns("a.test") == ["REFUSED"]
    assert t.site.world.zone.lines == []
    assert t.denied(kind="dns", rule="mode", name="secret.x.b.test")


@case(NAMES, "deny-all over TCP", "refused, nothing leaves", NONE)
def _(t: Try) -> None:
    assert t.guest.dns("secret.x.b.test", server="8.8.8.8", tcp=True) == ["REFUSED"]
    assert t.site.world.zone.lines == []


@case(NAMES, "deny-all over IPv6", "refused, nothing leaves", NONE)
def _(t: Try) -> None:
    for server in ("fd00:c10c:e::1", "2001:4860:4860::8888"):
        assert t.guest.dns("secret.x.b.test", server=server) == ["REFUSED"]
        assert t.guest.dns("secret.x.b.test", server=server, tcp=True) == ["REFUSED"]
    assert t.site.world.zone.lines == []


@case(NAMES, "another resolver is asked", "the platform answers in its place, by policy", ONLY_A)
def _(t: Try) -> None:
    for server in ("8.8.8.8", DNS4, "10.0.0.1", "2001:4860:4860::8888"):
        assert t.guest.dns("a.test", server=server) == [A4]
        assert t.guest.dns("data.b.test", server=server) == ["REFUSED"]
    assert not [line for line in t.site.world.zone.lines if "b.test" in line]


@case(NAMES, "another resolver over TCP", "the platform answers in its place, by policy", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("a.test", server="8.8.8.8", tcp=True) == [A4]
    assert t.guest.dns("data.b.test", server="8.8.8.8", tcp=True) == ["REFUSED"]
    assert not [line for line in t.site.world.zone.lines if "b.test" in line]


@case(NAMES, "DNS over TLS (853)", "refused under an allow-list", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp("8.8.8.8", 853, b"\x16\x03\x01") == "reset"


@case(NAMES, "DNS over HTTPS by address", "refused under an allow-list", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tls("8.8.8.8", "dns.google") == "alert"
    assert t.guest.tls("1.1.1.1", None) == "alert"


@case(NAMES, "names that carry data in their types", "TXT, NULL, MX, SRV, ANY of names not allowed: refused", ONLY_A)
def _(t: Try) -> None:
    for kind in ("TXT", "NULL", "MX", "SRV", "ANY", "HTTPS", "SVCB", "PTR", "AXFR"):
        assert t.guest.dns("data.b.test", kind) in (["REFUSED"], ["unreachable"]), kind
    assert t.site.world.zone.lines == []


@case(NAMES, "TXT below a wildcard", "refused: only exact rules open other records", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("data.wild.test", "TXT") == ["REFUSED"]
    assert t.guest.dns("data.wild.test", "NULL") == ["REFUSED"]
    assert t.guest.dns("a.test", "TXT") == ['"hello"']
    assert not [line for line in t.site.world.zone.lines if "wild" in line]


@case(NAMES, "hints for ECH and HTTP/3", "HTTPS records are answered empty and not asked for", OPEN)
def _(t: Try) -> None:
    assert t.guest.dns("a.test", "HTTPS") == ["NODATA"]
    assert t.guest.dns("a.test", "SVCB") == ["NODATA"]
    assert t.site.world.zone.lines == []


@case(NAMES, "labels of 63 bytes", "refused for names that are not allowed; nothing leaves", ONLY_A)
def _(t: Try) -> None:
    long = ".".join(["x" * 63, "y" * 63, "z" * 63])
    assert t.guest.dns(f"{long}.b.test") == ["REFUSED"]
    assert t.site.world.zone.lines == []


@case(NAMES, "question in mixed case", "the same name", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("A.TesT") == [A4]
    assert t.guest.dns("B.TesT") == ["REFUSED"]


@case(NAMES, "name with NUL, spaces or dots in a label", "refused: no name of a host", OPEN)
def _(t: Try) -> None:
    for name in ("a\\000.test", "a\\032b.test", "a\\.b.test", "\\255.test", "-a.test", "127.1", "0x7f.1"):
        assert t.guest.dns(name) == ["REFUSED"], name
    assert t.site.world.zone.lines == []


@case(NAMES, "messages that are broken", "no answer or an error; the resolver goes on", OPEN)
def _(t: Try) -> None:
    query = dns.message.make_query("a.test", "A").to_wire()
    for wire in (
        b"",
        b"x",
        query[:11],
        query[:20],
        query[:4] + b"\x00\x09" + query[6:],
        query + b"junk",
        b"\xff" * 512,
    ):
        answer = t.guest.dns_raw(wire)
        assert answer in {"silent", "refused"} or isinstance(answer, bytes), wire
    loop = query[:12] + b"\xc0\x0c\x00\x01\x00\x01"
    assert isinstance(t.guest.dns_raw(loop), bytes)
    assert t.guest.dns("a.test") == [A4]


@case(NAMES, "answers instead of questions", "dropped", OPEN)
def _(t: Try) -> None:
    response = dns.message.make_response(dns.message.make_query("a.test", "A"))
    response.answer.append(dns.rrset.from_text("a.test.", 60, "IN", "A", B4))
    assert t.guest.dns_raw(response.to_wire()) == "silent"
    assert t.guest.dns("a.test") == [A4]


@case(NAMES, "dynamic update and other opcodes", "not done", OPEN)
def _(t: Try) -> None:
    query = bytearray(dns.message.make_query("a.test", "A").to_wire())
    query[2] |= 5 << 3
    answer = t.guest.dns_raw(bytes(query))
    assert isinstance(answer, bytes)
    assert answer[3] & 15 == 4  # NOTIMP


@case(NAMES, "class CHAOS", "refused; nothing leaves", OPEN)
def _(t: Try) -> None:
    query = dns.message.make_query("version.bind", "TXT", rdclass="CH")
    answer = t.guest.dns_raw(query.to_wire())
    assert isinstance(answer, bytes)
    assert answer[3] & 15 == 5
    assert t.site.world.zone.lines == []


@case(NAMES, "alias of an allowed name", "followed, and its addresses bound to the name that was asked", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("alias.a.test") == [A4]
    assert t.guest.tls(A4, "alias.a.test") == "ok"


@case(REBIND, "private answers for an allowed name", "taken out: no address is left", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("rebind.a.test") == ["NODATA"]
    assert t.guest.dns("rebind.a.test", "AAAA") == ["NODATA"]
    assert t.denied(kind="dns", rule="private-address", name="rebind.a.test")


@case(REBIND, "private answers in an open sandbox", "taken out", OPEN)
def _(t: Try) -> None:
    assert t.guest.dns("rebind.a.test") == ["NODATA"]
    assert t.guest.dns("inside.test") == ["NODATA"]


@case(REBIND, "private beside public answers", "only the public ones are given", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("mixed.a.test") == [A4]


@case(REBIND, "alias that leads to a private address", "no address is given", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("toprivate.a.test") == ["NODATA"]


@case(REBIND, "SNI of a rebinding name to what it resolves to", "refused", ONLY_A)
def _(t: Try) -> None:
    for address in ("10.77.0.10", "169.254.169.254", "45.90.0.2", "192.168.127.1"):
        assert t.guest.tls(address, "rebind.a.test") in {"alert", "reset"}, address


@case(REBIND, "a rule opens the network", "private answers are given and reached", {
    "mode": "allow-list",
    "rules": [
        {"id": "name", "action": "allow", "domain": "inside.test", "ports": [80, 443, 7000]},
        {"id": "net", "action": "allow", "cidr": "10.77.0.0/24"},
    ]}, reaches=True)  # fmt: skip
def _(t: Try) -> None:
    assert t.guest.dns("inside.test") == ["10.77.0.10"]
    assert t.guest.tcp("10.77.0.10", 7000, b"echo\n", until=b"\n") == b"echo\n"
    assert t.guest.tcp("10.77.1.10", 7000, b"echo\n") == "reset"


@case(NAMES, "IPv6 answers", "given where this host has a way there", OPEN)
def _(t: Try) -> None:
    assert t.guest.dns("a.test", "AAAA") == [A6]
