"""Connections to ports over the link of the real agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.guest import tunnel as tunnel_module
from cloche_server.guest.client import GuestClient
from cloche_server.guest.tunnel import MAX_LINGERING

pytestmark = pytest.mark.thorough

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[int]:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(run, host, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def read_all(tunnel: object) -> bytes:
    got = b""
    while data := await tunnel.read():  # type: ignore[attr-defined]
        got += data
    return got


async def test_bytes_both_ways_and_both_ends(agent_client: GuestClient) -> None:
    data = os.urandom(3_000_000)
    async with serving(echo) as port:
        tunnel = await agent_client.tunnel(port)
        reading = asyncio.ensure_future(read_all(tunnel))
        await tunnel.write(data)
        await tunnel.write_eof()
        assert await reading == data
        tunnel.close()


async def test_the_server_may_end_first(agent_client: GuestClient) -> None:
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"bye")
        writer.write_eof()
        heard.set_result(await reader.read(-1))

    async with serving(handler) as port:
        tunnel = await agent_client.tunnel(port)
        assert await read_all(tunnel) == b"bye"
        await tunnel.write(b"still here")
        await tunnel.write_eof()
        assert await heard == b"still here"
        tunnel.close()


async def test_the_last_bytes_arrive_although_nobody_waits_for_them(agent_client: GuestClient) -> None:
    heard: asyncio.Queue[int] = asyncio.Queue()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        await asyncio.sleep(0.02)
        heard.put_nowait(len(await reader.read(-1)))

    async with serving(handler) as port:
        for _ in range(20):
            tunnel = await agent_client.tunnel(port)
            assert await read_all(tunnel) == b""
            await tunnel.write(bytes(120_000))
            await tunnel.write_eof()
            tunnel.close()
            assert await heard.get() == 120_000


async def test_a_server_that_takes_nothing_is_not_waited_for_without_end(
    agent_client: GuestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel_module, "LINGER_SECONDS", 0.3)
    never = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        await never.wait()

    async with serving(handler) as port:
        lingering = agent_client._caller.lingering
        for _ in range(MAX_LINGERING + 3):
            tunnel = await agent_client.tunnel(port)
            assert await read_all(tunnel) == b""
            sending = asyncio.ensure_future(tunnel.write(bytes(4_000_000)))
            await asyncio.sleep(0)
            await tunnel.write_eof()
            tunnel.close()
            sending.cancel()
            assert sum(not one.closed for one in lingering) <= MAX_LINGERING
        async with asyncio.timeout(20):
            while any(not one.closed for one in lingering):
                await asyncio.sleep(0.02)
        never.set()


async def test_nothing_listens(agent_client: GuestClient) -> None:
    async with serving(echo) as port:
        pass
    with pytest.raises(ClocheError) as caught:
        await agent_client.tunnel(port)
    assert (caught.value.code, str(port) in caught.value.message) == ("port.closed", True)


async def test_a_break_is_no_end(agent_client: GuestClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with serving(handler) as port:
        tunnel = await agent_client.tunnel(port)
        await tunnel.write(b"x")
        with pytest.raises(ConnectionError):
            await read_all(tunnel)
        with pytest.raises(ConnectionError):
            for _ in range(100):
                await tunnel.write(bytes(65536))
                await asyncio.sleep(0)
        tunnel.close()


async def test_what_stands_still_holds_up_nothing_else(agent_client: GuestClient) -> None:
    """Neither servers that do not read, nor readers here that do not."""

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(4_000_000))
        await asyncio.Event().wait()

    async with serving(deaf) as port, serving(echo) as other:
        still = [await agent_client.tunnel(port) for _ in range(80)]
        much = bytes(8_000_000)  # more than all buffers on the way
        sending = [asyncio.ensure_future(tunnel.write(much)) for tunnel in still]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in sending)
        tunnel = await agent_client.tunnel(other)
        reading = asyncio.ensure_future(read_all(tunnel))
        data = os.urandom(1_000_000)
        async with asyncio.timeout(60):
            await tunnel.write(data)
            await tunnel.write_eof()
            assert await reading == data
        assert (await agent_client.info()).pid > 0
        for task in sending:
            task.cancel()
        await asyncio.wait(sending)
        for one in (*still, tunnel):
            one.close()
    assert agent_client.connected


async def test_what_listens(agent_client: GuestClient) -> None:
    async with serving(echo) as port:
        found = {one.port: one for one in await agent_client.ports()}
    assert (found[port].address, found[port].pid) == ("127.0.0.1", os.getpid())
    assert found[port].process
