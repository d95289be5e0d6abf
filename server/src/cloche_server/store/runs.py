"""One-shot runs as rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from cloche_server.core.runs import CallbackState, RunRecord, RunState
from cloche_server.store.db import Database, Row


def _to_row(run: RunRecord) -> dict[str, Any]:
    outcome = None if run.outcome is None else json.dumps(run.outcome, separators=(",", ":"))
    return {
        **{name: value for name, value in asdict(run).items() if name != "outcome"},
        "state": run.state.value,
        "callback_state": run.callback_state.value,
        "outcome": outcome,
    }


def _from_row(row: Row) -> RunRecord:
    return RunRecord(
        **{
            **row,
            "state": RunState(row["state"]),
            "callback_state": CallbackState(row["callback_state"]),
            "outcome": None if row["outcome"] is None else json.loads(row["outcome"]),
        }
    )


class RunStore:
    def __init__(self, database: Database) -> None:
        self._db = database

    async def insert(self, run: RunRecord) -> None:
        await self._db.execute("insert_run", **_to_row(run))

    async def find(self, workspace: str, run_id: str) -> RunRecord | None:
        rows = await self._db.fetch("find_run", workspace=workspace, id=run_id)
        return _from_row(rows[0]) if rows else None

    async def update(self, run: RunRecord) -> None:
        """Writes what may change; nothing when it has been deleted."""
        row = _to_row(run)
        changing = ("id", "state", "finished_at", "outcome", "callback_state", "callback_error")
        await self._db.execute("update_run", **{name: row[name] for name in changing})

    async def unfinished(self) -> list[RunRecord]:
        """Those that have no end yet, or whose receiver does not know it; oldest first."""
        return [_from_row(row) for row in await self._db.fetch("unfinished_runs")]

    async def delete(self, workspace: str, run_id: str) -> bool:
        """False when there was none."""
        return await self._db.execute("delete_run", workspace=workspace, id=run_id) == 1

    async def prune(self, before: float) -> None:
        await self._db.execute("prune_runs", before=before)
