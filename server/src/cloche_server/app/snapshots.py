"""Snapshots: take one of a sandbox, list, check, remove, and what a create continues from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from cloche_server.app.access import Access
from cloche_server.app.capturing import Capturer
from cloche_server.app.entry import Entry, not_written
from cloche_server.app.machines import Machines, Source
from cloche_server.app.steps import to_the_end
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import id_from_random
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.ports import Captured
from cloche_server.core.records import BootMode
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.storage.snapshots import Snapshot, SnapshotCatalog
from cloche_server.telemetry import log

_log = log.get("snapshots")


@dataclass(frozen=True, slots=True)
class Lineage:
    """`ancestors`: nearest first. `missing`: the id of the one above the last of them, which has been removed.
    `sandboxes`: the living ones that have gone on from it and have no later snapshot of their own."""

    snapshot: Snapshot
    ancestors: tuple[Snapshot, ...]
    missing: str | None
    children: tuple[Snapshot, ...]
    sandboxes: tuple[str, ...]


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

    async def take(
        self, workspace: str, sandbox_id: str, name: str | None = None, memory: bool | None = None
    ) -> Snapshot:
        """A durable snapshot of a sandbox. One that runs stands still for a moment and goes on. `memory` None: as the
        sandbox is, which has none when it is stopped or has failed. Raises `sandbox.invalid_state`,
        `sandbox.capture_failed`, `host.disk_full`; then there is no snapshot."""
        entry = await self._access.awake(workspace, sandbox_id)
        snapshot = await self._supervisor.perform(entry, lambda: self._take_and_tell(entry, name, memory))
        _log.info("snapshot.taken", sandbox=sandbox_id, snapshot=snapshot.id, size_bytes=snapshot.size_bytes)
        return snapshot

    async def _take_and_tell(self, entry: Entry, name: str | None, memory: bool | None) -> Snapshot:
        """In the task of the sandbox, so that it is told whether or not the caller is still there."""
        snapshot = await self._take(entry, name, memory)
        told = {**_named(snapshot), "size_bytes": snapshot.size_bytes}
        await self._supervisor.journal.tell("snapshot.created", snapshot.workspace, snapshot.sandbox_id, told)
        return snapshot

    async def _take(self, entry: Entry, name: str | None, memory: bool | None) -> Snapshot:
        if memory is None:
            memory = entry.record.status not in {Status.STOPPED, Status.FAILED}
        captured, layer = await self._capturer.sealed(entry, event=Event.SNAPSHOT, memory=memory)
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
            parent_snapshot_id=record.checkpoint_id,
            cold=record.cold or not memory,
            memory=memory,
            network=record.network,
            grants=record.grants,
        )
        made: list[Snapshot] = []
        try:
            await to_the_end(asyncio.to_thread(lambda: made.append(self._publish(snapshot, captured))))
        except BaseException as error:
            if not made:
                # Else the hold on the sealed layer is the snapshot's, and whoever removes that lets go of it.
                await asyncio.shield(self._machines.release_layer(layer))
            if isinstance(error, OSError):
                raise not_written(error, "the snapshot") from error
            raise
        finally:
            if captured.pages is not None:
                captured.pages.close()
        await self._supervisor.amend(entry, checkpoint_id=snapshot.id)
        return made[0]

    def _publish(self, snapshot: Snapshot, captured: Captured) -> Snapshot:
        layers = self._machines.layers
        chain = layers.chain(snapshot.layer_id)
        digests = {layer: layers.digest(layer) for layer in chain}
        return self._catalog.publish(replace(snapshot, layers=digests), captured, [layers.path(one) for one in chain])

    def list(self, workspace: str, sandbox_id: str | None = None) -> list[Snapshot]:
        """Newest first."""
        return [s for s in self._catalog.of(workspace) if sandbox_id in (None, s.sandbox_id)]

    def get(self, workspace: str, snapshot_id: str) -> Snapshot:
        return self._catalog.get(workspace, snapshot_id)

    def is_of(self, workspace: str, snapshot_id: str, sandbox_id: str) -> bool:
        """Whether there is such a snapshot, taken of that sandbox."""
        return any(one.id == snapshot_id for one in self.list(workspace, sandbox_id))

    def disk_bytes(self, snapshot: Snapshot) -> int:
        """What its disk layers take on the host. Blocking."""
        return self._machines.layers.bytes_of(snapshot.layer_id)

    async def remove(self, workspace: str, snapshot_id: str) -> None:
        """For good. Sandboxes that were made from it go on."""
        await to_the_end(self._remove(self._catalog.get(workspace, snapshot_id)))

    async def _remove(self, snapshot: Snapshot) -> None:
        if await asyncio.to_thread(self._catalog.remove, snapshot):
            await self._machines.release_layer(snapshot.layer_id)
            told = (snapshot.workspace, snapshot.sandbox_id, _named(snapshot))
            await self._supervisor.journal.tell("snapshot.deleted", *told)

    async def verify(self, workspace: str, snapshot_id: str) -> tuple[str, ...]:
        """Reads all of it. What is not as it was written, as sentences; nothing when all is well."""
        snapshot = self._catalog.get(workspace, snapshot_id)
        layers = self._machines.layers
        layers.hold(snapshot.layer_id)
        try:
            layers.forget_digests(snapshot.layers)
            problems = await asyncio.to_thread(self._catalog.verify, snapshot)
            changed = await asyncio.to_thread(layers.changed, snapshot.layers)
        finally:
            await asyncio.shield(self._machines.release_layer(snapshot.layer_id))
        problems += [f"its disk layer {layer} has changed or is missing" for layer in changed]
        if not self._capturer.has_template(snapshot.template_id):
            problems.append(f"its template {snapshot.template_id} is not there any more")
        self._catalog.get(workspace, snapshot_id)  # what is removed meanwhile is not damaged
        return tuple(problems)

    def lineage(self, workspace: str, snapshot_id: str) -> Lineage:
        """Where a snapshot comes from, and what came of it."""
        snapshot = self._catalog.get(workspace, snapshot_id)
        mine = {one.id: one for one in self._catalog.of(workspace)}
        ancestors: list[Snapshot] = []
        above = snapshot.parent_snapshot_id
        while above in mine and mine[above] not in ancestors:
            ancestors.append(mine[above])
            above = mine[above].parent_snapshot_id
        children = tuple(one for one in mine.values() if one.parent_snapshot_id == snapshot.id)
        sandboxes = tuple(one.id for one in self._access.list(workspace) if one.checkpoint_id == snapshot.id)
        return Lineage(snapshot, tuple(ancestors), above, children, sandboxes)

    @contextlib.asynccontextmanager
    async def source(self, workspace: str, snapshot_id: str) -> AsyncIterator[tuple[Snapshot, Source]]:
        """What creates continue from, while the block lasts. Raises `snapshot.not_found`, `snapshot.corrupt`,
        `snapshot.incompatible`."""
        snapshot = self._catalog.get(workspace, snapshot_id)
        self._machines.layers.hold(snapshot.layer_id)
        try:
            source = await self._source(snapshot)
            try:
                yield snapshot, source
            finally:
                if source.state is not None:
                    source.state.pages.close()
        except ClocheError as error:
            if error.code in {"snapshot.corrupt", "sandbox.boot_failed", "template.corrupt"}:
                self._catalog.get(workspace, snapshot_id)  # removed meanwhile: that is what is told
            raise
        finally:
            await asyncio.shield(self._machines.release_layer(snapshot.layer_id))

    async def _source(self, snapshot: Snapshot) -> Source:
        template = self._capturer.template_by_id(snapshot.template_id)
        changed = await asyncio.to_thread(self._machines.layers.changed, snapshot.layers)
        if changed:
            raise ClocheError("snapshot.corrupt", f"its disk layer {changed[0]} has changed or is missing")
        if not snapshot.memory:
            boot = self._capturer.boot_files(snapshot.template_id)
            return Source(template, snapshot.layer_id, snapshot.disk_mb, None, BootMode.COLD, boot)
        state = await asyncio.to_thread(self._catalog.load, snapshot, self._machines.engine.fingerprint)
        return Source(template, snapshot.layer_id, snapshot.disk_mb, state, BootMode.SNAPSHOT)


def _named(snapshot: Snapshot) -> dict[str, str]:
    named = {"snapshot_id": snapshot.id}
    return named if snapshot.name is None else {**named, "name": snapshot.name}
