"""Public keys of workspaces, and rows."""

from __future__ import annotations

from dataclasses import asdict

from cloche_server.core.sshkeys import SshKey
from cloche_server.store.db import Database


class SshKeyStore:
    def __init__(self, database: Database) -> None:
        self._db = database

    async def insert(self, key: SshKey) -> None:
        await self._db.execute("insert_ssh_key", **asdict(key))

    async def of(self, workspace: str) -> list[SshKey]:
        """Oldest first; those that have expired too."""
        return [SshKey(**row) for row in await self._db.fetch("ssh_keys_of", workspace=workspace)]

    async def with_fingerprint(self, fingerprint: str) -> list[SshKey]:
        """Of all workspaces, oldest first."""
        return [SshKey(**row) for row in await self._db.fetch("ssh_keys_by_fingerprint", fingerprint=fingerprint)]

    async def delete(self, key_id: str, workspace: str) -> bool:
        """False when there is none."""
        return await self._db.execute("delete_ssh_key", id=key_id, workspace=workspace) == 1

    async def prune(self, now: float) -> None:
        """Forgets what opens nothing any more."""
        await self._db.execute("prune_ssh_keys", now=now)
