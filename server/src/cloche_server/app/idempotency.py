"""Creates with an `Idempotency-Key`: one sandbox, however often the request arrives."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from cloche_server.app.access import Access
from cloche_server.app.create import CreateRequest, Creator
from cloche_server.app.turns import Turns
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Sandbox
from cloche_server.store.sandboxes import IdempotencyKey
from cloche_server.store.tokens import IdempotencyStore

KEPT_SECONDS = 24 * 3600


class IdempotentCreates:
    """Keys are kept for a day, and survive a restart of the server.

    The same key with the same body gives the same sandbox; with another body it is refused; after the
    sandbox has ended it answers `sandbox.not_found`, never a second one. The key is recorded together with
    the sandbox, so that no moment at which the server may end leaves one without the other.
    """

    def __init__(
        self,
        creator: Creator,
        access: Access,
        store: IdempotencyStore,
    ) -> None:
        self._creator = creator
        self._access = access
        self._store = store
        self._turns = Turns()

    async def create(self, request: CreateRequest, key: str | None, body: bytes) -> Sandbox:
        """Errors: those of `Creator.create`, and `request.idempotency_conflict`."""
        if key is None:
            return await self._creator.create(request)
        if not 1 <= len(key) <= 255 or not key.isprintable():
            raise ClocheError("request.invalid", "Idempotency-Key must have 1 to 255 printable characters")
        async with self._turns.of((request.workspace, key)):
            return await self._create_once(request, key, hashlib.sha256(body).hexdigest())

    async def _create_once(self, request: CreateRequest, key: str, digest: str) -> Sandbox:
        earlier = await self._earlier(request.workspace, key, digest)
        return earlier or await self._creator.create(replace(request, key=IdempotencyKey(key, digest)))

    async def earlier(self, workspace: str, key: str | None, body: bytes) -> Sandbox | None:
        """What was made with this key before. Raises `request.idempotency_conflict`, `sandbox.not_found`."""
        return None if key is None else await self._earlier(workspace, key, hashlib.sha256(body).hexdigest())

    async def _earlier(self, workspace: str, key: str, digest: str) -> Sandbox | None:
        known = await self._store.find(workspace, key)
        if known is None:
            return None
        if known.request_hash != digest:
            raise ClocheError(
                "request.idempotency_conflict",
                "this Idempotency-Key was used before with another request body",
            )
        return (await self._access.find(workspace, known.sandbox_id)).record
