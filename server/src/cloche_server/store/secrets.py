"""Secrets and authorities as rows. Nothing comes here that is not sealed."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloche_server.core.happenings import Happening
from cloche_server.core.secrets import SecretInfo
from cloche_server.store.db import Database
from cloche_server.store.events import statements


@dataclass(frozen=True, slots=True)
class SealedSecret:
    workspace: str
    name: str
    version: int
    sealed: bytes = field(repr=False)


class SecretStore:
    def __init__(self, database: Database) -> None:
        self._db = database

    async def put(self, info: SecretInfo, sealed: bytes, told: Happening) -> None:
        """A new one, or a new value of one that exists; both are written, or neither."""
        values = {name: getattr(info, name) for name in SecretInfo.__slots__}
        await self._db.execute_all([("put_secret", {**values, "sealed": sealed}), *statements([told])])

    async def infos(self, workspace: str) -> list[SecretInfo]:
        """By name."""
        return [SecretInfo(**row) for row in await self._db.fetch("list_secrets", workspace=workspace)]

    async def find(self, workspace: str, name: str) -> SecretInfo | None:
        rows = await self._db.fetch("find_secret", workspace=workspace, name=name)
        return SecretInfo(**rows[0]) if rows else None

    async def sealed(self, workspace: str) -> list[SealedSecret]:
        """All of the workspace."""
        return [SealedSecret(**row) for row in await self._db.fetch("sealed_secrets", workspace=workspace)]

    async def any(self) -> SealedSecret | None:
        """Some secret of the server; None: it has none."""
        rows = await self._db.fetch("any_secret")
        return SealedSecret(**rows[0]) if rows else None

    async def sizes(self, workspace: str, without: str) -> tuple[int, int]:
        """How many there are beside this one, and their bytes."""
        row = (await self._db.fetch("secret_sizes", workspace=workspace, name=without))[0]
        return int(row["count"]), int(row["bytes"])

    async def delete(self, workspace: str, name: str, told: Happening) -> None:
        """Raises Conflict when there is none."""
        delete = ("delete_secret", {"workspace": workspace, "name": name})
        await self._db.execute_all([delete, *statements([told])], conditional=True)

    async def put_authority(self, workspace: str, certificate_pem: str, sealed: bytes, now: float) -> None:
        await self._db.execute(
            "put_authority", workspace=workspace, certificate=certificate_pem, sealed=sealed, created_at=now
        )

    async def authority(self, workspace: str) -> tuple[str, bytes] | None:
        """Its certificate (PEM) and its sealed key."""
        rows = await self._db.fetch("find_authority", workspace=workspace)
        return (rows[0]["certificate"], rows[0]["sealed"]) if rows else None
