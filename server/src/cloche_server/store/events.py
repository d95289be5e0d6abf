"""The journal: events in the order in which they happened, without holes.

An event is written in the transaction of the change that it tells of, so that neither is there without the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cloche_server.core.happenings import Happening, Told
from cloche_server.store.db import Database, Row

PRUNED_AT_ONCE: Final = 1000
Statement = tuple[str, dict[str, Any]]


def statements(happenings: Sequence[Happening]) -> list[Statement]:
    """What writes them, for a transaction."""
    return [
        (
            "insert_event",
            {
                "at": one.at,
                "workspace": one.workspace,
                "sandbox_id": one.sandbox_id,
                "type": one.type,
                "payload": json.dumps(one.payload),
            },
        )
        for one in happenings
    ]


def _told(row: Row) -> Told:
    what = Happening(row["type"], row["workspace"], row["sandbox_id"], row["at"], json.loads(row["payload"]))
    return Told(row["seq"], what)


@dataclass(frozen=True, slots=True)
class Page:
    """Events, oldest first, and the first and last number that there was at that moment, of any workspace (0 when
    nothing has ever happened). `more`: there may be some after these."""

    events: tuple[Told, ...]
    first: int
    last: int
    more: bool


class EventStore:
    """Reads are in pages: nobody holds a journal in memory."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def append(self, happenings: Sequence[Happening]) -> None:
        """All or none."""
        await self._db.execute_all(statements(happenings))

    async def bounds(self) -> tuple[int, int]:
        """First and last number there is; 0 when nothing has ever happened."""
        row = (await self._db.fetch("event_bounds"))[0]
        return int(row["first"]), int(row["last"])

    async def after(self, workspace: str, sandbox_id: str | None, after: int, count: int) -> Page:
        """The first `count` events of a workspace, or of one sandbox in it, after a number."""
        values: dict[str, object] = {"workspace": workspace, "after": after, "count": count}
        query = "events_after"
        if sandbox_id is not None:
            query, values = "events_of_after", {**values, "sandbox_id": sandbox_id}
        bounds, rows = await self._db.fetch_together(("event_bounds", {}), (query, values))
        events = tuple(_told(row) for row in rows)
        return Page(events, int(bounds[0]["first"]), int(bounds[0]["last"]), len(events) == count)

    async def before(self, workspace: str, sandbox_id: str | None, before: int, count: int) -> list[Told]:
        """The last `count` events before a number; newest first."""
        if sandbox_id is None:
            rows = await self._db.fetch("events_before", workspace=workspace, before=before, count=count)
        else:
            rows = await self._db.fetch(
                "events_of_before", workspace=workspace, sandbox_id=sandbox_id, before=before, count=count
            )
        return [_told(row) for row in rows]

    async def count_after(self, workspace: str, after: int) -> int:
        return int((await self._db.fetch("count_events_after", workspace=workspace, after=after))[0]["n"])

    async def prune(self, before: float, keep: int) -> int:
        """Removes what happened before a moment, and all but the newest `keep`; how many went.

        The newest one stays in any case, because the next number comes from it. It goes from the front and in small
        steps: what is left has no holes, and nobody waits for long.
        """
        first, last = await self.bounds()
        young = (await self._db.fetch("first_event_since", before=before))[0]["seq"]
        below = max(last - keep + 1, last if young is None else int(young))
        gone, step = 0, first
        while step < below:
            step = min(step + PRUNED_AT_ONCE, below)
            gone += await self._db.execute("prune_events", below=step)
        return gone
