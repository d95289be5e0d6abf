"""Meters and budgets as rows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from cloche_server.core.budgets import Account
from cloche_server.core.lifecycle import Status
from cloche_server.core.meters import Meter, Metered
from cloche_server.core.records import SECRET_METADATA_PREFIX, ProcessRef, Sandbox
from cloche_server.core.walls import Walls
from cloche_server.store.accounts import account_row, from_account_row
from cloche_server.store.db import Database, Row
from cloche_server.store.sandboxes import from_row as sandbox_from_row

#: So many rows are read at once, so that nobody else waits long for the database.
PAGE: Final = 500
FOR_EVER: Final = 1e18


def labels(metadata: Mapping[str, str]) -> dict[str, str]:
    """What of the metadata outlives its sandbox: secrets do not."""
    return {key: value for key, value in metadata.items() if not key.startswith(SECRET_METADATA_PREFIX)}


def _usage_row(one: Metered) -> dict[str, Any]:
    return {
        "sandbox_id": one.sandbox_id,
        "workspace": one.workspace,
        "status": one.status.value,
        "created_at": one.created_at,
        "ended_at": one.ended_at,
        "cpus": one.cpus,
        "memory_mb": one.memory_mb,
        "metadata": json.dumps(labels(one.metadata)),
        "walls": json.dumps(asdict(one.walls)),
        "meter": json.dumps(asdict(one.meter)),
    }


def _from_usage_row(row: Row) -> Metered:
    meter = json.loads(row["meter"])
    process = ProcessRef(**meter.pop("process")) if meter.get("process") else meter.pop("process", None)
    return Metered(
        sandbox_id=row["sandbox_id"],
        workspace=row["workspace"],
        status=Status(row["status"]),
        created_at=row["created_at"],
        ended_at=row["ended_at"],
        cpus=row["cpus"],
        memory_mb=row["memory_mb"],
        metadata=json.loads(row["metadata"]),
        walls=Walls(**json.loads(row["walls"])),
        meter=Meter(process=process, **meter),
    )


class MeterStore:
    """Where meters and accounts live."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def write(self, meters: Sequence[Metered], accounts: Sequence[Account], dropped: Sequence[str] = ()) -> None:
        """All of it or nothing."""
        statements: list[tuple[str, Mapping[str, object]]] = [("put_usage", _usage_row(one)) for one in meters]
        statements += [("put_budget", account_row(account)) for account in accounts]
        statements += [("drop_budget", {"id": account_id}) for account_id in dropped]
        if statements:
            await self._db.execute_all(statements)

    async def living(self) -> list[Metered]:
        """Those whose end is not recorded."""
        return [_from_usage_row(row) for row in await self._db.fetch("living_usage")]

    async def unmetered_ends(self, since: float) -> list[Sandbox]:
        """Sandboxes that have ended without their meter being told. `since`: meters of older ends may be forgotten."""
        return [sandbox_from_row(row) for row in await self._db.fetch("unmetered_ends", since=since)]

    async def get(self, workspace: str, sandbox_id: str) -> Metered | None:
        rows = await self._db.fetch("get_usage", workspace=workspace, sandbox_id=sandbox_id)
        return _from_usage_row(rows[0]) if rows else None

    async def of(self, workspace: str, since: float | None, until: float | None) -> AsyncIterator[Metered]:
        """Those of a workspace that lived at some time from `since` to `until`."""
        span = {"since": -FOR_EVER if since is None else since, "until": FOR_EVER if until is None else until}
        after = ""
        while rows := await self._db.fetch("page_usage", workspace=workspace, after=after, count=PAGE, **span):
            for row in rows:
                yield _from_usage_row(row)
            after = rows[-1]["sandbox_id"]

    async def prune(self, before: float) -> int:
        return await self._db.execute("prune_usage", before=before)

    async def accounts(self) -> list[Account]:
        return [from_account_row(row) for row in await self._db.fetch("all_budgets")]
