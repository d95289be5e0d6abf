"""Bounds on what comes before a request is whole, over real sockets and an application that does nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from cloche_server.api.protocol import HttpProtocol

pytestmark = pytest.mark.thorough

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def _app(scope: Any, receive: Any, send: Any) -> None:
    length = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": b"ok"})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(HttpProtocol, "head_seconds", 0.3)
    monkeypatch.setattr(HttpProtocol, "head_limit", 4096)
    config = uvicorn.Config(_app, http=HttpProtocol, ws="none", log_config=None, lifespan="off")
    server = _Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def _connected(port: int) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.close()


async def _ok(reader: asyncio.StreamReader) -> None:
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert await reader.readexactly(2) == b"ok"


@pytest.mark.parametrize("begin", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nX: a", b"\r\n\r\n"])
async def test_a_head_that_does_not_come_ends_the_connection(port: int, begin: bytes) -> None:
    async with _connected(port) as (reader, writer):
        writer.write(begin)
        assert await reader.read() == b""


async def test_dripping_does_not_help(port: int) -> None:
    async with _connected(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                writer.write(b"X: a\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(drip())
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        dripping.cancel()


async def test_a_pause_between_requests_is_no_slow_head(port: int) -> None:
    async with _connected(port) as (reader, writer):
        for _ in range(3):
            writer.write(GET[:10])
            await asyncio.sleep(0.05)
            writer.write(GET[10:])
            await _ok(reader)
            await asyncio.sleep(0.5)


async def test_the_second_head_of_a_connection_is_bounded_too(port: int) -> None:
    async with _connected(port) as (reader, writer):
        writer.write(GET)
        await _ok(reader)
        writer.write(GET[:10])
        assert await reader.read() == b""


@pytest.mark.parametrize("size", [4000, 200_000])
async def test_a_head_that_is_too_large(port: int, size: int) -> None:
    async with _connected(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"a" * size + b"\r\nY: " + b"b" * 200 + b"\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["code"] == "request.headers_too_large"


async def test_many_small_requests_do_not_add_up(port: int) -> None:
    async with _connected(port) as (reader, writer):
        for _ in range(30):
            writer.write(GET.replace(b"\r\n\r\n", b"\r\nX: " + b"a" * 200 + b"\r\n\r\n"))
            await _ok(reader)


async def test_a_body_does_not_count_as_the_head_behind_it(port: int) -> None:
    async with _connected(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 20000\r\n\r\n" + b"b" * 20000 + GET[:10])
        await _ok(reader)
        writer.write(GET[10:])
        await _ok(reader)


async def test_what_is_no_http(port: int) -> None:
    async with _connected(port) as (reader, writer):
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"content-type: application/json" in head
        assert json.loads(body)["code"] == "request.invalid"
