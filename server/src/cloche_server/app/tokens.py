"""Who a request comes from."""

from __future__ import annotations

from cloche_server.core.ids import token_hash
from cloche_server.core.records import TokenInfo
from cloche_server.host.clock import Clock
from cloche_server.store.tokens import TokenStore

#: A revoked token is refused at the latest this many seconds later.
CACHE_SECONDS = 1.0
CACHE_SIZE = 1024


class Tokens:
    """Looks tokens up; keeps what it found for a second, by hash."""

    def __init__(self, store: TokenStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._cache: dict[str, tuple[float, TokenInfo]] = {}

    async def find(self, token: str) -> TokenInfo | None:
        """The token's owner, or None when it is unknown or revoked."""
        key = token_hash(token)
        now = self._clock.monotonic()
        cached = self._cache.get(key)
        if cached is not None and cached[0] > now:
            return cached[1]
        found = await self._store.find(token)
        if found is None:
            self._cache.pop(key, None)
            return None
        if len(self._cache) >= CACHE_SIZE:
            self._cache.clear()
        self._cache[key] = (now + CACHE_SECONDS, found)
        return found
