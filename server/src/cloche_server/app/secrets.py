"""The secrets of workspaces: written, rotated and deleted by their callers, read only to be put into requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cloche_server.app.journal import Journal
from cloche_server.core.errors import ClocheError
from cloche_server.core.happenings import Happening
from cloche_server.core.secrets import SecretInfo, check_name, check_value
from cloche_server.host.certificates import make_authority
from cloche_server.host.clock import Clock
from cloche_server.host.sealing import SealBroken, Sealer, make_key, read_key
from cloche_server.store.db import Conflict
from cloche_server.store.secrets import SealedSecret, SecretStore
from cloche_server.telemetry import log

_log = log.get("secrets")

#: All of a workspace goes to netd in one message.
MAX_PER_WORKSPACE: Final = 200
MAX_BYTES_PER_WORKSPACE: Final = 1024 * 1024
KEY_FILE: Final = "secret.key"


@dataclass(frozen=True, slots=True)
class SecretMaterial:
    """What netd needs of a workspace: values by name, and the authority that signs (PEM)."""

    values: Mapping[str, str] = field(repr=False)
    ca_cert_pem: str
    ca_key_pem: str = field(repr=False)


class Secrets:
    """`key_file`: where the operator keeps the key; None: `secret.key` in the data directory, made when it is needed
    for the first time. `on_change` is called with a workspace after each change of its secrets."""

    def __init__(self, store: SecretStore, data: Path, key_file: Path | None, clock: Clock, journal: Journal) -> None:
        self._store = store
        self._journal = journal
        self._clock = clock
        self._path = key_file or data / KEY_FILE
        self._may_make = key_file is None
        self._sealer: Sealer | None = None
        self._problem = "the secrets of the server are not loaded yet"
        self._changing = asyncio.Lock()
        self.on_change: list[Callable[[str], Awaitable[None]]] = []

    async def start(self) -> None:
        """Takes the key, or makes it. What is wrong with it is logged, and said to whoever needs a secret: everything
        else works without."""
        found = await self._store.any()
        try:
            self._sealer = Sealer(await asyncio.to_thread(self._key, found is None))
            if found is not None:
                self._opened(self._sealer, found)
        except (ClocheError, OSError, ValueError) as error:
            self._sealer = None
            self._problem = _why(error, self._path)
            _log.error("secrets.unavailable", why=self._problem)

    def _key(self, unused: bool) -> bytes:
        key = read_key(self._path)
        if key is None:
            if not (self._may_make and unused):
                raise ValueError("it does not exist")
            key = make_key(self._path)
        elif self._path.stat().st_mode & 0o077:
            _log.warning("secrets.key_readable", path=str(self._path), why="others than its owner may read it")
        return key

    # -------------------------------------------------------------- by callers

    async def put(self, workspace: str, name: str, value: str, description: str | None) -> tuple[SecretInfo, bool]:
        """Writes a value; True: there was none of this name. `description` None: it stays as it is. Raises
        `request.invalid`, `secret.too_many`, `secret.unavailable`."""
        check_name(name)
        check_value(value)
        async with self._changing:
            before = await self._store.find(workspace, name)
            await self._check_room(workspace, name, len(value.encode("utf-8")))
            now = self._clock.now()
            info = SecretInfo(
                workspace,
                name,
                description if description is not None or before is None else before.description,
                1 if before is None else before.version + 1,
                now if before is None else before.created_at,
                now,
            )
            sealed = self._usable().seal(value.encode("utf-8"), _purpose(info))
            payload = {"name": name, "version": info.version}
            told = Happening("secret.created" if before is None else "secret.rotated", workspace, "", now, payload)
            await self._store.put(info, sealed, told)
        self._journal.written([told])
        _log.info("secret.written", workspace=workspace, name=name, version=info.version)
        await self._changed(workspace)
        return info, before is None

    async def _check_room(self, workspace: str, name: str, size: int) -> None:
        count, used = await self._store.sizes(workspace, name)
        if count >= MAX_PER_WORKSPACE or used + size > MAX_BYTES_PER_WORKSPACE:
            raise ClocheError(
                "secret.too_many",
                f"a workspace has at most {MAX_PER_WORKSPACE} secrets of {MAX_BYTES_PER_WORKSPACE} bytes in all",
                details={"limit": MAX_PER_WORKSPACE, "limit_bytes": MAX_BYTES_PER_WORKSPACE},
            )

    async def all(self, workspace: str) -> list[SecretInfo]:
        """By name."""
        return await self._store.infos(workspace)

    async def get(self, workspace: str, name: str) -> SecretInfo:
        """Raises `secret.not_found`."""
        found = await self._store.find(workspace, name)
        if found is None:
            raise _not_found()
        return found

    async def delete(self, workspace: str, name: str) -> None:
        """Requests that need it are refused from now on. Raises `secret.not_found`."""
        told = Happening("secret.deleted", workspace, "", self._clock.now(), {"name": name})
        async with self._changing:
            try:
                await self._store.delete(workspace, name, told)
            except Conflict:
                raise _not_found() from None
        self._journal.written([told])
        _log.info("secret.deleted", workspace=workspace, name=name)
        await self._changed(workspace)

    async def _changed(self, workspace: str) -> None:
        for tell in self.on_change:
            await tell(workspace)

    # -------------------------------------------------------------- for requests of guests

    async def missing(self, workspace: str, names: Iterable[str]) -> list[str]:
        """Which of these the workspace does not have."""
        there = {info.name for info in await self._store.infos(workspace)}
        return sorted(set(names) - there)

    async def material(self, workspace: str) -> SecretMaterial:
        """All values of a workspace and its authority, which is made when there is none. Raises
        `secret.unavailable`."""
        sealer = self._usable()
        sealed = await self._store.sealed(workspace)
        values = {one.name: self._opened(sealer, one) for one in sealed}
        certificate, key = await self._authority(workspace, sealer)
        return SecretMaterial(values, certificate, key)

    async def ca(self, workspace: str) -> str:
        """The certificate of the workspace's authority, PEM. Raises `secret.unavailable`."""
        return (await self._authority(workspace, self._usable()))[0]

    async def _authority(self, workspace: str, sealer: Sealer) -> tuple[str, str]:
        async with self._changing:
            found = await self._store.authority(workspace)
            purpose = _bound("authority", workspace)
            if found is not None:
                try:
                    return found[0], sealer.open(found[1], purpose).decode("ascii")
                except SealBroken:
                    # Nobody's data: guests are told of the new one when they are renewed.
                    _log.warning(
                        "secrets.new_authority", workspace=workspace, why="its key was sealed with another key"
                    )
            now = self._clock.now()
            made = await asyncio.to_thread(make_authority, f"Cloche workspace {workspace}", now)
            certificate, key = made.certificate_pem.decode("ascii"), made.key_pem.decode("ascii")
            await self._store.put_authority(workspace, certificate, sealer.seal(made.key_pem, purpose), now)
            return certificate, key

    def _usable(self) -> Sealer:
        if self._sealer is None:
            raise ClocheError("secret.unavailable", self._problem)
        return self._sealer

    def _opened(self, sealer: Sealer, one: SealedSecret) -> str:
        try:
            return sealer.open(one.sealed, _purpose(one)).decode("utf-8")
        except SealBroken:
            raise ClocheError("secret.unavailable", _broken(self._path)) from None


def _not_found() -> ClocheError:
    return ClocheError("secret.not_found", "there is no secret with this name")


def _broken(path: Path) -> str:
    return (
        f"secrets were sealed with another key than the one in {path}; put that key back and start the server again, "
        "or delete the secrets and write them anew"
    )


def _why(error: Exception, path: Path) -> str:
    if isinstance(error, ClocheError):
        return error.message
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"the key of the secrets, {path}, cannot be used: {reason}; put it back and start the server again"


def _bound(*parts: str) -> bytes:
    return "\0".join(parts).encode("utf-8")


def _purpose(of: SecretInfo | SealedSecret) -> bytes:
    return _bound("secret", of.workspace, of.name, str(of.version))
