"""The serial console of a sandbox, as a log: what its kernel and agent said."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core.logs import (
    CONTEXT,
    LINE_MAX,
    Cursor,
    LineBuffer,
    LogEnd,
    LogGap,
    LogItem,
    LogLine,
    line_text,
    mark_of,
)

#: Never more than this is read at once; the file itself is bounded by the engine (bytes).
READ_LIMIT: Final = 1024 * 1024
POLL_SECONDS: Final = 0.5
#: A reader who follows begins so much before now.
REPLAY_BYTES: Final = 4096
_AGENT: Final = re.compile(r"\[ *[0-9]+\.[0-9]+\] cloche-agent: ", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Piece:
    """`start` is the offset of `data` in the file, `before` what stands before it. `reset`: the place that was asked
    for is not in this file."""

    start: int
    data: bytes
    before: bytes
    reset: bool = False


class ConsoleLog:
    """Reads one console. The file belongs to the VMM, which appends to it; it may be cut at any time, and then what
    is left of it is told again, after a gap."""

    def __init__(self, path: Path, ended: asyncio.Event, *, agent_only: bool) -> None:
        self._path = path
        self._ended = ended
        self._agent_only = agent_only

    async def items(self, cursor: Cursor | None, *, follow: bool, replay: bool) -> AsyncIterator[LogItem]:
        """From a place on, or the oldest that is kept (with `replay`: a little before now). With `follow` until the
        sandbox ends. The last one is a `LogEnd`."""
        back = REPLAY_BYTES if replay and cursor is None else READ_LIMIT
        while True:
            over = self._ended.is_set()
            piece = await asyncio.to_thread(_read, self._path, cursor, back)
            if piece.reset:
                yield LogGap(0, Cursor(piece.start, mark_of(piece.before)), restarted=True)
            done = 0
            buffer = LineBuffer()
            for line, whole, behind in buffer.feed(piece.data):
                done = len(piece.data) - behind
                yield self._line(line, piece, done, whole)
            more = len(piece.data) == READ_LIMIT
            if not more and (over or not follow):
                if rest := buffer.flush():
                    done = len(piece.data)
                    yield self._line(rest, piece, done, False)
                yield LogEnd(_place(piece, done), final=over)
                return
            cursor = _place(piece, done)
            if not more:
                await self._pause()

    def _line(self, line: bytes, piece: _Piece, done: int, whole: bool) -> LogLine:
        return LogLine(line_text(line), "console", _place(piece, done), whole)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            pass

    def wanted(self, item: LogItem) -> bool:
        """Whether it is of the source."""
        return not (self._agent_only and isinstance(item, LogLine)) or _AGENT.match(item.text) is not None


def _place(piece: _Piece, done: int) -> Cursor:
    return Cursor(piece.start + done, mark_of(piece.before + piece.data[max(0, done - CONTEXT) : done]))


def _read(path: Path, cursor: Cursor | None, back: int) -> _Piece:
    """From a place on; None: as much of the end as `back` says."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - back) if cursor is None else cursor.offset
            before = _before(file, start) if start <= size else b""
            lost = start > size or (cursor is not None and cursor.mark not in (None, mark_of(before)))
            if lost:
                start = max(0, size - READ_LIMIT)
                before = _before(file, start)
            return _Piece(start, file.read(READ_LIMIT), before, reset=lost)
    except FileNotFoundError:
        lost = cursor is not None and cursor.offset > 0
        return _Piece(0, b"", b"", reset=lost)


def _before(file: object, start: int) -> bytes:
    file.seek(max(0, start - CONTEXT))  # type: ignore[attr-defined]
    data: bytes = file.read(min(CONTEXT, start))  # type: ignore[attr-defined]
    return data


assert LINE_MAX < READ_LIMIT, "a read makes progress"
