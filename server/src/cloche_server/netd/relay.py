"""Bytes between a guest and where it may go: moved inside the kernel (`splice`), both ways, with half-close.

What one side does not take is not read from the other, so memory stays flat. A direction borrows a pipe while it has
bytes in flight; idle connections hold none.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable
from typing import Final

from cloche_server.netd.bucket import Bucket
from cloche_server.netd.waits import reset

#: Large pipes are faster, but the kernel gives one user 64 MiB of them, and tiny ones after that: so a few are large.
#: They come back as soon as a sink has taken all, so those that are fast have them.
_LARGE: Final = 1024 * 1024
_MOST_LARGE: Final = 24
_SMALL: Final = 256 * 1024
_F_SETPIPE_SZ: Final = 1031
_KEPT_PIPES: Final = 32
#: One direction moves at most so much before others have their turn.
_TURN: Final = 2 * 1024 * 1024
_FLAGS: Final = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
_AGAIN: Final = frozenset({errno.EAGAIN, errno.EINTR})

#: Where it is read, where it is written, and whether it is one of the large ones.
Pipe = tuple[int, int, bool]


class Pipes:
    """Empty pipes, for whoever has bytes in flight."""

    def __init__(self) -> None:
        self._idle: list[Pipe] = []
        self._large = 0

    def borrow(self) -> Pipe:
        """Raises OSError when there are no descriptors left."""
        if self._idle:
            return self._idle.pop()
        source, sink = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        large = self._large < _MOST_LARGE
        self._large += large
        with contextlib.suppress(OSError):  # past the limit of the user it stays small
            fcntl.fcntl(sink, _F_SETPIPE_SZ, _LARGE if large else _SMALL)
        return source, sink, large

    def give_back(self, pipe: Pipe, *, empty: bool) -> None:
        if empty and pipe[2]:
            self._idle.append(pipe)
        elif empty and len(self._idle) < _KEPT_PIPES:
            self._idle.insert(0, pipe)  # the large ones are taken first
        else:
            self._large -= pipe[2]
            os.close(pipe[0])
            os.close(pipe[1])


class _Way:
    """One direction. `moved` hears of every piece that arrived."""

    def __init__(
        self,
        relay: Relay,
        source: socket.socket,
        sink: socket.socket,
        bucket: Bucket,
        moved: Callable[[int], None],
        first: Callable[[], None] | None,
    ) -> None:
        self._relay = relay
        self._loop = relay.loop
        self._source, self._sink = source, sink
        self._bucket = bucket
        self._moved = moved
        self._first = first
        self._pipe: Pipe | None = None
        self._pending = 0
        self._timer: asyncio.TimerHandle | None = None
        self._reading = self._writing = False
        self.done = False
        self._read()

    def _read(self, on: bool = True) -> None:
        if on is not self._reading:
            self._reading = on
            if on:
                self._loop.add_reader(self._source.fileno(), self._pull)
            else:
                self._loop.remove_reader(self._source.fileno())

    def _write(self, on: bool) -> None:
        if on is not self._writing:
            self._writing = on
            if on:
                self._loop.add_writer(self._sink.fileno(), self._push)
            else:
                self._loop.remove_writer(self._sink.fileno())

    def _pull(self) -> None:
        try:
            if self._first is not None:
                self._first()
                self._first = None
            for _ in range(_TURN // _LARGE):
                if not self._step():
                    return
        except OSError as error:
            self._relay.fail(error)

    def _step(self) -> bool:
        """Takes from the source and hands on; whether there may be more at once."""
        want = self._bucket.take(_LARGE, self._loop.time())
        if want == 0:
            self._read(False)
            self._timer = self._loop.call_later(self._bucket.delay(), self._resume)
            return False
        if self._pipe is None:
            self._pipe = self._relay.pipes.borrow()
        try:
            got = os.splice(self._source.fileno(), self._pipe[1], want, flags=_FLAGS)
        except OSError as error:
            self._bucket.give_back(want)
            self._release()
            if error.errno in _AGAIN:
                return False
            raise
        self._bucket.give_back(want - got)
        if got == 0:
            self._finish()
            return False
        self._pending += got
        return self._flush() and got == want

    def _resume(self) -> None:
        self._timer = None
        if not self.done:
            self._read()

    def _push(self) -> None:
        try:
            self._flush()
        except OSError as error:
            self._relay.fail(error)

    def _flush(self) -> bool:
        """Hands on what is in the pipe; whether all of it went."""
        assert self._pipe is not None
        while self._pending:
            try:
                put = os.splice(self._pipe[0], self._sink.fileno(), self._pending, flags=_FLAGS)
            except OSError as error:
                if error.errno not in _AGAIN:
                    raise
                self._read(False)
                self._write(True)
                return False
            self._pending -= put
            self._moved(put)
            if self._relay.over:
                return False
        self._write(False)
        self._release()
        if self._timer is None:
            self._read()
        return True

    def _release(self) -> None:
        if self._pipe is not None:
            self._relay.pipes.give_back(self._pipe, empty=self._pending == 0)
            self._pipe = None

    def _finish(self) -> None:
        """The source has no more: the sink is told, the other way goes on."""
        self.stop()
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)
        self._relay.finished()

    def stop(self) -> None:
        self.done = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._read(False)
        self._write(False)
        self._release()


class Relay:
    """Carries until both ways have ended, one failed, or `cut` is called; `wait` returns then, with both sockets
    closed. `first` is called once before the first byte of the guest is taken."""

    def __init__(
        self,
        guest: socket.socket,
        upstream: socket.socket,
        *,
        pipes: Pipes,
        up: Bucket,
        down: Bucket,
        moved: Callable[[int, int], None],
        first: Callable[[], None] | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.pipes = pipes
        self.over = False
        self._socks = (guest, upstream)
        self._ended: asyncio.Future[None] = self.loop.create_future()
        self._ways: list[_Way] = []
        self._ways.append(_Way(self, guest, upstream, up, lambda count: moved(count, 0), first))
        self._ways.append(_Way(self, upstream, guest, down, lambda count: moved(0, count), None))

    def finished(self) -> None:
        if len(self._ways) == 2 and all(way.done for way in self._ways):
            self._end(abort=False)

    def fail(self, _error: OSError) -> None:
        self._end(abort=True)

    def cut(self) -> None:
        """Both sides see a reset."""
        self._end(abort=True)

    def _end(self, *, abort: bool) -> None:
        if self.over:
            return
        self.over = True
        for way in self._ways:
            way.stop()
        for sock in self._socks:
            if abort:
                reset(sock)
            else:
                sock.close()
        if not self._ended.done():
            self._ended.set_result(None)

    async def wait(self) -> None:
        try:
            await self._ended
        finally:
            self.cut()
