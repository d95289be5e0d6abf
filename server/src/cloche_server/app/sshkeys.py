"""Keys that open sandboxes over SSH: add, list, delete, and who a key or a token is for."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from cloche_server.app.access import Access
from cloche_server.app.callers import forbidden
from cloche_server.app.calls import Calls
from cloche_server.app.entry import Entry
from cloche_server.app.tokens import Tokens
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import is_token
from cloche_server.core.records import TokenInfo
from cloche_server.core.scopes import Scope, expiry
from cloche_server.core.sshkeys import MAX_KEYS, SshKey, parse_key
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.store.sshkeys import SshKeyStore
from cloche_server.telemetry import log

_log = log.get("ssh")


@dataclass(frozen=True, slots=True)
class WantedKey:
    """A key that is to be accepted, for one sandbox or all of the workspace, for `seconds` or as long as it may."""

    text: str
    comment: str | None = None
    sandbox_id: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SshAddress:
    """Where SSH is served, and the key that clients know the server by: kind and key, as in a `known_hosts` file."""

    port: int
    host_key: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Visit:
    """Who may come in, and to what. `by` names the token or key and is no secret; `hold` is entered around all that is
    done by it, and the task that is in it is cancelled when the token or key ends. `stands`: whether it has not ended
    before that."""

    entry: Entry
    by: str
    expires_at: float | None
    hold: Callable[[], AbstractContextManager[None]]
    stands: Callable[[], Awaitable[bool]]


class SshKeys:
    def __init__(self, store: SshKeyStore, access: Access, tokens: Tokens, clock: Clock) -> None:
        self._store = store
        self._access = access
        self._tokens = tokens
        self._clock = clock
        self._calls = Calls()

    # ---------------------------------------------------------------- verbs

    async def create(self, maker: TokenInfo, wanted: WantedKey) -> SshKey:
        """Raises `request.invalid`, `sshkey.too_many`, `sandbox.not_found`, and `auth.forbidden` when it would open
        more, or live longer, than the token that makes it."""
        parsed = parse_key(wanted.text)
        if maker.sandbox_id is not None and wanted.sandbox_id != maker.sandbox_id:
            raise ClocheError(
                "auth.forbidden", "a token of one sandbox can only add keys of that sandbox; name it in sandbox_id"
            )
        if wanted.sandbox_id is not None:
            await self._access.find(maker.workspace, wanted.sandbox_id)
        now = self._clock.now()
        ends = expiry(now, wanted.seconds, maker.expires_at)
        if len([one for one in await self._store.of(maker.workspace) if not one.ended(now)]) >= MAX_KEYS:
            raise ClocheError(
                "sshkey.too_many",
                f"the workspace has {MAX_KEYS} keys already, which is the limit",
                details={"limit": MAX_KEYS},
            )
        comment = parsed.comment if wanted.comment is None else wanted.comment
        key = SshKey(
            "ssh_" + random_bytes(8).hex(), maker.workspace, wanted.sandbox_id, parsed.kind, parsed.text,
            parsed.fingerprint, comment, now, ends,
        )  # fmt: skip
        await self._store.insert(key)
        _log.info("ssh_key.created", workspace=key.workspace, id=key.id, by=maker.prefix)
        return key

    async def list(self, owner: TokenInfo) -> list[SshKey]:
        """Those of the workspace that open something, oldest first; for a token of one sandbox: of that."""
        now = self._clock.now()
        return [
            one
            for one in await self._store.of(owner.workspace)
            if not one.ended(now) and owner.sandbox_id in (None, one.sandbox_id)
        ]

    async def delete(self, owner: TokenInfo, key_id: str) -> None:
        """Connections that were opened with it have been told to end when this returns. Raises `sshkey.not_found`."""
        if all(one.id != key_id for one in await self.list(owner)) or not await self._store.delete(
            key_id, owner.workspace
        ):
            raise ClocheError("sshkey.not_found", "there is no SSH key with this id")
        self._calls.end(key_id, ClocheError("sshkey.not_found", "the SSH key has been deleted"))
        _log.info("ssh_key.deleted", workspace=owner.workspace, id=key_id, by=owner.prefix)

    async def prune(self) -> None:
        """Forgets what has expired, and what belongs to sandboxes that have ended."""
        await self._store.prune(self._clock.now())

    # ---------------------------------------------------------------- who may come in

    async def by_key(self, sandbox: str, fingerprint: str) -> Visit | None:
        """What a key opens under the id or name of a sandbox. A name that means a sandbox in several workspaces of the
        same key means none: ids do."""
        now = self._clock.now()
        found: dict[str, Visit] = {}
        for key in await self._store.with_fingerprint(fingerprint):
            if key.ended(now):
                continue
            entry = await self._entry(key.workspace, sandbox, key.sandbox_id)
            if entry is not None and entry.record.id not in found:
                info = TokenInfo(
                    key.id, key.comment, key.workspace, key.created_at, None, Scope.EXEC, key.sandbox_id, key.expires_at
                )
                hold, stands = partial(_held, self._calls, info), partial(self._stands, key)
                found[entry.record.id] = Visit(entry, key.id, key.expires_at, hold, stands)
        return next(iter(found.values())) if len(found) == 1 else None

    async def by_token(self, sandbox: str, text: str) -> Visit | None:
        """What a token of the API opens. Raises `auth.token_expired`, and `auth.forbidden` for one that may only read;
        `sandbox.not_found` says that the token is good and the name is not."""
        token = await self._tokens.find(text) if is_token(text) else None
        if token is None:
            return None
        if not token.scope.holds(Scope.EXEC):
            raise forbidden(token)
        entry = await self._entry(token.workspace, sandbox, token.sandbox_id)
        if entry is None:
            raise ClocheError("sandbox.not_found", "there is no sandbox with this id or name")
        hold, stands = partial(_held, self._tokens.calls, token), partial(self._finds, text)
        return Visit(entry, token.prefix, token.expires_at, hold, stands)

    async def _stands(self, key: SshKey) -> bool:
        return any(one.id == key.id for one in await self._store.with_fingerprint(key.fingerprint))

    async def _finds(self, text: str) -> bool:
        try:
            return await self._tokens.find(text) is not None
        except ClocheError:
            return False

    async def _entry(self, workspace: str, sandbox: str, only: str | None) -> Entry | None:
        try:
            entry: Entry | None = await self._access.find(workspace, sandbox)
        except ClocheError:
            entry = self._access.named(workspace, sandbox)
        return entry if entry is not None and only in (None, entry.record.id) else None


@contextlib.contextmanager
def _held(calls: Calls, token: TokenInfo) -> Iterator[None]:
    call = calls.begin(token)
    try:
        yield
    finally:
        calls.finish(call)
