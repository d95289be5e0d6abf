"""The journal: where code tells what has happened, and how readers learn that there is more of it.

A move of a sandbox is told by its supervisor, in the transaction that records it. Everything else is told here.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cloche_server.app.steps import to_the_end
from cloche_server.core.errors import ClocheError
from cloche_server.core.happenings import TELLS, TOLD_BEFORE, Happening
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import Sandbox
from cloche_server.host.clock import Clock
from cloche_server.store.events import EventStore
from cloche_server.telemetry import log, metrics

_log = log.get("journal")

#: Events that are read at once.
PAGE: Final = 200
#: So many events wait at most for a disk that is full.
MOST_LATE: Final = 10_000


class Journal:
    """One for the server, over all workspaces."""

    def __init__(self, store: EventStore, clock: Clock) -> None:
        self.store = store
        self._clock = clock
        self._late: list[Happening] = []
        self._writing = asyncio.Lock()
        #: Set at the next event, and then another one takes its place.
        self.grown = asyncio.Event()

    async def tell(self, kind: str, workspace: str, sandbox_id: str, payload: Mapping[str, Any] | None = None) -> None:
        """Writes that something of the catalogue has happened just now. It is told later when it cannot be now
        because the disk is full; never raises for that, because what has happened has."""
        happening = Happening(kind, workspace, sandbox_id, self._clock.now(), payload or {})
        happening.check()
        self._late.append(happening)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Writes what could not be written when it happened."""
        await to_the_end(self._catch_up())  # a write that has begun cannot be taken back, and must not come twice

    async def _catch_up(self) -> None:
        async with self._writing:
            waiting, self._late = self._late, []
            if not waiting:
                return
            try:
                await self.store.append(waiting)
            except ClocheError as error:
                self._keep(waiting, error)
            except Exception as error:  # noqa: BLE001 - what has happened has, and nobody who tells it can help
                _log.error("event.refused", waiting=len(waiting), error=repr(error))
                await self._one_by_one(waiting)
            else:
                self.written(waiting)

    async def _one_by_one(self, waiting: Sequence[Happening]) -> None:
        """One that the database cannot take must neither take the others with it nor stand in their way for ever."""
        for at, one in enumerate(waiting):
            try:
                await self.store.append([one])
            except ClocheError as error:
                self._keep(list(waiting[at:]), error)
                return
            except Exception as error:  # noqa: BLE001 - as above
                _log.error("event.lost", count=1, type=one.type, error=repr(error))
            else:
                self.written([one])

    async def told_of(self, record: Sandbox) -> Status | None:
        """The state that was told last of a sandbox that nobody moves now; where the journal does not say, because
        the server was older then or retention has removed it, what must have been told."""
        before = sys.maxsize
        while page := await self.store.before(record.workspace, record.id, before, PAGE):
            for one in page:
                if one.what.type in TELLS:
                    return TELLS[one.what.type]
            before = page[-1].seq
        return TOLD_BEFORE.get(record.status, record.status)

    def _keep(self, waiting: list[Happening], error: ClocheError) -> None:
        self._late = waiting + self._late
        _log.error("event.not_recorded", waiting=len(self._late), error=error.message)
        if len(self._late) > MOST_LATE:
            _log.error("event.lost", count=len(self._late) - MOST_LATE, hint="the disk has been full for too long")
            del self._late[:-MOST_LATE]

    def written(self, happenings: Sequence[Happening]) -> None:
        """They are in the database: wakes all readers."""
        if not happenings:
            return
        for one in happenings:
            metrics.events.labels(one.type).inc()
        grown, self.grown = self.grown, asyncio.Event()
        grown.set()
