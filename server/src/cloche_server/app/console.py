"""The serial console of a sandbox: what its kernel and agent said."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

from cloche_server.app.access import Access

#: Never more than this is read at once; the file itself is bounded by the engine (bytes).
READ_LIMIT = 1024 * 1024
POLL_SECONDS = 0.5
REPLAY_BYTES = 4096


class Consoles:
    """Reads console logs. The file belongs to the VMM, which appends to it; it may be cut at any time."""

    def __init__(self, access: Access, root: Path) -> None:
        self._access = access
        self._root = root

    async def read(self, workspace: str, sandbox_id: str, tail: int | None) -> str:
        """The log, or its last `tail` lines, as text."""
        entry = await self._access.find(workspace, sandbox_id)
        data = await asyncio.to_thread(_read, self._root / entry.record.id / "console.log", None)
        return _last_lines(data[1], tail).decode("utf-8", "replace").replace("\r\n", "\n")

    async def follow(self, workspace: str, sandbox_id: str, tail: int | None = None) -> AsyncIterator[str]:
        """Lines from a little before now on (or the last `tail` of them), until the sandbox ends."""
        entry = await self._access.find(workspace, sandbox_id)
        path = self._root / entry.record.id / "console.log"
        return self._lines(path, entry.ended, tail)

    async def _lines(self, path: Path, ended: asyncio.Event, tail: int | None) -> AsyncIterator[str]:
        position, pending = await asyncio.to_thread(_size, path), b""
        if tail is None:
            position = max(0, position - REPLAY_BYTES)
        else:
            position, data = await asyncio.to_thread(_read, path, None)
            position -= len(_last_lines(data, tail))
        while True:
            over = ended.is_set()
            position, data = await asyncio.to_thread(_read, path, position)
            lines = (pending + data).split(b"\n")
            pending = lines.pop()[-READ_LIMIT:]
            for line in lines:
                yield line.decode("utf-8", "replace").rstrip("\r")
            if over:
                if pending:
                    yield pending.decode("utf-8", "replace")
                return
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await ended.wait()
            except TimeoutError:
                pass


def _last_lines(data: bytes, count: int | None) -> bytes:
    """The last lines of `data`, or all; only a line feed ends a line, and the last may have none."""
    if count is None:
        return data
    lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
    return b"".join(lines[-count:]) if count else b""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, position: int | None) -> tuple[int, bytes]:
    """From `position` (None: as much of the end as is allowed); a file that was cut is read anew."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - READ_LIMIT) if position is None or position > size else position
            file.seek(start)
            data = file.read(READ_LIMIT)
            return start + len(data), data
    except FileNotFoundError:
        return 0, b""
