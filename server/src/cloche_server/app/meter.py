"""Meters: what each sandbox uses, while it lives and after its end.

Time in each state is in the record of the sandbox. The rest is counted here: read from the machine at every move, every
few seconds on a thread, and written in one transaction now and then, never while somebody waits for a command or a
create. What is not written yet when the server is killed is what this machine has counted itself (CPU time of a process
that goes on is read again), so at most the last few seconds of what has ended meanwhile, of commands and of bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from cloche_server.app.entry import Entry, not_found
from cloche_server.app.machines import Machines
from cloche_server.app.sleep import STATE
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.budgets import Account
from cloche_server.core.ids import is_sandbox_id
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.meters import HOLDING_MEMORY, Meter, Metered, Usage, add, begin, charge, read, usage_of
from cloche_server.core.ports import Machine, Reading
from cloche_server.core.records import Sandbox
from cloche_server.host import files
from cloche_server.host.clock import Clock
from cloche_server.storage.snapshots import SnapshotCatalog
from cloche_server.store.meters import MeterStore, labels
from cloche_server.telemetry import log

_log = log.get("meter")

#: Machines are read, and meters written, that often (seconds).
SAMPLE_EVERY: Final = 10.0
#: After an end or a move to rest meters are written, with those that follow within this time.
GATHER: Final = 0.5
PRUNE_EVERY: Final = 3600.0
#: States in which nothing is going on for a while.
_AT_REST: Final = frozenset({Status.PAUSED, Status.HIBERNATED, Status.STOPPED, Status.FAILED, Status.DELETED})


class Ledger(Protocol):
    """Accounts that have changed; they are written together with the meters they are sums of."""

    def pending(self) -> tuple[list[Account], list[str]]: ...
    def written(self, accounts: list[Account], dropped: list[str]) -> None: ...


@dataclass(slots=True)
class _Running:
    """The meter of a living sandbox, the machine it reads, and what of it was written last."""

    meter: Meter
    machine: Machine | None = None
    written: Metered | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """So many sandboxes with the same value of a label (None: without it), and what they used together."""

    value: str | None
    count: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class Sum:
    count: int
    usage: Usage
    groups: tuple[Group, ...] = ()


class Meters:
    """The meters of all sandboxes of this host."""

    def __init__(
        self,
        store: MeterStore,
        supervisor: Supervisor,
        machines: Machines,
        snapshots: SnapshotCatalog,
        clock: Clock,
        keep_seconds: float,
    ) -> None:
        self._store = store
        self._supervisor = supervisor
        self._machines = machines
        self._snapshots = snapshots
        self._clock = clock
        self._keep = keep_seconds
        self._running: dict[str, _Running] = {}
        #: Of an earlier server, until their sandboxes are met.
        self._stored: dict[str, Metered] = {}
        #: Ended, and not written yet.
        self._ended: dict[str, Metered] = {}
        #: Moved to rest since the last write.
        self._touched: set[str] = set()
        self._poke = asyncio.Event()
        self._writing = asyncio.Lock()
        self.ledger: Ledger | None = None
        supervisor.observers.append(self._moved)

    # ---------------------------------------------------------------- a start of the server

    async def load(self) -> None:
        """Reads what an earlier server has written. Before sandboxes are taken over."""
        self._stored = {one.sandbox_id: one for one in await self._store.living()}

    async def settle(self) -> list[tuple[Sandbox, Metered]]:
        """Goes on with what was taken over, and closes the meters of what has ended meanwhile, which it returns. They
        are written with the accounts they belong to."""
        for entry in self._supervisor.entries():
            self._of(entry)
        ends = []
        for record in await self._store.unmetered_ends(self._clock.now() - self._keep):
            if record.id not in self._ended:
                before = self._stored.pop(record.id, None)
                # A machine that has ended meanwhile was not read again.
                meter = replace(before.meter if before is not None else Meter(at=record.created_at), memory_bytes=0)
                self._ended[record.id] = _metered(record, replace(charge(meter, record.walls.since), disk_bytes=0))
                ends.append((record, self._ended[record.id]))
        self._stored.clear()
        return ends

    # ---------------------------------------------------------------- reading

    def _of(self, entry: Entry) -> _Running:
        record = entry.record
        running = self._running.get(record.id)
        if running is None:
            running = self._running[record.id] = _Running(begin(record, self._clock.now()))
            before = self._stored.pop(record.id, None)
            if before is not None:
                running.meter, running.written = before.meter, before
                traffic, meter = entry.traffic, before.meter
                traffic.execs += meter.exec_count
                traffic.bytes_in += meter.bytes_in
                traffic.bytes_out += meter.bytes_out
                if record.process != meter.process:
                    # Nobody knows how long the old machine has lived.
                    running.meter = charge(replace(meter, memory_bytes=0), self._clock.now())
            self._switch(running, entry.machine)
        return running

    def _switch(self, running: _Running, machine: Machine | None) -> None:
        running.machine = machine
        self._read(running, machine.measure() if machine is not None else None)

    def _read(self, running: _Running, reading: Reading | None) -> None:
        """Charges the time until now at what stood, and takes what stands now."""
        meter = charge(running.meter, self._clock.now())
        if running.machine is not None and reading is not None:
            meter = replace(read(meter, running.machine.ref, reading.cpu_seconds), memory_bytes=reading.memory_bytes)
        running.meter = meter

    def _moved(self, entry: Entry, event: Event, before: Status) -> None:
        """After every move, so that each state is charged at its own readings."""
        status = entry.record.status
        running = self._of(entry)
        if running.machine is not None:
            self._read(running, running.machine.measure())
        if entry.machine is not running.machine and entry.machine is not None:
            self._switch(running, entry.machine)
        if status not in HOLDING_MEMORY:
            running.meter = replace(charge(running.meter, self._clock.now()), memory_bytes=0)
            if entry.machine is None:
                running.machine = None
        if status is Status.DELETED:
            self._ended[entry.record.id] = replace(self._now(entry, running), metadata=labels(entry.record.metadata))
            del self._running[entry.record.id]
        if status in _AT_REST:
            self._touched.add(entry.record.id)
            self._poke.set()

    def _now(self, entry: Entry, running: _Running) -> Metered:
        traffic = entry.traffic
        running.meter = replace(
            running.meter, exec_count=traffic.execs, bytes_in=traffic.bytes_in, bytes_out=traffic.bytes_out
        )
        return _metered(entry.record, running.meter)

    def read_now(self, entry: Entry) -> Metered:
        """The meter of a sandbox as it is this moment. Cheap, but for a system call or two."""
        ended = self._ended.get(entry.record.id)
        if ended is not None:
            return ended
        if entry.record.status is Status.CREATING:
            return _metered(entry.record, begin(entry.record, self._clock.now()))
        running = self._of(entry)
        if running.machine is not None:
            self._read(running, running.machine.measure())
        return self._now(entry, running)

    def _living(self, only: Set[str] | None) -> list[Entry]:
        found = (e for e in self._supervisor.entries() if only is None or e.record.id in only)
        return [entry for entry in found if entry.record.status is not Status.CREATING]

    async def sample(self, only: Set[str] | None = None) -> None:
        """Reads machines and disks, on a thread: all of them, or those of some sandboxes."""
        living = self._living(only)
        if only is None:
            known = {entry.record.id for entry in self._supervisor.entries()}
            for gone in self._running.keys() - known:  # of creates that came to nothing
                del self._running[gone]
        wanted = [(entry.record, self._of(entry).machine) for entry in living]
        found = await asyncio.to_thread(lambda: [self._look(*one) for one in wanted])
        for entry, (record, machine), (reading, disk) in zip(living, wanted, found, strict=True):
            running = self._running.get(record.id)
            if running is None:
                continue
            if machine is not None and running.machine is machine and entry.record.status in HOLDING_MEMORY:
                self._read(running, reading)
            if disk != running.meter.disk_bytes:
                running.meter = replace(charge(running.meter, self._clock.now()), disk_bytes=disk)

    def _look(self, record: Sandbox, machine: Machine | None) -> tuple[Reading | None, int]:
        paths = [self._machines.layers.path(record.layer_id)] if record.layer_id else []
        if record.status is Status.HIBERNATED:
            with contextlib.suppress(OSError):
                paths += list((self._machines.root / record.id / STATE).iterdir())
        taken = 0
        for path in paths:
            with contextlib.suppress(OSError):
                taken += files.allocated_bytes(path)
        return machine.measure() if machine is not None else None, taken

    # ---------------------------------------------------------------- writing

    async def flush(self, only: Set[str] | None = None) -> None:
        """Writes what has changed, in one transaction: all of it, or of some living sandboxes, with all ends and all
        accounts. Raises `host.disk_full`; it is then written next time."""
        async with self._writing:
            rows: list[tuple[_Running, Metered]] = []
            for entry in self._living(only):
                running = self._running.get(entry.record.id)
                if running is not None and (now := self._now(entry, running)) != running.written:
                    rows.append((running, now))
            ended = list(self._ended.values())
            accounts, dropped = self.ledger.pending() if self.ledger is not None else ([], [])
            await self._store.write([*(row for _, row in rows), *ended], accounts, dropped)
            for running, row in rows:
                running.written = row
            for one in ended:
                self._ended.pop(one.sandbox_id, None)
            if self.ledger is not None:
                self.ledger.written(accounts, dropped)

    def soon(self) -> None:
        """Has what changed written before long."""
        self._poke.set()

    async def run(self) -> None:
        """Every few seconds for as long as the server runs; cancel to stop."""
        next_prune = 0.0
        next_all = self._clock.monotonic() + SAMPLE_EVERY
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_all - self._clock.monotonic())):
                    await self._poke.wait()
                    await asyncio.sleep(GATHER)
            self._poke.clear()
            only: Set[str] | None = self._touched
            self._touched = set()
            if self._clock.monotonic() >= next_all:
                only, next_all = None, self._clock.monotonic() + SAMPLE_EVERY
            await self._safely(partial(self.sample, only))
            await self._safely(partial(self.flush, only))
            if self._clock.monotonic() >= next_prune:
                next_prune = self._clock.monotonic() + PRUNE_EVERY
                await self._safely(self.prune)

    async def _safely(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - counting must never take the server with it
            _log.error("meter.failed", error=repr(error))

    async def close(self) -> None:
        """Reads and writes once more, as the server ends."""
        await self._safely(self.sample)
        await self._safely(self.flush)

    async def prune(self) -> None:
        """Forgets what ended long ago."""
        await self._store.prune(self._clock.now() - self._keep)

    # ---------------------------------------------------------------- telling

    async def usage(self, workspace: str, sandbox_id: str) -> tuple[Metered, Usage]:
        """Of a living sandbox, or of one that has ended for as long as that is kept. Raises `sandbox.not_found`."""
        entry = self._supervisor.get(sandbox_id)
        if entry is not None and entry.record.workspace == workspace:
            one: Metered | None = self.read_now(entry)
        else:
            one = self._ended.get(sandbox_id)
            if one is None and is_sandbox_id(sandbox_id):
                one = await self._store.get(workspace, sandbox_id)
        if one is None or one.workspace != workspace:
            raise not_found(sandbox_id if is_sandbox_id(sandbox_id) else "with this id")
        kept = await asyncio.to_thread(self._snapshot_bytes, workspace)
        return one, usage_of(one, self._clock.now(), kept.get(sandbox_id, 0))

    async def sum(
        self,
        workspace: str,
        *,
        since: float | None = None,
        until: float | None = None,
        group_by: str | None = None,
        sandbox_id: str | None = None,
    ) -> Sum:
        """What the sandboxes of a workspace have used in their whole lives, of those that lived at some time from
        `since` to `until`; and the same by the values of one label."""
        kept = await asyncio.to_thread(self._snapshot_bytes, workspace)
        mine = [entry for entry in self._supervisor.entries() if entry.record.workspace == workspace]
        # What is known here is newer than its row, also when it is written while the rows are read.
        known = dict(self._ended) | {entry.record.id: self.read_now(entry) for entry in mine}
        now, count, total = self._clock.now(), 0, Usage()
        groups: dict[str | None, tuple[int, Usage]] = {}

        async def found() -> AsyncIterator[Metered]:
            for one in known.values():
                if _asked_for(one, workspace, since, until):
                    yield one
            async for one in self._store.of(workspace, since, until):
                if one.sandbox_id not in known:
                    yield one

        async for one in found():
            if sandbox_id not in (None, one.sandbox_id):
                continue
            usage = usage_of(one, now, kept.get(one.sandbox_id, 0))
            count, total = count + 1, add(total, usage)
            if group_by is not None:
                value = labels(one.metadata).get(group_by)
                number, before = groups.get(value, (0, Usage()))
                groups[value] = (number + 1, add(before, usage))
        ordered = sorted(groups.items(), key=lambda item: (item[0] is None, item[0] or ""))
        return Sum(count, total, tuple(Group(value, number, usage) for value, (number, usage) in ordered))

    def _snapshot_bytes(self, workspace: str) -> Mapping[str, int]:
        """What the snapshots of each sandbox take: memory, device state, and the disk layer that was sealed for it."""
        found: dict[str, int] = {}
        for snapshot in self._snapshots.of(workspace):
            layer = 0
            with contextlib.suppress(OSError):
                layer = files.allocated_bytes(self._machines.layers.path(snapshot.layer_id))
            found[snapshot.sandbox_id] = found.get(snapshot.sandbox_id, 0) + snapshot.size_bytes + layer
        return found


def _asked_for(one: Metered, workspace: str, since: float | None, until: float | None) -> bool:
    return (
        one.workspace == workspace
        and (until is None or one.created_at < until)
        and (since is None or one.ended_at is None or one.ended_at >= since)
    )


def _metered(record: Sandbox, meter: Meter) -> Metered:
    # The second is for what a server without meters has deleted.
    ended_at = record.walls.since if record.walls.seconds else record.ended_at or record.created_at
    return Metered(
        sandbox_id=record.id,
        workspace=record.workspace,
        status=record.status,
        created_at=record.created_at,
        ended_at=ended_at if record.status is Status.DELETED else None,
        cpus=record.resources.cpus,
        memory_mb=record.resources.memory_mb,
        metadata=record.metadata,
        walls=record.walls,
        meter=meter,
    )
