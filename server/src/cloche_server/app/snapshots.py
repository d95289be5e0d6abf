"""Snapshots: take one of a running sandbox, list, remove, and what a create continues from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from cloche_server.app.access import Access
from cloche_server.app.capturing import Capturer
from cloche_server.app.entry import Entry
from cloche_server.app.machines import Machines, Source
from cloche_server.app.steps import to_the_end
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import id_from_random
from cloche_server.core.lifecycle import Event
from cloche_server.core.records import BootMode
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.storage.snapshots import Snapshot, SnapshotCatalog
from cloche_server.telemetry import log

_log = log.get("snapshots")


class Snapshots:
    def __init__(
        self,
        access: Access,
        supervisor: Supervisor,
        capturer: Capturer,
        machines: Machines,
        catalog: SnapshotCatalog,
        clock: Clock,
    ) -> None:
        self._access = access
        self._supervisor = supervisor
        self._capturer = capturer
        self._machines = machines
        self._catalog = catalog
        self._clock = clock

    async def take(self, workspace: str, sandbox_id: str, name: str | None = None) -> Snapshot:
        """A durable snapshot of a running or paused sandbox, which stands still for a moment and goes on. Raises
        `sandbox.invalid_state`, `sandbox.capture_failed`, `host.disk_full`; then there is no snapshot."""
        entry = await self._access.awake(workspace, sandbox_id)
        snapshot = await self._supervisor.perform(entry, lambda: self._take_and_tell(entry, name))
        _log.info("snapshot.taken", sandbox=sandbox_id, snapshot=snapshot.id, size_bytes=snapshot.size_bytes)
        return snapshot

    async def _take_and_tell(self, entry: Entry, name: str | None) -> Snapshot:
        """In the task of the sandbox, so that it is told whether or not the caller is still there."""
        snapshot = await self._take(entry, name)
        told = {**_named(snapshot), "size_bytes": snapshot.size_bytes}
        await self._supervisor.journal.tell("snapshot.created", snapshot.workspace, snapshot.sandbox_id, told)
        return snapshot

    async def _take(self, entry: Entry, name: str | None) -> Snapshot:
        captured, layer = await self._capturer.sealed(entry, event=Event.SNAPSHOT)
        record = entry.record
        snapshot = Snapshot(
            id=id_from_random(random_bytes(16)),
            workspace=record.workspace,
            sandbox_id=record.id,
            name=name,
            created_at=self._clock.now(),
            template=record.template,
            template_name=record.template_name,
            template_id=record.template_id,
            fingerprint=self._machines.engine.fingerprint,
            shape=record.resources.shape,
            disk_mb=record.resources.disk_mb,
            layer_id=layer,
            defaults=record.defaults,
            metadata=record.metadata,
            parent_snapshot_id=record.snapshot_id,
            cold=record.cold,
        )
        layers = [self._machines.layers.path(one) for one in self._machines.layers.chain(layer)]
        try:
            # The hold on the sealed layer is the snapshot's from now on.
            await to_the_end(asyncio.to_thread(self._catalog.publish, snapshot, captured, layers))
            return self._catalog.get(snapshot.workspace, snapshot.id)
        except BaseException as error:
            await asyncio.shield(self._machines.release_layer(layer))
            if isinstance(error, OSError):
                raise ClocheError("host.disk_full", "the snapshot could not be written") from error
            raise
        finally:
            if captured.pages is not None:
                captured.pages.close()

    def list(self, workspace: str, sandbox_id: str | None = None) -> list[Snapshot]:
        """Newest first."""
        return [s for s in self._catalog.of(workspace) if sandbox_id in (None, s.sandbox_id)]

    def get(self, workspace: str, snapshot_id: str) -> Snapshot:
        return self._catalog.get(workspace, snapshot_id)

    async def remove(self, workspace: str, snapshot_id: str) -> None:
        """For good. Sandboxes that were made from it go on."""
        await to_the_end(self._remove(self._catalog.get(workspace, snapshot_id)))

    async def _remove(self, snapshot: Snapshot) -> None:
        if await asyncio.to_thread(self._catalog.remove, snapshot):
            await self._machines.release_layer(snapshot.layer_id)
            told = (snapshot.workspace, snapshot.sandbox_id, _named(snapshot))
            await self._supervisor.journal.tell("snapshot.deleted", *told)

    @contextlib.asynccontextmanager
    async def source(self, workspace: str, snapshot_id: str) -> AsyncIterator[tuple[Snapshot, Source]]:
        """What creates continue from, while the block lasts. Raises `snapshot.not_found`, `snapshot.corrupt`,
        `snapshot.incompatible`."""
        snapshot = self._catalog.get(workspace, snapshot_id)
        template = self._capturer.template_by_id(snapshot.template_id)
        layers = self._machines.layers
        layers.hold(snapshot.layer_id)
        try:
            state = await asyncio.to_thread(self._catalog.load, snapshot, self._machines.engine.fingerprint)
            try:
                yield snapshot, Source(template, snapshot.layer_id, snapshot.disk_mb, state, BootMode.SNAPSHOT)
            finally:
                state.pages.close()
        finally:
            await asyncio.shield(self._machines.release_layer(snapshot.layer_id))


def _named(snapshot: Snapshot) -> dict[str, str]:
    named = {"snapshot_id": snapshot.id}
    return named if snapshot.name is None else {**named, "name": snapshot.name}
