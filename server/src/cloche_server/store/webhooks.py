"""Webhooks and rows. The secret is stored as it is, because it has to sign."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from cloche_server.core.webhooks import Webhook
from cloche_server.store.db import Database, Row


def _to_row(hook: Webhook) -> dict[str, Any]:
    return {**asdict(hook), "types": json.dumps(list(hook.types)), "enabled": int(hook.enabled)}


def _from_row(row: Row) -> Webhook:
    return Webhook(**{**row, "types": tuple(json.loads(row["types"])), "enabled": bool(row["enabled"])})


class WebhookStore:
    def __init__(self, database: Database) -> None:
        self._db = database

    async def insert(self, hook: Webhook) -> None:
        await self._db.execute("insert_webhook", **_to_row(hook))

    async def all(self) -> list[Webhook]:
        """Oldest first."""
        return [_from_row(row) for row in await self._db.fetch("all_webhooks")]

    async def update(self, hook: Webhook) -> None:
        """Writes what may change; nothing when it has been deleted."""
        row = _to_row(hook)
        for fixed in ("workspace", "sandbox_id", "secret", "created_at"):
            del row[fixed]
        await self._db.execute("update_webhook", **row)

    async def delete(self, webhook_id: str) -> None:
        await self._db.execute("delete_webhook", id=webhook_id)
