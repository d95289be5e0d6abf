"""What was said about ports, as rows."""

from __future__ import annotations

from dataclasses import asdict

from cloche_server.core.previews import HostRule, PortAccess, PortRule
from cloche_server.store.db import Database, Row


def _from_row(row: Row) -> PortRule:
    return PortRule(**{**row, "access": PortAccess(row["access"]), "host": HostRule(row["host"])})


class PortStore:
    def __init__(self, database: Database) -> None:
        self._db = database

    async def all(self) -> list[PortRule]:
        return [_from_row(row) for row in await self._db.fetch("all_ports")]

    async def put(self, *rules: PortRule) -> None:
        """All of them or none. Raises `Conflict` when a domain is in use."""
        await self._db.execute_all(
            [("put_port", {**asdict(rule), "access": rule.access.value, "host": rule.host.value}) for rule in rules]
        )

    async def delete(self, sandbox_id: str, port: int) -> None:
        await self._db.execute("delete_port", sandbox_id=sandbox_id, port=port)

    async def prune(self) -> None:
        """Forgets what belongs to sandboxes that have ended."""
        await self._db.execute("prune_ports")
