"""Raw TCP to a port of a guest in a WebSocket: binary messages are bytes, of whatever length.

A client that asks for the sub-protocol `cloche.tcp` can end one direction: an empty message says that its sender has no
more. For others the end of the server is the end of the WebSocket.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Callable
from typing import Final

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from cloche_server.app.dialing import GuestDialer
from cloche_server.core.http1 import HttpError, RequestHead, tokens
from cloche_server.core.streams import ByteStream
from cloche_server.gateway.admission import Grant
from cloche_server.gateway.exchange import Exchange
from cloche_server.gateway.sessions import Session

PROTOCOL: Final = b"cloche.tcp"
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_NORMAL: Final = 1000
_PROTOCOL_ERROR: Final = 1002
_NOT_BINARY: Final = 1003
_BROKEN: Final = 1011


async def tunnel(exchange: Exchange, grant: Grant, dialer: GuestDialer, session: Session) -> None:
    """Raises HttpError, and what a dial raises, before the WebSocket is opened."""
    accept = _accept(exchange.head)
    upstream = await dialer.dial(grant.record.workspace, grant.record.id, grant.route.port)
    try:
        halves = PROTOCOL in tokens(exchange.head.headers, b"sec-websocket-protocol")
        headers = [(b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"), (b"Sec-WebSocket-Accept", accept)]
        if halves:
            headers.append((b"Sec-WebSocket-Protocol", PROTOCOL))
        client = await exchange.switch(b"Switching Protocols", headers)
        await _Tunnel(client, upstream, halves, session.beat).run()
    finally:
        upstream.close()


def _accept(head: RequestHead) -> bytes:
    keys = head.all(b"sec-websocket-key")
    try:
        valid = len(keys) == 1 and len(base64.b64decode(keys[0], validate=True)) == 16
    except binascii.Error:
        valid = False
    if not valid or head.method != b"GET" or head.first(b"sec-websocket-version") != b"13":
        raise HttpError(400, "this is not the opening of a WebSocket of version 13")
    return base64.b64encode(hashlib.sha1(keys[0] + _GUID, usedforsecurity=False).digest())


class _Tunnel:
    """`halves`: each direction ends by itself, and the WebSocket with the second of them."""

    def __init__(self, client: ByteStream, upstream: ByteStream, halves: bool, beat: Callable[[], None]) -> None:
        self._client = client
        self._upstream = upstream
        self._halves = halves
        self._beat = beat
        self._frames = Connection(ConnectionType.SERVER)
        self._client_ended = False
        self._server_ended = False

    async def run(self) -> None:
        """Until both directions have ended, the client ends the WebSocket, or something breaks."""
        code = _NORMAL
        try:
            async with asyncio.TaskGroup() as group:
                down = group.create_task(self._down())
                up = group.create_task(self._up())
                down.add_done_callback(lambda _: up.cancel() if self._over else None)
                up.add_done_callback(lambda _: down.cancel())
        except* ConnectionError:
            code = _BROKEN
        except* RemoteProtocolError:
            code = _PROTOCOL_ERROR
        await self._close(code)

    @property
    def _over(self) -> bool:
        return self._server_ended and (self._client_ended or not self._halves)

    async def _down(self) -> None:
        while data := await self._upstream.read():
            self._beat()
            await self._send(data)
        self._server_ended = True
        if self._halves:
            await self._send(b"")

    async def _up(self) -> None:
        while not self._over and (data := await self._client.read()):
            self._frames.receive_data(data)
            for event in self._frames.events():
                self._beat()
                if not await self._take(event):
                    return

    async def _take(self, event: Event) -> bool:
        """False: the client has ended the WebSocket, or must."""
        if isinstance(event, BytesMessage):
            if event.data and not self._client_ended:
                await self._upstream.write(bytes(event.data))
            elif self._halves and event.message_finished:
                self._client_ended = True
                await self._upstream.write_eof()
        elif isinstance(event, Ping):
            await self._client.write(self._frames.send(event.response()))
        elif isinstance(event, TextMessage):
            await self._close(_NOT_BINARY)
            return False
        elif isinstance(event, CloseConnection):
            await self._client.write(self._frames.send(event.response()))
            return False
        return True

    async def _send(self, data: bytes) -> None:
        await self._client.write(self._frames.send(BytesMessage(data)))

    async def _close(self, code: int) -> None:
        if self._frames.state is not ConnectionState.OPEN:
            return
        try:
            await self._client.write(self._frames.send(CloseConnection(code)))
        except (ConnectionError, LocalProtocolError):
            return
