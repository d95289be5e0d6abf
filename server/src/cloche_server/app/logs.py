"""Logs of a sandbox: its console, its agent, its processes and its services, in lines, from a place on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.app.access import Access
from cloche_server.app.console import ConsoleLog
from cloche_server.app.process_output import Chunk, Loss, ProcessStream, SoFar
from cloche_server.app.processes import Processes
from cloche_server.app.sandbox_services import SandboxServices
from cloche_server.core.errors import ClocheError
from cloche_server.core.logs import Cursor, LineBuffer, LogEnd, LogGap, LogItem, LogLine, check_source, line_text
from cloche_server.core.process import RECORD_KB_MAX
from cloche_server.guest.errors import protocol_error

#: A page ends behind so much text (characters), or so many lines.
PAGE_MAX: Final = 1024 * 1024
LINES_MAX: Final = 50_000
#: Text that is held for one answer, whatever a guest sends (characters): a little more than an honest log can have.
HELD_MAX: Final = (RECORD_KB_MAX + 1024) * 1024
#: After so many lines others have their turn.
_TURN: Final = 500

#: Opens the output from an offset on, to another one or as it grows.
_Opener = Callable[[int, int | None], Awaitable[ProcessStream]]


@dataclass(frozen=True, slots=True)
class _Extent:
    """Which log it is now, and how long (bytes)."""

    mark: str
    so_far: int


@dataclass(frozen=True, slots=True)
class LogPage:
    """`more`: there is more already behind `next`. `final`: nothing will ever follow."""

    lines: tuple[LogLine, ...]
    gap_bytes: int
    restarted: bool
    next: Cursor
    more: bool
    final: bool


class Log:
    """One log of one sandbox, as its source says. Each method may be called more than once."""

    def __init__(self, begin: Callable[[Cursor | None, bool, bool], AsyncGenerator[LogItem]]) -> None:
        self._begin = begin

    async def page(self, cursor: Cursor | None, tail: int | None) -> LogPage:
        """What there is now, from a place on: a bounded part of it, or its last `tail` lines."""
        lines: deque[LogLine] = deque()
        size = lost = seen = 0
        restarted = False
        async with aclosing(self._begin(cursor, False, False)) as items:
            async for item in items:
                seen += 1
                if seen % _TURN == 0:
                    await asyncio.sleep(0)
                if isinstance(item, LogEnd):
                    return LogPage(tuple(lines), lost, restarted, item.next, False, item.final)
                if isinstance(item, LogGap):
                    lost += item.bytes
                    restarted = restarted or item.restarted
                    continue
                lines.append(item)
                size += len(item.text) + 1
                if tail is not None:
                    while len(lines) > tail or size > HELD_MAX:
                        size -= len(lines.popleft().text) + 1
                elif item.next is not None and (size >= PAGE_MAX or len(lines) >= LINES_MAX):
                    return LogPage(tuple(lines), lost, restarted, item.next, True, False)
                elif size > HELD_MAX:
                    raise protocol_error("a log that is longer than one can be")
        raise AssertionError("the last item of a log is its end")

    async def follow(self, cursor: Cursor | None, tail: int | None) -> AsyncGenerator[LogItem]:
        """From a place on (or its last `tail` lines) as it grows; the last one is a final `LogEnd`."""
        replay = cursor is None and tail is None
        if tail is not None:
            page = await self.page(cursor, tail)
            for line in page.lines:
                yield line
            cursor = page.next
        async with aclosing(self._begin(cursor, True, replay)) as items:
            async for item in items:
                yield item


class Logs:
    """Errors: those of `Access.find` for the console, those of `Access.serving` for what runs in the sandbox."""

    def __init__(self, access: Access, root: Path, processes: Processes, units: SandboxServices) -> None:
        self._access = access
        self._root = root
        self._processes = processes
        self._units = units

    async def open(self, workspace: str, sandbox_id: str, source: str) -> Log:
        """Raises `request.invalid`, `process.not_found`, `process.lost`, `service.not_found`."""
        kind, name = check_source(source)
        if kind in {"console", "agent"}:
            entry = await self._access.find(workspace, sandbox_id)
            path = self._root / entry.record.id / "console.log"
            console = ConsoleLog(path, entry.ended, agent_only=kind == "agent")
            return Log(lambda cursor, follow, replay: _of_console(console, cursor, follow, replay))
        if kind == "process":
            return await self._of_process(workspace, sandbox_id, name)
        return await self._of_service(workspace, sandbox_id, name)

    async def _of_process(self, workspace: str, sandbox_id: str, ref: str) -> Log:
        async def extent() -> _Extent:
            info, is_lost = await self._processes.get(workspace, sandbox_id, ref)
            if is_lost:
                raise ClocheError("process.lost", f"the process {info.id} was lost when its machine was stopped")
            return _Extent(f"{info.started_ns:x}", info.offset)

        async def opened(offset: int, until: int | None) -> ProcessStream:
            return await self._processes.output(workspace, sandbox_id, ref, offset, None, "utf-8", follow=until is None)

        await extent()
        return Log(lambda cursor, follow, _: _of_output(extent, opened, cursor, follow))

    async def _of_service(self, workspace: str, sandbox_id: str, name: str) -> Log:
        async def extent() -> _Extent:
            found = await self._units.get(workspace, sandbox_id, name)
            return _Extent(found.log_epoch, found.log_next)

        async def opened(offset: int, until: int | None) -> ProcessStream:
            return await self._units.output(workspace, sandbox_id, name, offset, until=until)

        await extent()
        return Log(lambda cursor, follow, _: _of_output(extent, opened, cursor, follow))


async def _of_console(
    console: ConsoleLog, cursor: Cursor | None, follow: bool, replay: bool
) -> AsyncGenerator[LogItem]:
    async for item in console.items(cursor, follow=follow, replay=replay):
        if console.wanted(item):
            yield item


async def _of_output(
    extent: Callable[[], Awaitable[_Extent]], opened: _Opener, cursor: Cursor | None, follow: bool
) -> AsyncGenerator[LogItem]:
    now = await extent()
    offset = 0 if cursor is None else cursor.offset
    # A machine that was taken back to a snapshot, or started anew, has another log.
    if cursor is not None and (cursor.mark not in (None, now.mark) or offset > now.so_far):
        offset = 0
        yield LogGap(0, Cursor(0, now.mark), restarted=True)
    stream = await opened(offset, None if follow else now.so_far)
    try:
        async for item in _lines(stream, now.mark):
            yield item
    finally:
        await stream.aclose()


async def _lines(stream: ProcessStream, mark: str) -> AsyncIterator[LogItem]:
    buffers = {"stdout": LineBuffer(), "stderr": LineBuffer()}
    async for item in stream.items():
        if isinstance(item, Chunk):
            others = any(one.pending for name, one in buffers.items() if name != item.stream)
            for line, whole, behind in buffers[item.stream].feed(item.data):
                place = None if others else Cursor(item.next - behind, mark)
                yield LogLine(line_text(line), item.stream, place, whole)
            continue
        for name, buffer in buffers.items():
            if rest := buffer.flush():
                yield LogLine(line_text(rest), name, None, whole=False)
        if isinstance(item, Loss):
            yield LogGap(item.count, Cursor(item.next, mark))
        else:
            yield LogEnd(Cursor(stream.offset, mark), final=not isinstance(item, SoFar))
