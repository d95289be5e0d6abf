"""Who a request comes from, and the tokens that a workspace makes for itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cloche_server.app.calls import Calls, expired, revoked
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import token_hash, token_prefix
from cloche_server.core.records import TokenInfo
from cloche_server.core.scopes import MAX_TOKENS, Scope, expiry
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.store.db import Conflict
from cloche_server.store.tokens import TokenStore
from cloche_server.telemetry import log

_log = log.get("tokens")

#: A revoked token is refused at the latest this many seconds later.
CACHE_SECONDS = 1.0
CACHE_SIZE = 1024
#: How often it is looked whether tokens of open requests have ended (seconds).
WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Wanted:
    """A token that is asked for. `seconds`: how long it lives; None: as long as its maker may."""

    name: str
    scope: Scope
    sandbox_id: str | None = None
    seconds: float | None = None


class Tokens:
    """Looks tokens up; keeps what it found for a second, by hash."""

    def __init__(self, store: TokenStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._cache: dict[str, tuple[float, TokenInfo]] = {}
        self._generation: tuple[int, int] | None = None
        #: What runs now, by token.
        self.calls = Calls()

    async def find(self, token: str) -> TokenInfo | None:
        """The token's owner, or None when it is unknown or revoked. Raises `auth.token_expired`."""
        key = token_hash(token)
        now = self._clock.monotonic()
        cached = self._cache.get(key)
        if cached is not None and cached[0] > now:
            found: TokenInfo | None = cached[1]
        else:
            found = await self._store.find(token)
            self._keep(key, now, found)
        if found is not None and found.ended(self._clock.now()):
            raise expired()
        return found

    def _keep(self, key: str, now: float, found: TokenInfo | None) -> None:
        if found is None:
            self._cache.pop(key, None)
            return
        if len(self._cache) >= CACHE_SIZE:
            self._cache.clear()
        self._cache[key] = (now + CACHE_SECONDS, found)

    # ---------------------------------------------------------------- tokens that end

    async def watch(self) -> None:
        """Ends open requests of tokens that are revoked, by whom ever, or expire. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self.look()
            except ClocheError as error:
                _log.error("tokens.unwatched", error=repr(error))

    async def look(self) -> None:
        """One look at the tokens of all open requests."""
        if not self.calls:
            return
        self.calls.end_expired(self._clock.now())
        checked = self.calls.all_checked()
        generation = await self._store.generation()
        if generation != self._generation:
            # Else a request could come in by what was kept, after this look.
            self._cache.clear()
        if generation != self._generation or not checked:
            self.calls.end_revoked(await self._store.living())
        self._generation = generation

    # ---------------------------------------------------------------- what callers ask for

    async def create(self, maker: TokenInfo, wanted: Wanted) -> tuple[str, TokenInfo]:
        """The plain text of a new token of the maker's workspace, which is told once, and what is kept of it.

        Raises `auth.forbidden` when it would be able to do more than its maker, `token.too_many`."""
        if not maker.scope.holds(wanted.scope):
            raise ClocheError(
                "auth.forbidden",
                f"a token of scope {maker.scope.value} cannot make one of scope {wanted.scope.value}",
                details={"scope": wanted.scope.value, "has": maker.scope.value},
            )
        if maker.sandbox_id is not None and wanted.sandbox_id != maker.sandbox_id:
            raise ClocheError(
                "auth.forbidden", "a token of one sandbox can only make tokens of that sandbox; name it in sandbox_id"
            )
        now = self._clock.now()
        ends = expiry(now, wanted.seconds, maker.expires_at)
        living = [one for one in await self._store.list_of(maker.workspace) if not one.ended(now)]
        if len(living) >= MAX_TOKENS:
            raise ClocheError(
                "token.too_many",
                f"the workspace has {MAX_TOKENS} tokens already, which is the limit",
                details={"limit": MAX_TOKENS},
            )
        made = TokenInfo("", wanted.name, maker.workspace, now, None, wanted.scope, wanted.sandbox_id, ends)
        return await insert(self._store, made)

    async def list(self, owner: TokenInfo) -> list[TokenInfo]:
        """Those of the owner's workspace that open something, oldest first; for a token of one sandbox: of that."""
        now = self._clock.now()
        return [
            one
            for one in await self._store.list_of(owner.workspace)
            if not one.ended(now) and owner.sandbox_id in (None, one.sandbox_id)
        ]

    async def revoke(self, owner: TokenInfo, prefix: str) -> None:
        """What runs by it has been told to end when this returns. Raises `token.not_found`."""
        if all(one.prefix != prefix for one in await self.list(owner)) or not await self._store.revoke(
            prefix, self._clock.now()
        ):
            raise ClocheError("token.not_found", "there is no token with this prefix")
        self._cache.clear()
        self.calls.end(prefix, revoked())
        _log.info("token.revoked", workspace=owner.workspace, by=owner.prefix[:8])


async def insert(store: TokenStore, made: TokenInfo) -> tuple[str, TokenInfo]:
    """Stores a token under a prefix that is free; its plain text, and what is kept of it."""
    for _ in range(10):
        try:
            text = await store.create(
                made.name,
                made.workspace,
                random_bytes(16),
                made.created_at,
                scope=made.scope,
                sandbox_id=made.sandbox_id,
                expires_at=made.expires_at,
            )
        except Conflict:
            continue
        shown = TokenInfo(
            token_prefix(text), made.name, made.workspace, made.created_at, None, made.scope, made.sandbox_id,
            made.expires_at,
        )  # fmt: skip
        return text, shown
    raise ClocheError("internal", "no free token prefix was found")
