"""After a start: what the records say against what is really there.

Running sandboxes are adopted; half-way ones are brought to their end; whatever exists without a record is
removed. The truth about processes is the process table, not a file that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cloche_server.app.capacity import Capacity
from cloche_server.app.machines import Machines
from cloche_server.app.sleep import STATE
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.happenings import news
from cloche_server.core.lifecycle import ON_RESTART, Status
from cloche_server.core.lifecycle import Event as LifecycleEvent
from cloche_server.core.ports import Machine
from cloche_server.core.records import ProcessRef, Sandbox, Termination, TerminationReason, with_status
from cloche_server.guest.client import GuestClient
from cloche_server.guest.types import RenewRequest
from cloche_server.host import files, process
from cloche_server.host.clock import Clock
from cloche_server.storage.snapshots import SnapshotCatalog
from cloche_server.store.sandboxes import SandboxStore
from cloche_server.telemetry import log, metrics

_log = log.get("reconcile")


@dataclass(frozen=True, slots=True)
class Report:
    """What a start found."""

    adopted: int
    failed: int
    finished: int
    orphans: int


class Reconciler:
    def __init__(
        self,
        store: SandboxStore,
        machines: Machines,
        capacity: Capacity,
        supervisor: Supervisor,
        snapshots: SnapshotCatalog,
        clock: Clock,
    ) -> None:
        self._store = store
        self._snapshots = snapshots
        self._machines = machines
        self._capacity = capacity
        self._supervisor = supervisor
        self._journal = supervisor.journal
        self._clock = clock

    async def run(self, *, same_boot: bool) -> Report:
        """Brings records and host together. `same_boot`: the host has not been rebooted since the last server."""
        records = {record.id: record for record in await self._store.living()}
        found = await asyncio.to_thread(self._machines.engine.find, self._machines.root)
        if found and self._store.is_new:
            raise ClocheError(
                "host.unsupported",
                f"the database cloche.db is new, but {len(found)} machines run below {self._machines.root}; "
                "restore the database that knows them, or end them with `cloche-server stop --sandboxes`",
            )
        adopted = failed = finished = 0
        for record in list(records.values()):
            interrupted = record.status in {Status.HIBERNATING, Status.WAKING}
            if interrupted:
                record = await self._half_asleep(record, found.get(record.id))
                records[record.id] = record
            await asyncio.to_thread(_tidy, self._machines.root / record.id)
            if record.status in {Status.STOPPING, Status.STARTING}:
                await self._end(found.get(record.id))
                stopped = self._moved(record, Status.STOPPED, process=None)
                records[record.id] = record = await self._record(record, stopped)
            if record.status is Status.RESTORING:
                await self._end(found.get(record.id))
                await asyncio.to_thread(files.remove_tree, self._machines.root / record.id / STATE)
                await self._mark_failed(record, same_boot, "the server ended while it was taken back to a snapshot")
                failed += 1
            elif record.status in {Status.CREATING, Status.DELETING}:
                await self._finish(record, found.get(record.id))
                finished += 1
            elif record.status in {Status.RUNNING, Status.PAUSED}:
                if await self._adopt(record, found.get(record.id), interrupted):
                    adopted += 1
                else:
                    await self._end(found.get(record.id))  # a machine that nobody steers must not run on
                    await self._mark_failed(record, same_boot)
                    failed += 1
            else:
                await self._end(found.get(record.id))
                self._hold(record)
        orphans = await self._sweep(records, found)
        orphans += await self._take_stock()
        running = {entry.record.id for entry in self._supervisor.entries() if entry.machine is not None}
        await asyncio.to_thread(self._machines.engine.clear_up, running)
        running = {entry.record.id for entry in self._supervisor.entries() if entry.machine is not None}
        await self._machines.network.take_stock(running)
        report = Report(adopted, failed, finished, orphans)
        for outcome in ("adopted", "failed", "finished", "orphans"):
            metrics.restored.labels(outcome).inc(getattr(report, outcome))
        return report

    async def _adopt(self, record: Sandbox, ref: ProcessRef | None, interrupted: bool) -> bool:
        """`interrupted`: in a hibernation or a wake, so its clock and its commands may still stand."""
        if ref is None or ref != record.process:
            return False
        directory = self._machines.root / record.id
        try:
            machine: Machine | None = await self._machines.engine.adopt(record.id, directory, ref)
        except OSError as error:
            raise ClocheError(
                "host.unsupported",
                f"the sandbox {record.id} could not be taken over ({error.strerror}); all are left as they are",
            ) from error
        if machine is None:
            return False
        try:
            layer = await self._steer(record, machine)
        except Exception as error:  # noqa: BLE001 - one machine that cannot be steered must not keep all from starting
            _log.error("adopt.failed", sandbox=record.id, error=repr(error))
            machine.release()
            return False
        try:
            if self._machines.broker is not None:
                await self._machines.broker.ready(record)
            await self._machines.network.adopt(record.id, record.workspace, record.network, record.grants)
        except ClocheError as error:  # it runs on, cut off, and is tried again with the next netd
            _log.error("network.not_adopted", sandbox=record.id, error=error.message)
        self._capacity.take_over(record.id, record.resources)
        guest = GuestClient(str(machine.agent_socket))
        entry = self._supervisor.resume_watch(replace(record, layer_id=layer), machine, guest)
        entry.unsaved = layer != record.layer_id
        if interrupted and record.status is Status.RUNNING:
            with contextlib.suppress(ClocheError):
                await guest.renew(RenewRequest(time_now=True, thaw=True), timeout=30)
        return True

    async def _steer(self, record: Sandbox, machine: Machine) -> str:
        """Makes a machine run or stand still as its record says: its server may have ended in a capture, or before a
        pause or resume was recorded. Returns the layer that it writes to, which may be a fresh one of that capture."""
        layer = await machine.active_layer() if record.layer_id else ""
        await (machine.resume() if record.status is Status.RUNNING else machine.pause())
        return layer

    async def _half_asleep(self, record: Sandbox, ref: ProcessRef | None) -> Sandbox:
        """A hibernation or a wake was interrupted. While the saved memory is there no machine has gone on from it;
        without it the machine, if it lives, is the sandbox."""
        if await asyncio.to_thread((self._machines.root / record.id / STATE).is_dir):
            await self._end(ref)
            return await self._record(record, self._moved(record, Status.HIBERNATED, process=None))
        return await self._record(record, self._moved(record, Status.RUNNING, process=ref or record.process))

    async def _record(self, before: Sandbox, after: Sandbox) -> Sandbox:
        """Writes what a sandbox has come to, and tells of it as of any other move."""
        told = await self._journal.told_of(before)
        happenings = news(told, before, after, self._clock.now())
        await self._store.update(after, happenings)
        self._journal.written(happenings)
        return after

    async def _take_stock(self) -> int:
        """Who holds which disk layer; what nobody holds is removed."""
        snapshots = await asyncio.to_thread(self._snapshots.read)
        tops = [entry.record.layer_id for entry in self._supervisor.entries() if entry.record.layer_id]
        tops += [snapshot.layer_id for snapshot in snapshots]
        unreadable = self._snapshots.unreadable
        if unreadable:
            _log.error("snapshots.unreadable", snapshots=unreadable, hint="layers that nobody holds are kept")
        return await asyncio.to_thread(self._machines.layers.take_stock, tops, remove=not unreadable)

    async def _mark_failed(self, record: Sandbox, same_boot: bool, why: str | None = None) -> None:
        reason = TerminationReason.VMM_DIED if same_boot else TerminationReason.HOST_RESTART
        detail = why or ("the VMM process ended while no server ran" if same_boot else "the host was restarted")
        now = self._clock.now()
        termination = Termination(reason, now, detail=detail)
        failed = self._moved(record, Status.FAILED, termination=termination, ended_at=now, process=None)
        self._hold(await self._record(record, failed))

    def _hold(self, record: Sandbox) -> None:
        """A failed sandbox keeps its disk until it is deleted or its TTL has passed."""
        self._capacity.take_over(record.id, record.resources)
        self._capacity.without_memory(record.id)
        entry = self._supervisor.resume_watch(record, None, None)
        if record.status is Status.FAILED:
            entry.ended.set()

    async def _finish(self, record: Sandbox, ref: ProcessRef | None) -> None:
        """A create or a delete was interrupted: nothing of it may stay."""
        await self._remove(record.id, ref)
        if ON_RESTART[record.status] is LifecycleEvent.ABORTED:
            await self._store.forget(record.id)
            return
        now = self._clock.now()
        termination = record.termination or Termination(TerminationReason.DELETED, now)
        ended_at = record.ended_at or now
        ended = self._moved(record, Status.DELETED, termination=termination, ended_at=ended_at, process=None)
        await self._record(record, ended)

    def _moved(self, record: Sandbox, status: Status, **changes: Any) -> Sandbox:
        return with_status(record, status, self._clock.now(), version=record.version + 1, **changes)

    async def _sweep(self, records: Mapping[str, Sandbox], found: Mapping[str, ProcessRef]) -> int:
        root = self._machines.root
        names = await asyncio.to_thread(lambda: {path.name for path in root.iterdir()} if root.is_dir() else set())
        orphans = [name for name in names | found.keys() if name not in records]
        for name in orphans:
            _log.warning("orphan.removed", machine=name)
            await self._remove(name, found.get(name))
        return len(orphans)

    async def _end(self, ref: ProcessRef | None) -> None:
        if ref is not None:
            process.kill(ref.pid, ref.start_time)
            await process.wait_exit(ref.pid, ref.start_time, 10)

    async def _remove(self, name: str, ref: ProcessRef | None) -> None:
        await self._end(ref)
        await self._machines.remove_directory(name)


def _tidy(directory: Path) -> None:
    """Removes what a capture, a hibernation or a wake had not finished; such names begin with a dot."""
    for path in directory.glob(".*"):
        files.remove_tree(path)
