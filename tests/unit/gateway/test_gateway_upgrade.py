"""Upgrades: the connection itself, byte for byte, by the same rules as plain requests."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest
from gateway_site import BOX, OWNER, Site, Wire, World, answering, head_of, ok, site

from cloche_server.app.callers import ApiCallers, Owner
from cloche_server.app.calls import revoked
from cloche_server.app.ports import PortWish
from cloche_server.core.previews import HostRule, PortAccess
from cloche_server.gateway.gateway import Limits
from kit.tokens import BEARER, AnyToken

BEARER_LINE = f"Authorization: {BEARER['Authorization']}"
KEY = "dGhlIHNhbXBsZSBub25jZQ=="


def upgrade(target: str, host: str, *more: str) -> bytes:
    lines = [f"GET {target} HTTP/1.1", f"Host: {host}", "Connection: keep-alive, Upgrade", "Upgrade: websocket"]
    lines += [f"Sec-WebSocket-Key: {KEY}", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Protocol: chat, other", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


class Echo:
    """Takes every upgrade, keeps its head, and echoes bytes until the other side ends."""

    def __init__(self) -> None:
        self.head = b""
        self.ended = asyncio.Event()
        self.aborted = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = await head_of(reader)
        accept = base64.b64encode(hashlib.sha1(KEY.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Protocol: chat\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\nfirst"
        )
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write(b"goodbye")
            self.ended.set()
        except ConnectionError:
            self.aborted.set()
            raise


async def opened(front: Site, target: str = "/hot?x=%20", *more: str, host: str = "") -> Wire:
    wire = await front.connect()
    await wire.send(upgrade(target, host or front.host, *more))
    return wire


async def test_bytes_both_ways_and_each_end_by_itself(front: Site) -> None:
    echo = Echo()
    async with await front.serve(echo):
        wire = await opened(front, "/hot?x=%20", f"Origin: http://{front.host}")
        head = await wire.reply()
        assert head.status == 101
        assert (head.get("upgrade"), head.get("connection")) == ("websocket", "Upgrade")
        assert (head.get("sec-websocket-protocol"), head.get("sec-websocket-accept") is None) == ("chat", False)
        assert await wire.reader.readexactly(5) == b"first"
        big = bytes(range(256)) * 8192  # 2 MiB, as one frame may be
        sending = asyncio.ensure_future(wire.send(big))
        assert await wire.reader.readexactly(len(big)) == big
        await sending
        wire.writer.write_eof()
        async with asyncio.timeout(20):
            assert await wire.reader.read(-1) == b"goodbye"
        wire.close()
    seen = echo.head.decode()
    assert seen.startswith("GET /hot?x=%20 HTTP/1.1\r\n")
    for line in (f"Host: {front.host}", f"Origin: http://{front.host}", "Sec-WebSocket-Protocol: chat, other"):
        assert f"\r\n{line}\r\n" in seen
    assert f"\r\nX-Forwarded-Host: {front.host}\r\n" in seen
    assert "\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" in seen


async def test_bytes_sent_with_the_request_are_not_lost(front: Site) -> None:
    async with await front.serve(Echo()):
        wire = await front.connect()
        await wire.send(upgrade("/", front.host) + b"early")
        await wire.reply()
        assert await wire.reader.readexactly(10) == b"firstearly"
        wire.close()


async def test_a_client_that_is_gone_is_gone_for_the_server_too(front: Site) -> None:
    echo = Echo()
    async with await front.serve(echo):
        wire = await opened(front)
        await wire.reply()
        wire.writer.transport.abort()
        async with asyncio.timeout(20):
            await asyncio.wait(
                [asyncio.ensure_future(echo.ended.wait()), asyncio.ensure_future(echo.aborted.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )


async def test_a_server_that_does_not_upgrade_answers(front: Site) -> None:
    async with await front.serve(answering(ok(b"plain"))):
        wire = await opened(front)
        assert (await wire.reply()).body == b"plain"
        wire.close()


async def test_a_local_host_for_servers_that_check_it(front: Site) -> None:

    echo = Echo()
    await front.ports.declare("w", BOX, PortWish(3000, host=HostRule.LOCALHOST))
    async with await front.serve(echo):
        for origin, seen in (
            (f"http://{front.host}", "http://localhost:3000"),
            ("https://evil.example", "https://evil.example"),
        ):
            wire = await opened(front, "/", f"Origin: {origin}")
            await wire.reply()
            assert b"\r\nHost: localhost:3000\r\n" in echo.head
            assert f"\r\nOrigin: {seen}\r\n".encode() in echo.head
            wire.close()


async def test_a_token_opens_an_upgrade_and_none_is_401(tmp_path: Path) -> None:
    echo = Echo()
    async with site(tmp_path, usual=PortAccess.TOKEN) as front, await front.serve(echo):
        token, _ = await front.ports.token("w", BOX, 3000, None, [])
        for target, more in (
            (f"/ws?a=1&preview_token={token}", ()),
            ("/ws?a=1", (f"X-Preview-Token: {token}",)),
            ("/ws?a=1", (f"Authorization: Bearer {token}",)),
            ("/ws?a=1", (f"Cookie: theirs=1; cloche_preview={token}; more=2",)),
            ("/ws?a=1", (f"Authorization: Bearer {OWNER}",)),
        ):
            wire = await opened(front, target, *more)
            assert (await wire.reply()).status == 101, (target, more)
            wire.close()
            assert echo.head.startswith(b"GET /ws?a=1 HTTP/1.1\r\n")
            assert token.encode() not in echo.head
            assert OWNER.encode() not in echo.head
            assert b"cloche_preview" not in echo.head
        for more in ((), (f"X-Preview-Token: {token}x",), ("Accept: text/html",)):
            wire = await opened(front, "/ws", *more)
            reply = await wire.reply()
            assert (reply.status, reply.get("location"), reply.get("content-type")) == (401, None, "application/json")
            wire.close()


async def test_what_is_open_ends_with_the_right_to_it(front: Site) -> None:

    await front.ports.declare("w", BOX, PortWish(3000, label="app"))
    async with await front.serve(Echo()):
        wire = await opened(front)
        await wire.reply()
        await front.ports.declare("w", BOX, PortWish(3000, label="other name"))
        await wire.send(b"still here")
        assert await wire.reader.readexactly(15) == b"firststill here"
        await front.ports.remove("w", BOX, 3000)
        assert await wire.ended()
        token, made = await front.ports.token("w", BOX, 3000, 1, [])
        wire = await opened(front, f"/v1/p/{token}/", host="localhost")
        assert (await wire.reply()).status == 101
        assert await wire.reader.readexactly(5) == b"first"
        assert await wire.ended()
        assert (await front.ask(f"GET /v1/p/{token}/ HTTP/1.1", host="localhost")).status == 401
        assert made.port == 3000


async def test_a_token_of_the_api_that_is_revoked_cuts_what_it_has_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else."""
    tokens: Any = AnyToken()

    async def owner(_world: World, token: str, sandbox_id: str) -> Owner | None:
        return await ApiCallers(tokens).owner(token, sandbox_id)

    monkeypatch.setattr(World, "owner", owner)
    async with site(tmp_path) as front, await front.serve(Echo()):
        target = f"/v1/sandboxes/{BOX}/proxy/3000/"
        wire = await opened(front, target, BEARER_LINE, host="localhost")
        other = await opened(front)
        for one in (wire, other):
            assert (await one.reply()).status == 101
            assert await one.reader.readexactly(5) == b"first"
        tokens.calls.end(tokens.info.prefix, revoked())
        assert await wire.ended()
        assert not tokens.calls
        await other.send(b"still here")
        assert await other.reader.readexactly(10) == b"still here"
        assert front.world.open == 1
        assert (await front.ask("GET /v1/sandboxes/x HTTP/1.1", host="localhost")).status == 404


async def test_a_connection_on_which_nothing_moves_is_cut(tmp_path: Path) -> None:
    async with site(tmp_path, Limits(idle=0.3)) as front, await front.serve(Echo()):
        wire = await opened(front)
        await wire.reply()
        assert await wire.reader.readexactly(5) == b"first"
        assert await wire.ended()


async def test_a_server_that_does_not_answer_is_504(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async with site(tmp_path, Limits(answer=0.2)) as front, await front.serve(silent):
        reply = await front.ask("GET / HTTP/1.1")
        assert (reply.status, b"has not answered" in reply.body) == (504, True)


@pytest.mark.parametrize("how", ["stop", "crowd"])
async def test_the_end_of_the_server_ends_what_is_open(tmp_path: Path, how: str) -> None:
    async with site(tmp_path) as front, await front.serve(Echo()):
        wires = [await opened(front) for _ in range(1 if how == "stop" else 20)]
        for wire in wires:
            await wire.reply()
            assert await wire.reader.readexactly(5) == b"first"
        idle = await front.connect()
        front.gateway.stop()
        for wire in (*wires, idle):
            assert await wire.ended()
