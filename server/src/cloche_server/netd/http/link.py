"""One side of a carried connection: a byte stream, and the HTTP/1.1 in it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import h11

from cloche_server.netd.http.request import MAX_HEAD

#: Bytes that are read at once, and about what is kept in each direction when the other side is slow.
READ: Final = 64 * 1024
#: For the handshake of TLS (seconds).
HANDSHAKE_SECONDS: Final = 15.0
#: An answer to a request that was not read to its end is waited for so long, and so many bytes of the rest are taken:
#: a connection that is closed with bytes unread loses what was sent last.
_LINGER_SECONDS: Final = 2.0
_LINGER_BYTES: Final = 4 * 1024 * 1024


class _Protocol(asyncio.StreamReaderProtocol):
    """Tells also those that do not read when the connection is lost."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self.lost = asyncio.Event()
        self.stirred: Callable[[], None] | None = None

    def _stir(self) -> None:
        stirred, self.stirred = self.stirred, None
        if stirred is not None:
            stirred()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._stir()

    def eof_received(self) -> bool | None:
        go_on = super().eof_received()
        self._stir()
        return go_on

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._stir()
        super().connection_lost(exc)


class Link:
    """Made by `to_guest` and `to_server`. `sent` and `received`: bytes inside TLS."""

    def __init__(
        self, transport: asyncio.Transport, protocol: _Protocol, reader: asyncio.StreamReader, role: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        self._transport = transport
        self._protocol = protocol
        self._reader = reader
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self.http = h11.Connection(role, max_incomplete_event_size=MAX_HEAD)
        self.sent = 0
        self.received = 0

    async def read(self) -> bytes:
        """b"" at the end. Raises OSError."""
        data = await self._reader.read(READ)
        self.received += len(data)
        return data

    async def write(self, data: bytes) -> None:
        """Returns when the other side has taken enough of it. Raises OSError."""
        if data:
            self.sent += len(data)
            self._writer.write(data)
            await self._writer.drain()

    async def next_event(self, patience: float) -> Any:
        """The next event of h11. Raises TimeoutError when nothing has come for `patience` seconds, OSError,
        `h11.RemoteProtocolError`."""
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event
            async with asyncio.timeout(patience):
                data = await self.read()
            self.http.receive_data(data)

    async def send(self, *events: h11.Event) -> None:
        """Raises OSError, `h11.LocalProtocolError`."""
        await self.write(b"".join(self.http.send(event) or b"" for event in events))

    async def wait_lost(self) -> None:
        await self._protocol.lost.wait()

    @property
    def ended(self) -> bool:
        """Nothing will come any more."""
        return self._reader.at_eof() or self._protocol.lost.is_set()

    def rest(self, stirred: Callable[[], None] | None) -> None:
        """Nobody reads here now: `stirred` is called once when something comes all the same, or the connection ends.
        None: it is read again."""
        self._protocol.stirred = stirred

    def end_writing(self) -> bool:
        """Says that nothing more will be sent. False where there is no such thing: in TLS."""
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write_eof()
            return True
        return False

    async def linger(self) -> None:
        """Lets the other side read what was sent, though it has not been listened to."""
        taken = 0
        self.end_writing()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while taken < _LINGER_BYTES and (data := await self.read()):
                    taken += len(data)

    def abort(self) -> None:
        """Closes it so that the other side sees that it was not the end."""
        self._transport.abort()

    async def aclose(self) -> None:
        """What was written is sent still, within a moment."""
        self._transport.close()
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                await self._protocol.lost.wait()
        except TimeoutError:
            self._transport.abort()
        except BaseException:
            self._transport.abort()
            raise


def _new() -> tuple[asyncio.StreamReader, _Protocol]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ, loop=loop)
    return reader, _Protocol(reader, loop)


async def to_guest(guest: socket.socket, context: ssl.SSLContext | None) -> Link:
    """Raises OSError (`ssl.SSLError` is one)."""
    guest.setblocking(False)
    reader, protocol = _new()
    loop = asyncio.get_running_loop()
    patience = None if context is None else HANDSHAKE_SECONDS
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, guest, ssl=context, ssl_handshake_timeout=patience
    )
    return Link(transport, protocol, reader, h11.SERVER)


async def to_server(server: socket.socket, context: ssl.SSLContext | None, host: str) -> Link:
    """Raises OSError; `ssl.SSLCertVerificationError` when the server is not who it should be."""
    reader, protocol = _new()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(
        lambda: protocol,
        sock=server,
        ssl=context,
        server_hostname=host if context is not None else None,
        ssl_handshake_timeout=None if context is None else HANDSHAKE_SECONDS,
    )
    return Link(transport, protocol, reader, h11.CLIENT)
