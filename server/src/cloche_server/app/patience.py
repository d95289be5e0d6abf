"""Deadlines that count only the time in which the machine of a sandbox runs."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

from cloche_server.app.entry import Entry
from cloche_server.core.lifecycle import Status

#: Its vCPUs are stopped, or it has none, and what ran in it goes on later.
_STILL: Final = frozenset({Status.PAUSED, Status.HIBERNATING, Status.HIBERNATED, Status.WAKING})
#: How often it is looked whether the machine runs (seconds). A stop within so short a time is counted as running.
LOOK: Final = 2.0


class Patience:
    """As `asyncio.timeout(seconds)`, None for ever: raises `TimeoutError` at the end of the block. What passes while
    the sandbox is paused or asleep is not counted: its own clocks stand still as well. `passed` is what was counted."""

    def __init__(self, entry: Entry, seconds: float | None) -> None:
        self.passed = 0.0
        self._entry = entry
        self._seconds = seconds
        self._until = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0
        self._ran = True

    async def __aenter__(self) -> Self:
        self._at, self._ran = asyncio.get_running_loop().time(), self._runs()
        await self._until.__aenter__()
        self._again()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._count()
        await self._until.__aexit__(kind, error, trace)

    def _runs(self) -> bool:
        return self._entry.record.status not in _STILL

    def _count(self) -> None:
        now, runs = asyncio.get_running_loop().time(), self._runs()
        if self._ran and runs:
            self.passed += now - self._at
        self._at, self._ran = now, runs

    def _again(self) -> None:
        if self._seconds is not None:
            wait = min(LOOK, max(0.0, self._seconds - self.passed)) if self._ran else LOOK
            self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    def _look(self) -> None:
        self._count()
        if self._seconds is not None and self._ran and self.passed >= self._seconds:
            self._until.reschedule(asyncio.get_running_loop().time())
        else:
            self._again()
