"""What is refused before it reaches anybody, and clients that keep others waiting."""

from __future__ import annotations

import asyncio

import pytest
from gateway_site import Site, head_of, mirror, ok

from cloche_server.gateway import http1


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("POST / HTTP/1.1|Host: {h}|Content-Length: 3|Transfer-Encoding: chunked", 400),
        ("POST / HTTP/1.1|Host: {h}|Content-Length: 3|Content-Length: 3", 400),
        ("POST / HTTP/1.1|Host: {h}|Content-Length: 3, 3", 400),
        ("POST / HTTP/1.1|Host: {h}|Content-Length: +3", 400),
        ("POST / HTTP/1.1|Host: {h}|Content-Length: 0x3", 400),
        ("POST / HTTP/1.1|Host: {h}|Content-Length: ", 400),
        ("POST / HTTP/1.1|Host: {h}|Content-Length : 3", 400),
        ("POST / HTTP/1.1|Host: {h}|Transfer-Encoding: chunked|Transfer-Encoding: chunked", 400),
        ("POST / HTTP/1.1|Host: {h}|Transfer-Encoding: gzip, chunked", 501),
        ("POST / HTTP/1.1|Host: {h}|Transfer-Encoding: \x0bchunked", 400),
        ("POST / HTTP/1.0|Host: {h}|Transfer-Encoding: chunked", 400),
        ("GET / HTTP/1.1|Host: {h}|X: a| folded", 400),
        ("GET / HTTP/1.1|Host: {h}|X: a\nY: b", 400),
        ("GET / HTTP/1.1|Host: {h}|X: a\rY: b", 400),
        ("GET / HTTP/1.1|Host: {h}|X: a\0b", 400),
        ("GET / HTTP/1.1|Host: {h}|: b", 400),
        ("GET / HTTP/1.1|Host: {h}|no colon", 400),
        ("GET / HTTP/1.1|Host: {h}|Host: other", 400),
        ("GET / HTTP/1.1|X: y", 400),
        ("GET / HTTP/1.1|Host: a b", 400),
        ("GET / HTTP/1.1|Host: a/b", 400),
        ("GET  / HTTP/1.1|Host: {h}", 400),
        ("GET /a b HTTP/1.1|Host: {h}", 400),
        ("GET x HTTP/1.1|Host: {h}", 400),
        ("GET / HTTP/2.0|Host: {h}", 505),
        ("GET / JUNK|Host: {h}", 400),
        ("CONNECT x:1 HTTP/1.1|Host: {h}", 405),
        ("GET / HTTP/1.1|Host: {h}|" + "|".join(f"X{n}: y" for n in range(300)), 431),
        ("GET / HTTP/1.1|Host: {h}|X: " + "y" * 70000, 431),
    ],
)
async def test_a_request_that_two_servers_could_read_differently(front: Site, lines: str, status: int) -> None:
    async with await front.serve(mirror):
        wire = await front.connect()
        text = lines.replace("{h}", front.host).replace("|", "\r\n")
        await wire.send(text.encode("latin-1") + b"\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = await wire.reply()
        assert reply.status == status
        assert reply.get("connection") == "close"
        assert await wire.ended(), "what stood behind it was taken for a request"
        wire.close()
    assert front.world.dialed == []


@pytest.mark.parametrize(
    "body",
    [
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"zz\r\n",
        b"3 \n",
        b"-1\r\n",
        b"3\nabc\r\n0\r\n\r\n",
        b"f" * 2000,
        b"0\r\nbad trailer\r\n\r\n",
    ],
)
async def test_chunks_that_are_none(front: Site, body: bytes) -> None:
    heads = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await head_of(reader))
        await reader.read(-1)

    async with await front.serve(handler):
        wire = await front.connect()
        head = f"POST / HTTP/1.1\r\nHost: {front.host}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await wire.send(head.encode() + body)
        assert (await wire.reply()).status == 400
        assert await wire.ended()
        wire.close()


async def test_an_absolute_target_counts_more_than_the_host(front: Site) -> None:
    async with await front.serve(mirror):
        reply = await front.ask(f"GET http://{front.host}/p?q HTTP/1.1", host="other.example")
    assert reply.body.startswith(b"GET /p?q HTTP/1.1\r\n")
    assert f"\r\nHost: {front.host}\r\n".encode() in reply.body


async def test_old_clients(front: Site) -> None:
    async with await front.serve(mirror):
        wire = await front.connect()
        await wire.send(f"\r\nGET / HTTP/1.0\r\nHost: {front.host}\r\n\r\n".encode())
        reply = await wire.reply()
        assert (reply.status, reply.get("connection")) == (200, "close")
        assert await wire.ended()
        wire.close()


async def test_slow_heads_and_idle_connections_are_closed(front: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(http1, "IDLE_SECONDS", 0.3)
    for begin in (b"", b"GET / HTTP/1.1\r\nHos"):
        wire = await front.connect()
        await wire.send(begin)
        assert await wire.ended()
        wire.close()


async def test_a_body_that_breaks_off_is_passed_on_as_broken(front: Site) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        begun.set()
        try:
            await reader.readexactly(10)
        except asyncio.IncompleteReadError:
            ended.set()

    async with await front.serve(handler):
        wire = await front.connect()
        await wire.send(f"POST / HTTP/1.1\r\nHost: {front.host}\r\nContent-Length: 10\r\n\r\nabc".encode())
        await begun.wait()
        wire.writer.write_eof()
        assert await wire.ended()
        async with asyncio.timeout(20):
            await ended.wait()


async def test_what_a_client_claims_about_itself_is_not_believed(front: Site) -> None:
    async with await front.serve(mirror):
        reply = await front.ask(
            "GET / HTTP/1.1\nX-Forwarded-Host: evil\nForwarded: for=1.2.3.4\nX-Real-IP: 1.2.3.4\n"
            "X-Forwarded-Prefix: /x\nx-forwarded-proto: https\nConnection: close, X-Forwarded-For, Cookie\nCookie: a=b"
        )
    seen = reply.body.lower()
    assert b"evil" not in seen
    assert b"1.2.3.4" not in seen
    assert b"x-forwarded-prefix" not in seen
    assert seen.count(b"x-forwarded-proto: http\r\n") == 1
    assert seen.count(b"x-forwarded-for: 127.0.0.1\r\n") == 1
    assert b"cookie: a=b" in seen


async def test_many_at_once_do_not_mix(front: Site) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await head_of(reader)).split(b" ")[1]
        await asyncio.sleep(0)
        writer.write(ok(path * 100))

    async with await front.serve(handler):
        replies = await asyncio.gather(*(front.ask(f"GET /{n} HTTP/1.1") for n in range(100)))
    assert [reply.body for reply in replies] == [b"/%d" % n * 100 for n in range(100)]
