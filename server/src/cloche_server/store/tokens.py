"""API tokens (only their hashes are stored) and idempotency keys."""

from __future__ import annotations

from dataclasses import dataclass

from cloche_server.core.ids import token_from_random, token_hash, token_prefix
from cloche_server.core.records import TokenInfo
from cloche_server.core.scopes import Scope
from cloche_server.store.db import Database, Row


class TokenStore:
    """Tokens of this server. The command line writes here too, while the server runs."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def create(
        self,
        name: str,
        workspace: str,
        random: bytes,
        now: float,
        *,
        scope: Scope = Scope.ADMIN,
        sandbox_id: str | None = None,
        expires_at: float | None = None,
    ) -> str:
        """Stores a new token and returns its plain text, which is not kept. Raises `Conflict` when the
        prefix is taken (try again with other random bytes)."""
        token = token_from_random(random)
        await self._db.execute(
            "insert_token",
            hash=token_hash(token),
            prefix=token_prefix(token),
            name=name,
            workspace=workspace,
            created_at=now,
            scope=scope.value,
            sandbox_id=sandbox_id,
            expires_at=expires_at,
        )
        return token

    async def find(self, token: str) -> TokenInfo | None:
        """The token with this plain text, unless it is revoked; it may have expired. The look-up is by hash, so its
        time tells nothing."""
        rows = await self._db.fetch("find_token", hash=token_hash(token))
        return _info(rows[0]) if rows else None

    async def list_of(self, workspace: str) -> list[TokenInfo]:
        """Those of a workspace that are not revoked, oldest first."""
        return [_info(row) for row in await self._db.fetch("list_tokens_of", workspace=workspace)]

    async def list(self) -> list[TokenInfo]:
        """Of all workspaces, revoked ones too, oldest first."""
        return [_info(row) for row in await self._db.fetch("list_tokens")]

    async def living(self) -> set[str]:
        """The prefixes of all that are not revoked."""
        return {str(row["prefix"]) for row in await self._db.fetch("living_tokens")}

    async def revoke(self, prefix: str, now: float) -> bool:
        """False when no living token has this prefix."""
        return await self._db.execute("revoke_token", prefix=prefix, now=now) == 1

    async def generation(self) -> tuple[int, int]:
        """Another one whenever a token was made or revoked, by whom ever."""
        row = (await self._db.fetch("token_generation"))[0]
        return int(row["made"]), int(row["revoked"])


def _info(row: Row) -> TokenInfo:
    return TokenInfo(**{**row, "scope": Scope(row["scope"])})


@dataclass(frozen=True, slots=True)
class IdempotencyRecord:
    request_hash: str
    sandbox_id: str


class IdempotencyStore:
    """Which sandbox an `Idempotency-Key` of a create made; `SandboxStore.insert` writes it."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def find(self, workspace: str, key: str) -> IdempotencyRecord | None:
        rows = await self._db.fetch("find_idempotency", workspace=workspace, key=key)
        return IdempotencyRecord(rows[0]["request_hash"], rows[0]["sandbox_id"]) if rows else None

    async def prune(self, before: float) -> int:
        return await self._db.execute("prune_idempotency", before=before)
