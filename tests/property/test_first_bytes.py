"""First bytes of hostile guests: every cut gives the same claim, and nothing but claims comes out."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.core.names import canonical_name
from cloche_server.core.policy import Claim, ClaimKind
from cloche_server.netd.firstbytes import MAX_BYTES, claim_of
from cloche_server.netd.hello import Broken, More, NotTls, parse_hello


def extension(kind: int, value: bytes) -> bytes:
    return struct.pack("!HH", kind, len(value)) + value


def sni(name: bytes) -> bytes:
    entry = b"\x00" + struct.pack("!H", len(name)) + name
    return extension(0, struct.pack("!H", len(entry)) + entry)


def hello(extensions: bytes | None, size: int = 16384) -> bytes:
    body = b"\x03\x03" + os.urandom(32) + b"\x20" + os.urandom(32) + b"\x00\x04\x13\x01\x0a\x0a" + b"\x01\x00"
    if extensions is not None:
        body += struct.pack("!H", len(extensions)) + extensions
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack("!H", len(part)) + part for part in parts)


GREASE = extension(0x0A0A, b"") + extension(0x1A1A, b"\x00")
ECH = extension(0xFE0D, bytes(100))


def test_names() -> None:
    assert claim_of(hello(GREASE + sni(b"A.Test")), final=False) == Claim(ClaimKind.TLS, "a.test")
    assert claim_of(hello(sni(b"a.test") + ECH), final=False) == Claim(ClaimKind.TLS, "a.test")
    assert claim_of(hello(GREASE), final=False) == Claim(ClaimKind.TLS, None)
    assert claim_of(hello(None), final=False) == Claim(ClaimKind.TLS, None)
    hidden = claim_of(hello(ECH), final=False)
    assert hidden is not None
    assert "ECH" in hidden.problem


@pytest.mark.parametrize(
    "data",
    [
        hello(sni(b"a.test") + sni(b"b.test")),
        hello(sni(b"a.test\0b.test")),
        hello(sni(b"1.2.3.4")),
        hello(sni(b"")),
        hello(sni(b"x" * 300)),
        hello(extension(0, b"")),
        hello(extension(0, b"\x00\x03\x01\x00\x00")),
        hello(sni(b"a.test") + b"\x00"),
        hello(sni(b"a.test"))[:-1] + b"\x00\x16\x03\x01\x00\x01\x00",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x40\x01" + bytes(20),
        hello(sni(b"a.test"), 40)[:45] + b"\x15\x03\x01\x00\x02\x01\x00",
    ],
    # What is in a hello is random, and every process that runs tests must know them by the same names.
    ids=lambda data: f"{len(data)}-bytes",
)
def test_what_is_broken_names_nobody(data: bytes) -> None:
    claim = claim_of(data, final=True)
    assert claim is not None
    assert claim.kind is ClaimKind.TLS
    assert claim.name is None
    assert claim.problem


@given(st.integers(1, 400), st.integers(1, 300), st.booleans())
def test_any_split_of_a_hello_is_the_same(size: int, at: int, ech: bool) -> None:
    data = hello(GREASE + (ECH if ech else b"") + sni(b"a.test"), size)
    assert claim_of(data, final=False) == Claim(ClaimKind.TLS, "a.test")
    part = claim_of(data[: min(at, len(data) - 1)], final=False)
    assert part is None
    cut = claim_of(data[: min(at, len(data) - 1)], final=True)
    assert cut is not None
    assert cut.name is None


@settings(max_examples=150)
@given(st.binary(max_size=400) | st.binary(max_size=200).map(lambda tail: b"\x16\x03\x01" + tail))
def test_random_bytes(data: bytes) -> None:
    claim = claim_of(data, final=True)
    assert claim is not None
    assert claim.name is None or canonical_name(claim.name) == claim.name


@settings(max_examples=120)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_changed_hello(changes: list[tuple[int, int]]) -> None:
    data = bytearray(hello(GREASE + sni(b"a.test") + ECH))
    for at, value in changes:
        data[at % len(data)] = value
    try:
        found = parse_hello(bytes(data))
    except (Broken, More, NotTls):
        return
    assert found.name is None or canonical_name(found.name) == found.name


head_lines = st.lists(
    st.sampled_from(
        [b"Host: a.test", b"host:a.test:80", b"Host: b.test", b"HOST : a.test", b" Host: a.test", b"X: y", b"", b"\xff"]
    ),
    max_size=4,
)


@given(
    st.sampled_from([b"GET", b"get", b"CONNECT", b"POST", b"M-SEARCH"]),
    st.sampled_from(
        [b"/", b"*", b"http://a.test/x", b"http://b.test/", b"//b.test/", b"a.test:443", b"@b.test", b"/ x"]
    ),
    st.sampled_from([b"\r\n", b"\n"]),
    head_lines,
)
def test_a_request_names_the_host_that_all_of_it_names(
    method: bytes, target: bytes, end: bytes, lines: list[bytes]
) -> None:
    data = method + b" " + target + b" HTTP/1.1" + end + b"".join(line + end for line in lines) + end
    claim = claim_of(data, final=True)
    assert claim is not None
    if claim.name is not None:
        head = lines[: lines.index(b"")] if b"" in lines else lines
        named = [line for line in head if line.lower().replace(b" ", b"").startswith(b"host:")]
        assert len(named) == 1
        assert claim.name.encode() in named[0]
        assert method != b"CONNECT"
        assert target.startswith((b"/", b"*")) or claim.name.encode() in target


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", ClaimKind.RAW),
        (b"PING\r\n", ClaimKind.RAW),
        (b"EHLO me\r\n", ClaimKind.RAW),
        (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", ClaimKind.RAW),
        (b"GET /\r\n", ClaimKind.RAW),
        (b"\r\n\r\nGET / HTTP/1.1\r\nHost: a.test\r\n\r\n", ClaimKind.HTTP),
        (b"GET\t/\tHTTP/1.0\nHost: a.test\n\n", ClaimKind.HTTP),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ClaimKind.HTTP2),
    ],
)
def test_kinds_of_first_bytes(data: bytes, kind: ClaimKind) -> None:
    claim = claim_of(data, final=False)
    assert claim is not None
    assert claim.kind is kind


@given(st.integers(1, 50))
def test_a_request_is_waited_for(at: int) -> None:
    data = b"GET /somewhere HTTP/1.1\r\nHost: a.test\r\nX: y\r\n\r\n"
    assert claim_of(data[: min(at, len(data) - 1)], final=False) is None
    assert claim_of(data, final=False) == Claim(ClaimKind.HTTP, "a.test")


def test_nothing_is_waited_for_without_end() -> None:
    assert claim_of(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 11000, final=False) is not None
    assert claim_of(b"\r\n" * MAX_BYTES, final=True) == Claim(ClaimKind.RAW)
    assert claim_of(b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + bytes(MAX_BYTES), final=False) is not None
