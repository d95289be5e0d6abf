"""Bypass cases: requests inside a connection. They run where the HTTP engine is wired."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from typing import Any

from cases import ONLY_A, Try, case
from world_kit import A4

INSIDE = "inside HTTP"
#: Host A, whose TLS is read because a rule speaks of its requests.
READ_A: Mapping[str, Any] = {
    "mode": "allow-list",
    "rules": [{"id": "get", "action": "allow", "domain": "a.test", "methods": ["GET"], "paths": ["/ok*"]}],
}


def _answer(t: Try, *pieces: bytes, until: bytes | None = None, port: int = 80) -> bytes:
    t.guest.dns("a.test")
    answer = t.guest.tcp(A4, port, *pieces, until=until)
    assert isinstance(answer, bytes), answer
    return answer


def _reached(t: Try, host: str) -> bool:
    return any(f"host={host}" in line for line in t.site.world.a.lines)


@case(INSIDE, "A by HTTP", "works", ONLY_A, engine=True)
def _(t: Try) -> None:
    assert b"hello from a.test" in _answer(t, b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n")


@case(INSIDE, "second request for B on a kept connection", "refused; A saw the first only", ONLY_A, engine=True)
def _(t: Try) -> None:
    one, two = (f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode() for host in ("a.test", "b.test"))
    answer = _answer(t, one, two, until=b"network.denied")
    assert b"hello from a.test" in answer
    assert not _reached(t, "b.test")


@case(INSIDE, "pipelined request for B", "refused", ONLY_A, engine=True)
def _(t: Try) -> None:
    both = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\nGET / HTTP/1.1\r\nHost: b.test\r\n\r\n"
    _answer(t, both, until=b"network.denied")
    assert not _reached(t, "b.test")


@case(INSIDE, "redirect from A to B", "the redirect is passed on, B is not reached", ONLY_A, engine=True)
def _(t: Try) -> None:
    answer = _answer(t, b"GET /redirect HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n", until=b"\r\n\r\n")
    assert b"302" in answer
    assert t.guest.tls("45.90.2.10", "b.test") == "alert"


@case(INSIDE, "HTTP/2 with prior knowledge", "each request is judged; B is not reached", ONLY_A, engine=True)
def _(t: Try) -> None:
    headers = b"\x82\x84\x86\x41\x06b.test"
    frame = len(headers).to_bytes(3, "big") + b"\x01\x05\x00\x00\x00\x01" + headers
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    t.guest.dns("a.test")
    t.guest.tcp(A4, 80, preface + frame)
    assert not _reached(t, "b.test")


@case(INSIDE, "WebSocket to A with Host of B", "refused", ONLY_A, engine=True)
def _(t: Try) -> None:
    key = base64.b64encode(os.urandom(16)).decode()
    head = (
        "GET /ws HTTP/1.1\r\nHost: b.test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert b"403" in _answer(t, head.encode(), until=b"}")
    assert not _reached(t, "b.test")


@case(INSIDE, "request smuggled behind two lengths", "not passed on as two", ONLY_A, engine=True)
def _(t: Try) -> None:
    inner = b"GET /smuggled HTTP/1.1\r\nHost: b.test\r\n\r\n"
    head = (
        b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner
    )
    t.guest.dns("a.test")
    t.guest.tcp(A4, 80, head)
    assert not _reached(t, "b.test")


@case(
    INSIDE, "method and path of a rule", "GET below /ok is allowed, POST and other paths are not", READ_A, engine=True
)
def _(t: Try) -> None:
    def ask(method: str, path: str) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        return _answer(t, head.encode())

    assert b" 200 " in ask("GET", "/ok/1")
    assert b" 403 " in ask("POST", "/ok/1")
    assert b" 403 " in ask("GET", "/other")
    assert b" 403 " in ask("GET", "/ok/../other")
    assert b" 403 " in ask("GET", "/ok/%2e%2e/other")


@case(INSIDE, "requests under a limit of bandwidth", "read and judged all the same", {
    **READ_A, "limits": {"bandwidth_kbps": 8000}}, engine=True)  # fmt: skip
def _(t: Try) -> None:
    assert b" 200 " in t.guest.https(A4, "a.test", b"GET /ok/1 HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n")
    assert b" 403 " in _answer(t, b"GET /no HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n")


@case(INSIDE, "method and path inside TLS", "TLS is read where a rule speaks of requests", READ_A, engine=True)
def _(t: Try) -> None:
    assert b" 200 " in t.guest.https(A4, "a.test", b"GET /ok/1 HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n")
    assert b" 403 " in t.guest.https(A4, "a.test", b"GET /no HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n")
    assert _reached(t, "a.test")
    assert not any("/no" in line for line in t.site.world.a.lines)


@case(INSIDE, "another Host inside TLS that is read", "refused: fronting does not pass", READ_A, engine=True)
def _(t: Try) -> None:
    for host in (b"fronted.test", b"b.test", b"www.a.test"):
        answer = t.guest.https(A4, "a.test", b"GET /ok HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 4"), host
    assert not any("http" in line for line in t.site.world.a.lines)


@case(INSIDE, "second request inside TLS for another host", "refused on the kept connection", READ_A, engine=True)
def _(t: Try) -> None:
    both = (
        b"GET /ok HTTP/1.1\r\nHost: a.test\r\n\r\nGET /ok HTTP/1.1\r\nHost: fronted.test\r\nConnection: close\r\n\r\n"
    )
    assert b" 200 " in t.guest.https(A4, "a.test", both)
    assert not _reached(t, "fronted.test")


@case(INSIDE, "absolute target inside TLS for another host", "refused", READ_A, engine=True)
def _(t: Try) -> None:
    head = b"GET https://fronted.test/ok HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n"
    assert t.guest.https(A4, "a.test", head).startswith(b"HTTP/1.1 4")
    assert not any("http" in line for line in t.site.world.a.lines)
