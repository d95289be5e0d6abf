"""What is done every now and then: aim the pools, forget old records."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cloche_server.app.idempotency import KEPT_SECONDS
from cloche_server.app.journal import Journal
from cloche_server.app.pools import Pools
from cloche_server.app.promoted import pool_target, usual_shape
from cloche_server.app.template_keeper import TemplateKeeper
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Shape
from cloche_server.host.clock import Clock
from cloche_server.settings import Settings
from cloche_server.storage.templates import TemplateCatalog, TemplateMeta
from cloche_server.store.sandboxes import SandboxStore
from cloche_server.store.tokens import IdempotencyStore
from cloche_server.telemetry import log

_log = log.get("upkeep")

AIM_EVERY = 5.0
PRUNE_EVERY = 600.0


class Upkeep:
    """One background task of the server."""

    def __init__(
        self,
        settings: Settings,
        catalog: TemplateCatalog,
        pools: Pools,
        fingerprint: str,
        shape: Shape,
        store: SandboxStore,
        idempotency: IdempotencyStore,
        journal: Journal,
        clock: Clock,
        keeper: TemplateKeeper,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._pools = pools
        self._fingerprint = fingerprint
        self._shape = shape
        self._store = store
        self._idempotency = idempotency
        self._journal = journal
        self._clock = clock
        self._keeper = keeper
        self._told: dict[str, str] = {}
        #: What else is done whenever old records are forgotten.
        self.chores: list[Callable[[], Awaitable[None]]] = []

    async def run(self) -> None:
        next_prune = 0.0
        await self._safely(self._sweep)
        while True:
            await self._safely(self._aim)
            await self._safely(self._journal.catch_up)
            if self._clock.monotonic() >= next_prune:
                next_prune = self._clock.monotonic() + PRUNE_EVERY
                await self._safely(self._prune)
                await self._safely(self._keeper.prune)
                for chore in self.chores:
                    await self._safely(chore)
            await asyncio.sleep(AIM_EVERY)

    async def _safely(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - house-keeping must never take the server with it
            _log.error("upkeep.failed", error=repr(error))

    async def _sweep(self) -> None:
        """A bake that was killed has left a machine that runs for nobody."""
        await asyncio.to_thread(self._catalog.sweep)

    async def _aim(self) -> None:
        """Another process may have baked a newer template, or removed or damaged a present one."""
        found = []
        for name in filter(None, (part.strip() for part in self._settings.pool_template.split(","))):
            meta = self._ready(name)
            if meta is not None and await self._usable(name, meta):
                found.append(meta.template)
        if tuple(found) != self._pools.templates:
            self._pools.aim(*found)

    def _ready(self, name: str) -> TemplateMeta | None:
        """None: nobody has baked it."""
        resolved, promoted = pool_target(self._catalog, name, self._fingerprint)
        if promoted is not None or resolved is None:
            return promoted
        return self._catalog.find(resolved, usual_shape(self._catalog, resolved, self._shape), self._fingerprint)

    async def _usable(self, name: str, meta: TemplateMeta) -> bool:
        try:
            await asyncio.to_thread(self._catalog.check, meta)
        except ClocheError as error:
            if self._told.get(name) != error.message:
                _log.error("pool.template_unusable", error=error.message)
            self._told[name] = error.message
            return False
        return True

    async def _prune(self) -> None:
        now = self._clock.now()
        try:
            await self._store.prune(now - self._settings.deleted_retention)
            await self._idempotency.prune(now - KEPT_SECONDS)
            keep = self._settings.events_keep
            await self._journal.store.prune(now - self._settings.events_keep_days * 86400, keep)
        except ClocheError as error:
            _log.error("prune.failed", error=error.message)
