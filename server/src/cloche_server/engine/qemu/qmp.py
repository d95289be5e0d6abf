"""An asyncio QMP client: one socket, commands answered by number, events to one listener.

Callback-driven, so there is no reader task to own. Losing the socket fails every open command.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloche_server.engine.qemu.qmp_codec import (
    Decoder,
    Failure,
    Greeting,
    Message,
    QmpEvent,
    QmpProtocolError,
    Return,
    encode,
)


class QmpError(Exception):
    """QEMU refused a command: `command`, the error class `kind`, and its `description`."""

    def __init__(self, command: str, kind: str, description: str) -> None:
        super().__init__(f"{command}: {description}")
        self.command = command
        self.kind = kind
        self.description = description


class QmpLost(Exception):
    """The QMP socket is closed."""


EventListener = Callable[[QmpEvent], None]


class QmpClient(asyncio.Protocol):
    """One QMP session. Make it with `QmpClient.connect`."""

    def __init__(self, on_event: EventListener) -> None:
        self._decoder = Decoder()
        self._on_event = on_event
        self._transport: asyncio.Transport | None = None
        self._open: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._next = 1
        self._handing_over = asyncio.Lock()
        self._greeting: asyncio.Future[Greeting] = asyncio.get_running_loop().create_future()
        self.version = (0, 0, 0)
        self.closed = asyncio.Event()

    @classmethod
    async def connect(cls, path: Path, on_event: EventListener, *, timeout: float) -> QmpClient:
        """Connects and negotiates. Raises `QmpLost` when nobody listens or nobody answers in time."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                _, client = await loop.create_unix_connection(lambda: cls(on_event), str(path))
                try:
                    client.version = (await client._greeting).version
                    await client.execute("qmp_capabilities")
                except BaseException:
                    client.close()
                    raise
        except (OSError, TimeoutError) as error:
            raise QmpLost(f"no QMP at {path.name}: {error}") from error
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self._handle(message)
        except QmpProtocolError:
            self.close()

    def _handle(self, message: Message) -> None:
        if isinstance(message, QmpEvent):
            self._on_event(message)
        elif isinstance(message, Greeting):
            if not self._greeting.done():
                self._greeting.set_result(message)
        else:
            command, future = self._open.pop(message.id or 0, ("", None))
            if future is None or future.done():
                return
            if isinstance(message, Return):
                future.set_result(message.value)
            elif isinstance(message, Failure):
                future.set_exception(QmpError(command, message.kind, message.description))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.closed.set()
        lost = QmpLost("the QMP socket was closed")
        if not self._greeting.done():
            self._greeting.set_exception(lost)
            self._greeting.exception()  # retrieved here: nobody may be waiting any more
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(lost)
        self._open.clear()

    @property
    def connected(self) -> bool:
        return self._transport is not None

    async def execute(self, command: str, arguments: Mapping[str, Any] | None = None, *, fd: int | None = None) -> Any:
        """Runs a command; `fd` goes with it. Raises `QmpError` (refused) or `QmpLost`. The caller sets the deadline."""
        if fd is not None:
            async with self._handing_over:  # QEMU keeps the descriptor that came last until a command takes it
                return await self._execute(command, arguments, fd)
        return await self._execute(command, arguments, None)

    async def _execute(self, command: str, arguments: Mapping[str, Any] | None, fd: int | None) -> Any:
        if self._transport is None:
            raise QmpLost("the QMP socket was closed")
        number = self._next
        self._next += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = (command, future)
        try:
            message = encode(command, arguments, number)
            if fd is None:
                self._transport.write(message)
            else:
                await self._send_with(message, fd)
            return await future
        finally:
            self._open.pop(number, None)

    async def _send_with(self, message: bytes, fd: int) -> None:
        """Past the transport, which cannot carry descriptors, and only when it has nothing left to send."""
        while self._transport is not None and self._transport.get_write_buffer_size():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)  # the caller's deadline ends it
        if self._transport is None:
            raise QmpLost("the QMP socket was closed")
        own = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        with own:
            try:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
                sent = own.sendmsg([message], [rights], socket.MSG_DONTWAIT)
            except OSError as error:
                raise QmpLost(f"the QMP socket takes no descriptor: {error}") from error
        if sent < len(message):
            self._transport.write(message[sent:])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
