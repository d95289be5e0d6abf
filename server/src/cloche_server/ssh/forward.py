"""Connections that are forwarded: to ports and Unix sockets of the sandbox, or from its listeners to the client."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Coroutine
from typing import Any

import asyncssh

from cloche_server.core.errors import ClocheError
from cloche_server.core.streams import ByteStream
from cloche_server.ssh.flow import Connection
from cloche_server.ssh.pipe import Pipe


def is_sandbox(host: str) -> bool:
    """Whether a destination is the sandbox itself, as it is seen from inside."""
    name = host.strip("[]").rstrip(".").lower()
    if name in {"localhost", "ip6-localhost"}:
        return True
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


class Forwarded(asyncssh.SSHTCPSession[bytes], asyncssh.SSHUNIXSession[bytes]):
    """Joins a channel with a connection that is open already."""

    def __init__(
        self,
        connection: Connection,
        upstream: ByteStream,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        beat: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        self._leave = leave
        self._pipe = Pipe(connection, beat)
        self._upstream = upstream
        self._start = start
        self._chan: Any = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, chan: Any) -> None:
        self._chan = chan
        self._pipe.made(chan)

    def session_started(self) -> None:
        self._task = self._start(self._run())

    def data_received(self, data: bytes, datatype: Any) -> None:
        self._pipe.fed(data)

    def eof_received(self) -> bool:
        self._pipe.ended()
        return True

    def pause_writing(self) -> None:
        self._pipe.pause()

    def resume_writing(self) -> None:
        self._pipe.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pipe.lost()
        self._upstream.close()
        self._leave()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._down())
                group.create_task(self._up())
        except* (OSError, ClocheError):
            if not self._pipe.gone:
                self._chan.abort()
        else:
            self._chan.close()
        finally:
            self._upstream.close()

    async def _down(self) -> None:
        while data := await self._upstream.read():
            await self._pipe.write(data)
        if not self._pipe.gone:
            with contextlib.suppress(OSError):
                self._chan.write_eof()

    async def _up(self) -> None:
        while data := await self._pipe.read():
            await self._upstream.write(data)
        await self._upstream.write_eof()
