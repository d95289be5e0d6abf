"""Back to a snapshot, in place: the sandbox keeps its id, its name and its TTL, and goes on from another moment.

What it has done since is gone for good, unless a snapshot was taken of it. The snapshot is read and compared before
anything is touched. Once the old machine has ended there is no way back to it: what fails then leaves a sandbox that
has failed, with its disk, and the restore may be repeated.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry, illegal, rearmed
from cloche_server.app.machines import Machines, Slot, Source
from cloche_server.app.room import Room
from cloche_server.app.sleep import forget
from cloche_server.app.snapshots import Snapshots
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import id_from_random
from cloche_server.core.lifecycle import Event, Status, step
from cloche_server.core.ports import Machine
from cloche_server.core.records import BootMode, Sandbox
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.storage.snapshots import Snapshot
from cloche_server.storage.templates import TemplateCatalog
from cloche_server.telemetry import log

_log = log.get("restore")


class Restores:
    def __init__(
        self,
        access: Access,
        supervisor: Supervisor,
        machines: Machines,
        snapshots: Snapshots,
        catalog: TemplateCatalog,
        room: Room,
        clock: Clock,
    ) -> None:
        self._access = access
        self._supervisor = supervisor
        self._machines = machines
        self._snapshots = snapshots
        self._catalog = catalog
        self._room = room
        self._clock = clock

    async def restore(self, workspace: str, sandbox_id: str, snapshot_id: str | None) -> Sandbox:
        """Takes a sandbox back to one of the workspace's snapshots; None: to the one it has last gone on from, or that
        was last taken of it. Its TTL is counted anew. Raises `sandbox.invalid_state`, `snapshot.not_found`,
        `snapshot.corrupt`, `snapshot.incompatible`, `request.invalid` (it is of another size), `capacity.unavailable`,
        `budget.exceeded`: the sandbox is then as before; `sandbox.boot_failed`: it has failed."""
        entry = await self._access.find(workspace, sandbox_id)
        wanted = snapshot_id or entry.record.checkpoint_id
        if wanted is None:
            raise ClocheError(
                "request.invalid",
                f"no snapshot of the sandbox {sandbox_id} was taken yet; say which `snapshot_id` is meant",
                details={"field": "snapshot_id"},
            )
        self._snapshots.get(workspace, wanted)

        async def restore() -> Sandbox:
            # Inside the task: what the machine continues from has to be there after the caller has gone away.
            async with self._snapshots.source(workspace, wanted) as (snapshot, source):
                return await self._restore(entry, snapshot, source)

        return await self._supervisor.perform(entry, restore)

    async def _restore(self, entry: Entry, snapshot: Snapshot, source: Source) -> Sandbox:
        record = entry.record
        if step(record.status, Event.RESTORE) is None or not record.layer_id:
            raise illegal(record, Event.RESTORE)
        _check_size(record, snapshot)
        self._access.check_budget(entry)
        held = entry.machine is not None and record.status is not Status.FAILED
        await self._room.take(record.id)
        began = self._clock.monotonic()
        layer = id_from_random(random_bytes(16))
        try:
            await asyncio.to_thread(self._machines.layers.create, layer, source.template, source.layer)
            try:
                # All at once, before the old machine ends: whatever interrupts what follows, the record then names the
                # disk and the memory that belong together.
                await self._supervisor.move(entry, Event.RESTORE, **_of_snapshot(snapshot, layer))
            except BaseException:
                if entry.record.layer_id != layer:  # a server that ends may have recorded it all the same
                    await self._machines.release_layer(layer)
                raise
        except BaseException:
            if not held:
                self._room.give_back(record.id)
            raise
        try:
            await self._end_old(entry, record.layer_id)
            slot = await self._begin_new(entry, snapshot, source)
        except BaseException as error:
            await asyncio.shield(self._failed(entry, error))
            if isinstance(error, OSError):
                raise ClocheError("sandbox.boot_failed", f"the snapshot could not be restored: {error}") from error
            raise
        entry.ended = asyncio.Event()
        self._supervisor.attach(entry, slot.machine, slot.guest)
        entry.last_activity = self._clock.monotonic()
        took = max(1, round((self._clock.monotonic() - began) * 1000))
        _log.info("sandbox.restored", sandbox=record.id, snapshot=snapshot.id, ms=took)
        return await self._supervisor.move(entry, Event.BOOTED, done=True, **self._changes(entry, slot, took))

    def _changes(self, entry: Entry, slot: Slot, took: int) -> dict[str, Any]:
        record, now = entry.record, self._clock.now()
        return {
            "process": slot.machine.ref,
            "isolation": self._machines.engine.isolation,
            "started_at": now,
            "boot_ms": took,
            "boot_mode": slot.mode,
            "termination": None,
            "ended_at": None,
            "expires_at": rearmed(record, now, record.ttl_seconds, record.persistent).expires_at,
        }

    async def _end_old(self, entry: Entry, layer: str) -> None:
        """From here on the sandbox is what its snapshot was, or has failed. `layer`: what it has written to so far."""
        machine, guest = entry.machine, entry.guest
        try:
            if guest is not None:
                await guest.aclose()
            if machine is not None:
                # Not ours any more: that it ends is no crash.
                entry.machine = entry.guest = None
                await self._kill(entry, machine)
            # Memory that was saved belongs to the disk that goes now, and must never be continued from again.
            await asyncio.to_thread(forget, self._machines.root / entry.record.id)
        finally:
            await self._machines.release_layer(layer)

    async def _kill(self, entry: Entry, machine: Machine) -> None:
        """One that resists stays with the sandbox, whose next verb ends it."""
        try:
            await machine.kill()
        except BaseException:
            entry.machine = machine
            raise
        machine.release()
        await self._machines.unplug(entry.record.id)

    async def _begin_new(self, entry: Entry, snapshot: Snapshot, source: Source) -> Slot:
        record, machines = entry.record, self._machines
        own = snapshot.sandbox_id == record.id
        if source.state is None:
            meta = self._catalog.existing(snapshot.template_id)
            slot = await machines.boot(meta, record.id, record.layer_id, record.resources)
        else:
            slot = await machines.relaunch(source.template, record.id, record.layer_id, source.state, source.mode)
        slot.disk_mb = source.disk_mb
        try:
            await machines.restore(slot)
            await machines.grow_disk(slot, record.resources.disk_mb)
            ca_pem = await machines.plug_in(record)
            # The name of one that boots is not on its disk alone.
            cold = slot.mode is BootMode.COLD
            await machines.renew(slot, names=cold or not own, booted=cold and own, thaw=True, ca_pem=ca_pem)
        except BaseException:
            await asyncio.shield(self._end(entry, slot))
            raise
        return slot

    async def _end(self, entry: Entry, slot: Slot) -> None:
        await slot.guest.aclose()
        await self._kill(entry, slot.machine)

    async def _failed(self, entry: Entry, error: BaseException) -> None:
        _log.error("restore.failed", sandbox=entry.record.id, error=repr(error))
        self._room.give_back(entry.record.id)
        resists, entry.machine = entry.machine, None
        if entry.record.status is Status.RESTORING:
            await self._supervisor.fail(entry, "it could not be taken back to a snapshot")
        entry.machine = resists


def _of_snapshot(snapshot: Snapshot, layer: str) -> dict[str, Any]:
    return {
        "layer_id": layer,
        "template": snapshot.template,
        "template_name": snapshot.template_name,
        "template_id": snapshot.template_id,
        "cold": snapshot.cold,
        "checkpoint_id": snapshot.id,
        "status_reason": None,
    }


def _check_size(record: Sandbox, snapshot: Snapshot) -> None:
    if snapshot.shape != record.resources.shape or snapshot.disk_mb > record.resources.disk_mb:
        has = f"{snapshot.shape.cpus} CPUs, {snapshot.shape.memory_mb} MiB and a disk of {snapshot.disk_mb} MiB"
        raise ClocheError(
            "request.invalid",
            f"the snapshot {snapshot.id} has {has}, the sandbox {record.id} another size; create one from it instead",
            details={"field": "snapshot_id"},
        )
