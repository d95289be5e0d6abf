"""Messages and descriptors over a Unix stream socket: the socket part of the link between server and netd.

`FdStream` is one end of a connection; `FdClient` makes calls over it. Frames are those of `core/netctl.py`. All of it
belongs to one event loop.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cloche_server.core.netctl import MAX_FDS, MAX_FRAME, FrameError, FrameReader, encode_frame

_CHUNK: Final = 64 * 1024
#: A frame that the other side does not take in this time ends the connection (seconds).
SEND_TIMEOUT: Final = 10.0
CALL_TIMEOUT: Final = 10.0

Received = Callable[[dict[str, Any], list[int]], None]


class LinkLost(Exception):
    """The connection has ended; whether a call that was under way took effect is not known."""


class LinkRefused(Exception):
    """The other side answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class FdStream:
    """One end. `received` gets each message with its descriptors, which are the receiver's to close; `closed` is called
    once, when the connection has ended for whatever reason."""

    def __init__(
        self, sock: socket.socket, received: Received, closed: Callable[[], None], *, limit: int = MAX_FRAME
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = received
        self._closed = closed
        self._frames = FrameReader(limit)
        self._fds: deque[int] = deque()
        self._sending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._reading = False
        self._writable: asyncio.Future[None] | None = None
        self.open = True
        self.resume()

    def pause(self) -> None:
        """Reads no more until `resume`: what the other side sends waits in the kernel."""
        if self.open and self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())

    def resume(self) -> None:
        if self.open and not self._reading:
            self._reading = True
            self._loop.add_reader(self._sock.fileno(), self._read)

    def _read(self) -> None:
        try:
            data, fds = _receive(self._sock)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._fds.extend(fds)
        if not data or len(self._fds) > MAX_FDS * 2:
            self.close()
            return
        try:
            for message, count in self._frames.feed(data):
                if count > len(self._fds):
                    raise FrameError("descriptors are missing")
                self._received(message, [self._fds.popleft() for _ in range(count)])
                if not self.open:
                    return
        except FrameError:
            self.close()

    async def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Raises LinkLost, FrameError. A reader that is too slow loses the connection."""
        frame = memoryview(encode_frame(message, len(fds)))
        try:
            async with asyncio.timeout(SEND_TIMEOUT), self._sending:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                while frame:
                    frame = frame[await self._send_some(frame, rights) :]
                    rights = []
        except (OSError, TimeoutError) as error:
            self.close()
            raise LinkLost("the connection ended while a message was sent") from error
        except asyncio.CancelledError:
            self.close()  # half a frame may have gone
            raise

    async def _send_some(self, frame: memoryview, rights: list[Any]) -> int:
        while True:
            if not self.open:
                raise LinkLost("the connection has ended")
            try:
                return self._sock.sendmsg([frame[:_CHUNK]], rights)
            except BlockingIOError:
                await self._until_writable()

    async def _until_writable(self) -> None:
        self._writable = self._loop.create_future()
        self._loop.add_writer(self._sock.fileno(), self._wake)
        try:
            await self._writable
        finally:
            self._wake()

    def _wake(self) -> None:
        """The one who waits to write goes on; the loop forgets the descriptor before anybody can close it."""
        waiting, self._writable = self._writable, None
        if waiting is not None:
            self._loop.remove_writer(self._sock.fileno())
            if not waiting.done():
                waiting.set_result(None)

    def close(self) -> None:
        """Ends the connection; descriptors that nobody has taken are closed. May be called again."""
        if not self.open:
            return
        self.pause()
        self._wake()
        self.open = False
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())
        self._closed()


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    size = array.array("i").itemsize
    data, ancillary, flags, _ = sock.recvmsg(_CHUNK, socket.CMSG_SPACE(MAX_FDS * size), socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(content[: len(content) - len(content) % size])
            fds.extend(numbers)
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError("descriptors were lost")
    return data, fds


class FdClient:
    """Calls to the other side; several may be under way at once."""

    def __init__(self, sock: socket.socket, on_lost: Callable[[], None] | None = None) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._on_lost = on_lost
        self._stream = FdStream(sock, self._answer, self._lost)

    @classmethod
    async def connect(cls, path: Path, on_lost: Callable[[], None] | None = None) -> FdClient:
        """`on_lost` is called once when the connection ends, also by `close`. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, os.fspath(path))
            return cls(sock, on_lost)
        except BaseException:
            sock.close()
            raise

    @property
    def connected(self) -> bool:
        return self._stream.open

    async def call(self, op: str, *, fds: Sequence[int] = (), timeout: float = CALL_TIMEOUT, **fields: Any) -> Any:
        """The answer to one request. The descriptors are sent as copies and stay the caller's. Raises LinkRefused,
        LinkLost, FrameError, TimeoutError."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout):
                # A call that is given up does not end the connection under the others in the middle of a frame.
                sending = asyncio.ensure_future(self._send({"id": number, "op": op, **fields}, fds))
                sending.add_done_callback(_retrieve)
                await asyncio.shield(sending)
                return await answer
        finally:
            self._waiting.pop(number, None)

    async def _send(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        copies = [os.dup(fd) for fd in fds]
        try:
            await self._stream.send(message, copies)
        finally:
            for fd in copies:
                os.close(fd)

    def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        number = message.get("id")
        waiting = self._waiting.get(number) if isinstance(number, int) else None
        if waiting is None or waiting.done():
            return  # given up meanwhile
        error = message.get("error")
        if isinstance(error, Mapping):
            waiting.set_exception(LinkRefused(str(error.get("code")), str(error.get("message"))))
        else:
            waiting.set_result(message.get("ok"))

    def _lost(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(LinkLost("the connection has ended"))
        if self._on_lost is not None:
            self._on_lost()

    def close(self) -> None:
        self._stream.close()

    async def __aenter__(self) -> FdClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _retrieve(task: asyncio.Task[None]) -> None:
    """Whoever waited for it has seen the exception, or has gone."""
    if not task.cancelled():
        task.exception()


def listen(path: Path) -> socket.socket:
    """A listening socket that only its owner may connect to. What is left there of an earlier one is removed: hold a
    lock. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        sock.bind(os.fspath(path))
        sock.listen(16)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(before)
    sock.setblocking(False)
    return sock
