"""Bypass cases: the name that a client claims, against the address it connects to."""

from __future__ import annotations

from cases import ONLY_A, OPEN, Try, case
from guest_kit import client_hello, in_records
from world_kit import A4, A6, B4, B6, PRIVATE4

ALERT = b"\x15\x03\x03\x00\x02\x02\x31"
SPOOF = "claimed name"


@case(SPOOF, "A by its name", "TLS to an allowed host works, v4 and v6", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("a.test") == [A4]
    assert t.guest.dns("a.test", "AAAA") == [A6]
    assert t.guest.tls(A4, "a.test") == "ok"
    assert t.guest.tls(A6, "a.test") == "ok"
    assert t.site.world.a.lines


@case(SPOOF, "A by its address without a look-up before", "the platform resolves the claimed name itself", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tls(A4, "a.test") == "ok"
    assert "a.test A" in t.site.world.zone.lines


@case(SPOOF, "SNI of A to the address of B", "refused; logged with name and address", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test")
    assert t.guest.tls(B4, "a.test") == "alert"
    assert t.denied(rule="not-resolved", name="a.test", address=B4)


@case(SPOOF, "SNI of A to the IPv6 address of B", "refused", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test", "AAAA")
    assert t.guest.tls(B6, "a.test") == "alert"


@case(SPOOF, "SNI of B to the address of A", "refused: the name is what counts", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tls(A4, "b.test") == "alert"
    assert t.denied(rule="default", name="b.test")
    assert not t.site.world.a.lines


@case(SPOOF, "no SNI to A", "refused", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test")
    assert t.guest.tcp(A4, 443, client_hello(None)) == ALERT
    assert t.denied(rule="no-name", address=A4)
    assert not t.site.world.a.lines


@case(SPOOF, "no SNI to B", "refused", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(B4, 443, client_hello(None)) == ALERT


@case(SPOOF, "SNI in upper case", "the same name: A answers, B does not", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(A4, 443, client_hello(b"A.TEST"), until=b"\x16") not in {ALERT, "reset"}
    assert t.guest.tcp(B4, 443, client_hello(b"A.TEST")) == ALERT


@case(SPOOF, "SNI with a final dot", "taken as the same name, bound to its address", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(B4, 443, client_hello(b"a.test.")) == ALERT


@case(SPOOF, "SNI with two final dots", "refused: no name", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(A4, 443, client_hello(b"a.test..")) == ALERT


@case(SPOOF, "SNI with NUL", "refused: no name", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(B4, 443, client_hello(b"a.test\x00b.test")) == ALERT
    assert t.guest.tcp(A4, 443, client_hello(b"a.test\x00")) == ALERT
    assert t.denied(rule="no-name")


@case(SPOOF, "SNI of 300 bytes", "refused: no name", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(B4, 443, client_hello(b"x" * 60 + b".y" * 118 + b".a.test")) == ALERT


@case(SPOOF, "SNI that is an address", "refused: no name", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(B4, 443, client_hello(B4.encode())) == ALERT


@case(SPOOF, "two server names in one hello", "refused", ONLY_A)
def _(t: Try) -> None:
    entry = b"\x00\x00\x06a.test\x00\x00\x06b.test"
    both = b"\x00\x00" + (len(entry) + 2).to_bytes(2, "big") + len(entry).to_bytes(2, "big") + entry
    assert t.guest.tcp(A4, 443, client_hello(None, extra=both)) == ALERT
    assert not t.site.world.a.lines


@case(SPOOF, "the name extension twice", "refused", ONLY_A)
def _(t: Try) -> None:
    second = b"\x00\x00\x00\x0b\x00\x09\x00\x00\x06b.test"
    assert t.guest.tcp(A4, 443, client_hello(b"a.test", extra=second)) == ALERT
    assert not t.site.world.a.lines


@case(SPOOF, "ClientHello in ten packets", "read to its end: A is reached, B is not", ONLY_A)
def _(t: Try) -> None:
    hello = client_hello(b"a.test")
    pieces = [hello[at : at + len(hello) // 9] for at in range(0, len(hello), len(hello) // 9)]
    assert t.guest.tcp(A4, 443, *pieces, until=b"\x16") not in {ALERT, "reset", "silent"}
    assert t.guest.tcp(B4, 443, *pieces) == ALERT


@case(SPOOF, "ClientHello in records of one byte", "read to its end: A is reached, B is not", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test")
    assert t.guest.tcp(B4, 443, in_records(client_hello(b"a.test"), 1)) == ALERT
    assert t.guest.tcp(A4, 443, in_records(client_hello(b"b.test"), 1)) == ALERT
    assert not t.site.world.a.lines


@case(SPOOF, "large ClientHello", "read to its end, 12 KiB of it", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(B4, 443, client_hello(b"a.test", padding=12000)) == ALERT
    assert t.guest.tcp(A4, 443, client_hello(b"a.test", padding=12000), until=b"\x16") not in {ALERT, "reset"}


@case(SPOOF, "ClientHello that never ends", "refused after the time for first bytes", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(B4, 443, client_hello(b"a.test")[:60], patience=8) == ALERT
    assert t.denied(rule="no-name", address=B4)


@case(SPOOF, "hidden name (ECH) without SNI", "refused", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(A4, 443, client_hello(None, ech=True)) == ALERT
    assert not t.site.world.a.lines


@case(SPOOF, "hidden name (ECH) behind the SNI of B", "refused", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(A4, 443, client_hello(b"b.test", ech=True)) == ALERT
    assert t.guest.tcp(B4, 443, client_hello(b"a.test", ech=True)) == ALERT
    assert not t.site.world.a.lines


@case(SPOOF, "bytes that are neither TLS nor HTTP to A:443", "refused", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test")
    assert t.guest.tcp(A4, 443, b"\x00\x01\x02SECRET") == "reset"
    assert not t.site.world.a.lines


@case(SPOOF, "nothing sent to B:443", "no connection to B is made", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(B4, 443, patience=7) == "reset"


@case(SPOOF, "SSLv2 hello", "refused", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tcp(B4, 443, b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + bytes(35)) == "reset"


@case(SPOOF, "B by address", "refused", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tls(B4, "b.test") == "alert"
    assert t.denied(name="b.test", address=B4)


@case(SPOOF, "B by IPv6 address", "refused", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.tls(B6, "b.test") == "alert"


@case(SPOOF, "A on port 22", "refused at once: the rule means 80 and 443", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test")
    assert t.guest.tcp(A4, 22) == "reset"
    assert not t.site.world.a.lines


@case(SPOOF, "B on a port that A has", "refused: the port is bound to A's addresses", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test")
    assert t.guest.tcp(A4, 7000, b"echo\n", until=b"\n") == b"echo\n"
    assert t.guest.tcp(B4, 7000, b"echo\n", patience=8) == "reset"


@case(SPOOF, "SNI of B on a port that A has", "refused: TLS is checked on every port", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test")
    assert t.guest.tls(A4, "a.test", port=8443) == "ok"
    assert t.guest.tls(A4, "b.test", port=8443) == "alert"
    assert t.guest.tls(B4, "a.test", port=8443) == "alert"


@case(SPOOF, "A inside the name of B", "`a.test.b.test` is not A: neither resolved nor reached", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("a.test.b.test") == ["REFUSED"]
    assert t.guest.tls(B4, "a.test.b.test") == "alert"
    assert not t.site.world.zone.lines


@case(SPOOF, "name that ends like A", "`nota.test` is not A: neither resolved nor reached", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("nota.test") == ["REFUSED"]
    assert t.guest.tls(B4, "nota.test") == "alert"
    assert not t.site.world.zone.lines


@case(SPOOF, "the name above a wildcard", "`*.wild.test` does not mean `wild.test`", ONLY_A)
def _(t: Try) -> None:
    assert t.guest.dns("wild.test") == ["REFUSED"]
    assert t.guest.dns("x.wild.test") == [A4]
    assert t.guest.tcp(A4, 443, client_hello(b"wild.test")) == ALERT


@case(SPOOF, "another host at the address of A", "refused by its name, though the address is one of A", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("a.test")
    assert t.guest.tls(A4, "fronted.test") == "alert"
    assert not t.site.world.a.lines


@case(SPOOF, "deny rule for a name in an open sandbox", "B is refused by its name, A works", {
    "mode": "open", "rules": [{"id": "no-b", "action": "deny", "domain": "b.test"}]})  # fmt: skip
def _(t: Try) -> None:
    assert t.guest.dns("b.test") == ["REFUSED"]
    assert t.guest.tls(B4, "b.test") == "alert"
    assert t.guest.tls(A4, "a.test") == "ok"
    assert t.guest.tcp(A4, 22, until=b"SSH").startswith(b"SSH")


@case(SPOOF, "deny rule for a network after an allowed name", "the claimed name does not lift it", {
    "mode": "open",
    "rules": [
        {"id": "a", "action": "allow", "domain": "a.test"},
        {"id": "no-b", "action": "deny", "cidr": B4},
    ]})  # fmt: skip
def _(t: Try) -> None:
    assert t.guest.tls(B4, "a.test") == "alert"
    assert t.denied(rule="no-b")


@case(SPOOF, "private address with the SNI of A", "refused: a name opens no private network", ONLY_A)
def _(t: Try) -> None:
    t.guest.dns("mixed.a.test")
    assert t.guest.tls(PRIVATE4, "mixed.a.test") == "alert"
    assert t.denied(rule="private-address", address=PRIVATE4)


@case(SPOOF, "unknown name in an open sandbox", "public addresses are reached without any name", OPEN, reaches=True)
def _(t: Try) -> None:
    assert t.guest.tls(B4, None) == "ok"
