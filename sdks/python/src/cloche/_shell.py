"""`cloche shell`: this terminal, joined to one in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from ._async.sandbox import AsyncSandbox
from ._async.terminal import AsyncTerminal
from .errors import ConnectionLost

_PIECE = 65536
#: So often a reader there is told again that there is no more (seconds).
_END_AGAIN = 0.5
_UNKNOWN = os.terminal_size((80, 24))
#: They end this program, not what runs in the sandbox.
_ENDING = (signal.SIGTERM, signal.SIGHUP)


async def shell(sandbox_id: str, process: str | None, from_offset: int | None) -> int:
    """Joins both until the far one has ended; returns its exit code. The near one is raw meanwhile, if it is one."""
    sandbox = await AsyncSandbox.connect(sandbox_id)
    size = _size()
    async with sandbox.terminal(size.columns, size.lines, process=process, from_offset=from_offset) as far:
        again = f"come back with: cloche shell {sandbox_id} --process {far.process_id}"
        with _ending() as ended:
            try:
                return await _join(far, size)
            except ConnectionLost as error:
                raise ConnectionLost(f"{error}; {again} --from {far.offset}") from error
            except asyncio.CancelledError:
                if not ended:
                    raise
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"\r\nended by {ended[0].name}; {again} --from {far.offset}", file=sys.stderr, flush=True)
    return 128 + ended[0]


def _size() -> os.terminal_size:
    """Of the terminal itself: what a shell has exported as COLUMNS stays as it is when the window changes."""
    for stream in (sys.stdout, sys.stdin, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            size = os.get_terminal_size(stream.fileno())
            if size.columns and size.lines:
                return size
    return _UNKNOWN


@contextlib.contextmanager
def _ending() -> Iterator[list[signal.Signals]]:
    """A signal that ends this program cancels the task instead, so that the terminal is left as it was."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    came: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        came.append(number)
        if task is not None and len(came) == 1:
            task.cancel()

    for number in _ENDING:
        loop.add_signal_handler(number, end, number)
    try:
        yield came
    finally:
        for number in _ENDING:
            loop.remove_signal_handler(number)


async def _join(far: AsyncTerminal, known: os.terminal_size) -> int:
    loop = asyncio.get_running_loop()
    resizing: set[asyncio.Task[None]] = set()

    def resized() -> None:
        size = _size()
        task = loop.create_task(far.resize(size.columns, size.lines))
        resizing.add(task)
        task.add_done_callback(resizing.discard)

    loop.add_signal_handler(signal.SIGWINCH, resized)
    if _size() != known:  # it has changed while the connection was made
        resized()
    typing = asyncio.ensure_future(_type(far))
    try:
        with _raw(sys.stdin.fileno()):
            while data := await far.read():
                await asyncio.to_thread(_show, data)
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        for task in (typing, *resizing):
            task.cancel()
        await asyncio.gather(typing, *resizing, return_exceptions=True)
    return far.exit_code or 0


def _show(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


async def _type(far: AsyncTerminal) -> None:
    """What is typed here is typed there. At the end of a file or pipe the far one sees the end of its input, whenever
    it reads: the character that says so is lost when it comes while a program takes the terminal over, and ends only
    what reads just then."""
    try:
        async for data in _typed(sys.stdin.fileno()):
            await far.write(data)
    except OSError:  # the near one is gone, which is no end of the input
        return
    while True:
        await far.write(b"\x04")
        await asyncio.sleep(_END_AGAIN)


async def _typed(fd: int) -> Any:
    try:
        while True:
            await _readable(fd)
            data = os.read(fd, _PIECE)
            if not data:
                return
            yield data
    except PermissionError:  # a file is always ready, and no loop waits for it
        while data := await asyncio.to_thread(os.read, fd, _PIECE):
            yield data


async def _readable(fd: int) -> None:
    """Waits until a read does not. Once for each read: a stale call that says so would make the next one hold up all,
    also what is to be shown, until somebody types."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def come() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, come)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Every key goes to the far side, Ctrl-C too."""
    if not os.isatty(fd):
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSANOW)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
