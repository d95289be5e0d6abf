"""Bytes of one channel: what the client has sent, for one reader, and what it is sent, at its pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from cloche_server.ssh.flow import Connection

#: Bytes that wait for the reader before the client is told to wait.
READ_HIGH: Final = 256 * 1024
#: Bytes of the channel that wait for the client before the writer waits.
WRITE_HIGH: Final = 256 * 1024
STDERR: Final = 1


class Pipe:
    """Made by a session, which passes on what AsyncSSH tells it."""

    def __init__(self, connection: Connection, beat: Callable[[], None]) -> None:
        self._connection = connection
        self._beat = beat
        self._chan: Any = None
        self._buffer = bytearray()
        self._more = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._paused = False
        self._eof = False
        self.gone = False

    # --- what AsyncSSH tells

    def made(self, chan: Any) -> None:
        self._chan = chan
        chan.set_write_buffer_limits(high=WRITE_HIGH)

    def fed(self, data: bytes) -> None:
        self._beat()
        self._buffer += data
        if len(self._buffer) >= READ_HIGH and not self._paused:
            self._paused = True
            self._chan.pause_reading()
        self._more.set()

    def ended(self) -> None:
        self._eof = True
        self._more.set()

    def lost(self) -> None:
        self.gone = True
        self._more.set()
        self._writable.set()

    def pause(self) -> None:
        self._writable.clear()

    def resume(self) -> None:
        self._writable.set()

    # --- what the session does

    async def read(self) -> bytes:
        """The next bytes; empty at the end."""
        while not self._buffer:
            if self._eof or self.gone:
                return b""
            self._more.clear()
            await self._more.wait()
        data = bytes(self._buffer)
        self._buffer.clear()
        if self._paused and not self.gone:
            self._paused = False
            self._chan.resume_reading()
        return data

    async def write(self, data: bytes, datatype: int | None = None) -> None:
        """Sends, and waits while the client is slow. Raises `ConnectionResetError` when it has gone."""
        if self.gone:
            raise ConnectionResetError("the client has gone")
        self._beat()
        self._chan.write(data, datatype)
        await self._writable.wait()
        await self._connection.drained()
