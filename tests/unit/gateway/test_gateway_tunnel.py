"""Raw TCP in a WebSocket, by a client of the protocol and by the command of the Python client."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from gateway_site import BOX, OWNER, STRANGER, Site, Wire
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage

from cloche._config import Settings
from cloche._tunnel import Refused, carry
from cloche_server.gateway.tunnel import tunnel

KEY = "dGhlIHNhbXBsZSBub25jZQ=="


@pytest.fixture
def open_front(front: Site) -> Site:
    front.gateway.tunnel = tunnel
    return front


class Socket:
    """A WebSocket that is open."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.ws = Connection(ConnectionType.CLIENT)
        self.waiting: list[Event] = []

    async def send(self, event: Event) -> None:
        await self.wire.send(self.ws.send(event))

    async def next(self) -> Event:
        async with asyncio.timeout(20):
            while not self.waiting:
                data = await self.wire.reader.read(65536)
                assert data, "the connection ended without a farewell"
                self.ws.receive_data(data)
                self.waiting = list(self.ws.events())
            return self.waiting.pop(0)

    async def read(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            event = await self.next()
            assert isinstance(event, BytesMessage), event
            got += event.data
        return got


async def opened(front: Site, *more: str, port: int = 3000, token: str = OWNER) -> tuple[Socket, Any]:
    wire = await front.connect()
    lines = [f"GET /v1/sandboxes/{BOX}/tunnel/{port} HTTP/1.1", "Host: localhost", "Connection: Upgrade"]
    lines += ["Upgrade: websocket", f"Sec-WebSocket-Key: {KEY}", f"Authorization: Bearer {token}", *more]
    await wire.send("\r\n".join(lines).encode() + b"\r\n\r\n")
    return Socket(wire), await wire.reply()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b"bye")


VERSION = "Sec-WebSocket-Version: 13"


async def test_messages_are_bytes(open_front: Site) -> None:
    async with await open_front.serve(echo):
        socket, reply = await opened(open_front, VERSION)
        assert (reply.status, reply.get("sec-websocket-accept")) == (101, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
        data = os.urandom(300_000)
        await socket.send(BytesMessage(data[:10], message_finished=False))
        await socket.send(BytesMessage(data[10:]))
        assert await socket.read(len(data)) == data
        await socket.send(Ping(b"p"))
        assert isinstance(await socket.next(), Pong)
        await socket.send(CloseConnection(1000))
        assert isinstance(await socket.next(), CloseConnection)
        socket.wire.close()


async def test_the_end_of_the_server_is_the_end(open_front: Site) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"one line\n")

    async with await open_front.serve(handler):
        socket, _ = await opened(open_front, VERSION)
        assert await socket.read(9) == b"one line\n"
        event = await socket.next()
        assert isinstance(event, CloseConnection)
        assert event.code == 1000
        socket.wire.close()


async def test_each_direction_ends_by_itself_for_who_knows_how(open_front: Site) -> None:
    async with await open_front.serve(echo):
        socket, reply = await opened(open_front, VERSION, "Sec-WebSocket-Protocol: other, cloche.tcp")
        assert reply.get("sec-websocket-protocol") == "cloche.tcp"
        await socket.send(BytesMessage(b"x"))
        await socket.send(BytesMessage(b""))
        assert await socket.read(4) == b"xbye"
        last = await socket.next()
        assert isinstance(last, BytesMessage)
        assert last.data == b""
        assert isinstance(await socket.next(), CloseConnection)
        socket.wire.close()


async def test_what_is_no_tunnel(open_front: Site) -> None:
    async with await open_front.serve(echo):
        for more in ((), ("Sec-WebSocket-Version: 12",)):
            socket, reply = await opened(open_front, *more)
            assert reply.status == 400
            socket.wire.close()
        for port, token, status in ((4000, OWNER, 502), (3000, STRANGER, 404), (3000, "x", 401), (0, OWNER, 400)):
            socket, reply = await opened(open_front, VERSION, port=port, token=token)
            assert reply.status == status
            socket.wire.close()
        plain = f"GET /v1/sandboxes/{BOX}/tunnel/3000 HTTP/1.1\nAuthorization: Bearer {OWNER}"
        assert (await open_front.ask(plain, host="localhost")).status == 400
        socket, _ = await opened(open_front, VERSION)
        await socket.send(TextMessage("text"))
        event = await socket.next()
        assert isinstance(event, CloseConnection)
        assert event.code == 1003
        socket, _ = await opened(open_front, VERSION)
        await socket.wire.send(b"\xff\xff\xff\xff\xff")
        event = await socket.next()
        assert isinstance(event, CloseConnection)
        assert event.code == 1002
        assert await socket.wire.ended()


async def test_the_command_joins_a_local_port(open_front: Site) -> None:
    settings = Settings(f"http://127.0.0.1:{open_front.port}", OWNER)

    async def local(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await carry(settings, BOX, 3000, reader, writer)
        finally:
            writer.close()

    async with await open_front.serve(echo), await asyncio.start_server(local, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        data = os.urandom(1_000_000)
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(30):
            assert await reader.read(-1) == data + b"bye"
        writer.close()
    reader = asyncio.StreamReader()
    with pytest.raises(Refused, match="Nothing listens on port 9"):
        await carry(settings, BOX, 9, reader, writer)
