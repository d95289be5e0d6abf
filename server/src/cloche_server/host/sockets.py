"""A TCP connection as a `ByteStream`, with what a server needs besides: heads of messages, and word of a hang-up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Final, cast

#: Bytes that are buffered before reading stops.
READ_HIGH: Final = 256 * 1024
WRITE_HIGH: Final = 256 * 1024


class SocketStream(asyncio.Protocol):
    """One connection. Reading pauses when nobody takes what has come, writing waits while the peer is slow."""

    def __init__(self, made: Callable[[SocketStream], None] | None = None) -> None:
        """`made` is called when the connection is there."""
        self._loop = asyncio.get_running_loop()
        self._made = made
        self.transport: asyncio.Transport
        self._buffer = bytearray()
        self._reader: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._eof = self._full = False
        self._lost: Exception | None = None
        self._closed = False
        #: Called once when the peer has ended or is gone; what it sent before may be unread still.
        self.on_gone: Callable[[], None] | None = None

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH)
        if self._made is not None:
            self._made(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= READ_HIGH and not self._full and not self._closed:
            self._full = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._eof = True
        self._wake()
        self._gone()
        return self.transport.get_extra_info("ssl_object") is None  # TLS has no half of a connection

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if not self._eof or exc is not None:
            self._lost = exc or ConnectionResetError("the connection was lost")
        self._wake()
        self._writable.set()
        self._gone()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _gone(self) -> None:
        told, self.on_gone = self.on_gone, None
        if told is not None:
            told()

    # --- reading

    @property
    def is_gone(self) -> bool:
        """The peer has ended, or the connection is lost."""
        return self._eof or self._closed

    @property
    def buffered(self) -> int:
        """Bytes that have come and were not taken."""
        return len(self._buffer)

    async def _more(self) -> bool:
        """Waits for more bytes; False at the end. Raises `ConnectionError`."""
        before = len(self._buffer)
        while len(self._buffer) == before:
            if self._lost is not None:
                raise ConnectionResetError("the connection was lost") from self._lost
            if self._eof or self._closed:
                return False
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return True

    def _taken(self) -> None:
        if self._full and len(self._buffer) < READ_HIGH // 2 and not self._closed:
            self._full = False
            self.transport.resume_reading()

    async def read(self) -> bytes:
        if not self._buffer and not await self._more():
            return b""
        data = bytes(self._buffer)
        self._buffer.clear()
        self._taken()
        return data

    def unread(self, data: bytes) -> None:
        """Puts back what was read too much."""
        self._buffer[:0] = data

    async def wait_data(self) -> bool:
        """Until there is something to read; False at the end. Raises `ConnectionError`."""
        return bool(self._buffer) or await self._more()

    async def read_until(self, ends: tuple[bytes, ...], limit: int) -> bytes | None:
        """Up to and with the first of `ends`; None when so many bytes hold none, or the connection ends before.

        What has come is then still there.
        """
        looked = 0
        while True:
            found = [at + len(end) for end in ends if (at := self._buffer.find(end, looked)) >= 0]
            if found and min(found) <= limit:
                size = min(found)
                data = bytes(memoryview(self._buffer)[:size])
                del self._buffer[:size]
                self._taken()
                return data
            if found or len(self._buffer) >= limit:
                return None
            looked = max(0, len(self._buffer) - max(len(end) for end in ends) + 1)
            if not await self._more():
                return None

    # --- writing

    async def write(self, data: bytes) -> None:
        if self._closed:
            raise ConnectionResetError("the connection was lost")
        self.transport.write(data)
        await self._writable.wait()

    async def write_eof(self) -> None:
        if self._closed:
            return
        if not self.transport.can_write_eof():  # TLS knows no such thing
            self.close()
            return
        with contextlib.suppress(OSError):  # it is gone, and whoever reads will learn of it
            self.transport.write_eof()

    def close(self) -> None:
        """Sends what was written, and closes."""
        if not self._closed:
            self._closed = True
            self._wake()
            self.transport.close()

    def abort(self) -> None:
        """Cuts the connection, so that the peer sees that something is missing."""
        self._closed = True
        self._wake()
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            # Otherwise this would look like an orderly end to whoever reads until there is one.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


async def connect_tcp(host: str, port: int, timeout: float) -> SocketStream:
    """Raises `OSError`, `TimeoutError`."""
    async with asyncio.timeout(timeout):
        _, stream = await asyncio.get_running_loop().create_connection(SocketStream, host, port)
    return stream
