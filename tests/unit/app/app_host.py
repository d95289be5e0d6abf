"""The use cases over a host in memory and a real database."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloche_server.app.access import Access
from cloche_server.app.budget import Budgets
from cloche_server.app.budget_verbs import BudgetVerbs
from cloche_server.app.capacity import OVERHEAD_MB, Capacity
from cloche_server.app.capturing import Capturer
from cloche_server.app.create import CreateRequest, Creator
from cloche_server.app.entry import Entry
from cloche_server.app.fork import Forks
from cloche_server.app.groups import Groups
from cloche_server.app.idempotency import IdempotentCreates
from cloche_server.app.idle import IdleActions
from cloche_server.app.lifecycle import LifecycleVerbs
from cloche_server.app.machines import Machines
from cloche_server.app.meter import Meters
from cloche_server.app.pools import Pools
from cloche_server.app.reconcile import Reconciler
from cloche_server.app.restore import Restores
from cloche_server.app.room import Room
from cloche_server.app.sleep import STATE, SleepVerbs
from cloche_server.app.snapshots import Snapshots
from cloche_server.app.stop import StopVerbs
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import DEADLINES, Status
from cloche_server.core.ports import BootFiles
from cloche_server.core.records import ExecDefaults, Sandbox
from cloche_server.settings import Settings
from cloche_server.storage.layers import Layers
from cloche_server.storage.snapshots import SnapshotCatalog
from cloche_server.storage.templates import TemplateMeta
from cloche_server.store.db import Database
from cloche_server.store.meters import MeterStore
from cloche_server.store.sandboxes import SandboxStore
from cloche_server.store.tokens import IdempotencyStore
from kit.fake_engine import FakeClock, FakeEngine, World, is_open, missing_layers, template
from kit.fake_network import FakeNetwork

HALF_WAY = frozenset(DEADLINES)
#: States with a machine.
AWAKE = {Status.RUNNING, Status.PAUSED}


class FakeCatalog:
    """One baked template, `base`."""

    def __init__(self, root: Path) -> None:
        self.meta = TemplateMeta(
            template(root), (), "", ExecDefaults(), BootFiles(root, root, root), "fake", "inputs", {}, {}
        )

    def resolve(self, name: str, *_: object) -> str | None:
        return "base" if name == "base" else None

    def newest(self, *_: object) -> TemplateMeta:
        return self.meta

    def find(self, *_: object) -> TemplateMeta:
        return self.meta

    def get(self, template_id: str) -> TemplateMeta | None:
        return self.meta if template_id == self.meta.template.id else None

    def existing(self, template_id: str) -> TemplateMeta:
        meta = self.get(template_id)
        if meta is None:
            raise ClocheError("template.corrupt", f"the template {template_id} is not there any more")
        return meta

    def checked(self, meta: TemplateMeta) -> bool:
        return True


@dataclass
class Host:
    """Everything of one server but its HTTP front."""

    world: World
    root: Path
    database: Database
    store: SandboxStore
    clock: FakeClock
    capacity: Capacity
    machines: Machines
    pools: Pools
    supervisor: Supervisor
    creator: Creator
    access: Access
    lifecycle: LifecycleVerbs
    creates: IdempotentCreates
    reconciler: Reconciler
    catalog: SnapshotCatalog
    capturer: Capturer
    sleep: SleepVerbs
    forks: Forks
    snapshots: Snapshots
    power: StopVerbs
    restores: Restores
    meters: Meters
    budgets: Budgets
    spending: BudgetVerbs
    groups: Groups
    network: FakeNetwork

    async def take_over(self) -> None:
        """What a server does at its start."""
        await self.meters.load()
        await self.budgets.load()
        await self.reconciler.run(same_boot=True)
        await self.groups.tell_all()
        await self.budgets.settle(await self.meters.settle())

    async def create(self, **options: Any) -> Sandbox:
        return await self.creator.create(CreateRequest("w", **options))

    async def rows(self) -> list[Sandbox]:
        return await self.store.living()

    async def left(self) -> list[str]:
        """All that exists, by any account."""
        found = self.world.is_empty(self.root)
        found += [f"record {r.id} {r.status.value}" for r in await self.rows()]
        found += [f"entry {e.record.id}" for e in self.supervisor.entries()]
        usage = self.capacity.usage()
        if (usage.sandboxes, usage.memory_mb, usage.disk_mb) != (0, 0, 0):
            found.append(f"promised {usage}")
        return found

    async def untrue(self) -> list[str]:
        """What is recorded, promised or held and is not so, and what is so and nowhere recorded."""
        found = []
        stored = {record.id: record for record in await self.rows()}
        entries = {entry.record.id: entry for entry in self.supervisor.entries()}
        for entry in entries.values():
            found += [f"{entry.record.id} {entry.record.status.value}: {text}" for text in self._untrue(entry)]
            if not entry.unsaved and stored.get(entry.record.id) != entry.record:
                found.append(f"stored is {stored.get(entry.record.id)}, not {entry.record}")
        promised = self.capacity.usage()
        awake = [e.record.resources.memory_mb + OVERHEAD_MB for e in entries.values() if e.record.status in AWAKE]
        if (promised.sandboxes, promised.memory_mb) != (len(entries), sum(awake)):
            found.append(f"promised {promised} for {len(entries)}, of which {len(awake)} are awake")
        snapshots = self.catalog.of("w")
        tops = [e.record.layer_id for e in entries.values()] + [s.layer_id for s in snapshots]
        layers = self.machines.layers
        needed = {layer for top in tops for layer in layers.chain(top)}
        there = {path.name.removesuffix(".qcow2") for path in layers.root.iterdir()}
        if needed != there:
            found.append(f"layers too many {there - needed}, missing {needed - there}")
        if {path.name for path in self.root.iterdir()} != entries.keys():
            found.append(f"directories {[path.name for path in self.root.iterdir()]}")
        if set(stored) != entries.keys() or self.world.alive.keys() - entries.keys():
            found.append(f"records {set(stored)}, processes {set(self.world.alive)}, known {set(entries)}")
        if self.world.slots != set(self.world.alive):
            found.append(f"slots {self.world.slots}, machines {set(self.world.alive)}")
        kept = {path.name for path in self.catalog.root.iterdir()} if self.catalog.root.is_dir() else set()
        if kept != {snapshot.id for snapshot in snapshots}:
            found.append(f"snapshots on disk {kept}")
        return found + [f"open memory {pages.runs}" for pages in self.world.captured if is_open(pages)]

    def _untrue(self, entry: Entry) -> list[str]:
        record, found = entry.record, []
        machine = self.world.alive.get(record.id)
        saved_memory = (self.root / record.id / STATE).exists()
        if record.status in AWAKE:
            if machine is None or entry.machine is not machine or entry.guest is None:
                return ["has no machine"]
            if machine.ref != record.process:
                found.append(f"process {record.process} and not {machine.ref}")
            if machine.runs != (record.status is Status.RUNNING):
                found.append(f"vCPUs run: {machine.runs}")
            if (record.id in self.world.frozen) != (record.status is Status.PAUSED):
                found.append(f"commands frozen: {record.id in self.world.frozen}")
            if machine.disk.stem != record.layer_id or missing_layers(machine.disk):
                found.append(f"disk {machine.disk}, missing {missing_layers(machine.disk)}")
            if saved_memory:
                found.append("another machine would go on from its old memory")
        elif machine is not None or record.process is not None:
            found.append("has a process")
        if record.status in HALF_WAY:
            found.append("nobody moves it on")
        if record.status is Status.HIBERNATED and not saved_memory:
            found.append("its memory is gone")
        if [path.name for path in (self.root / record.id).glob(".*")]:
            found.append(f"left in its directory: {[path.name for path in (self.root / record.id).glob('.*')]}")
        return found


def settings(data: Path, **changes: Any) -> Settings:
    free = {
        "max_import_mb": 32768,
        "memory_reserve_mb": 0,
        "disk_reserve_mb": 0,
        "memory_overcommit": 100,
        "disk_overcommit": 1000,
    }
    return Settings(data=data, **{**free, **changes})


class Crew:
    """Stands for the server's task group: a task that raises is remembered, where the real one would end the server."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.failed: list[BaseException] = []

    def create_task(self, work: Any, *, name: str | None = None) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failed.append(task.exception())  # type: ignore[arg-type]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(set(self.tasks))
        assert self.failed == [], f"these would have ended the server: {self.failed}"


def assemble(data: Path, database: Database, world: World, crew: Crew, **changes: Any) -> Host:
    chosen = settings(data, **changes)
    root = data / "sandboxes"
    root.mkdir(exist_ok=True)
    clock, engine, store = FakeClock(), FakeEngine(world), SandboxStore(database)
    (data / "layers").mkdir(exist_ok=True)
    network = FakeNetwork(world)
    machines = Machines(engine, root, asyncio.Semaphore(4), Layers(data), network)
    capacity = Capacity(chosen)
    pools = Pools(machines, capacity, launched=chosen.pool_launched, warm=chosen.pool_warm)
    supervisor = Supervisor(store, machines, capacity, clock, crew)  # type: ignore[arg-type]
    groups = machines.groups = Groups(supervisor, network)
    catalog: Any = FakeCatalog(data)
    baker: Any = None
    creator = Creator(chosen, catalog, baker, machines, pools, capacity, supervisor, clock)
    access = Access(supervisor, store, clock)
    lifecycle = LifecycleVerbs(access, supervisor, clock)
    creates = IdempotentCreates(creator, access, IdempotencyStore(database))
    snapshots = SnapshotCatalog(data)
    reconciler = Reconciler(store, machines, capacity, supervisor, snapshots, clock)
    capturer = Capturer(supervisor, machines, catalog)
    room = Room(capacity, pools)
    sleep = SleepVerbs(access, supervisor, machines, capturer, room, clock)
    power = StopVerbs(access, supervisor, machines, catalog, room, clock)
    IdleActions(supervisor, sleep, power)
    taken = Snapshots(access, supervisor, capturer, machines, snapshots, clock)
    restores = Restores(access, supervisor, machines, taken, catalog, room, clock)
    meter_store = MeterStore(database)
    meters = Meters(meter_store, supervisor, machines, snapshots, clock, chosen.usage_keep_days * 86400)
    budgets = Budgets(meter_store, meters, access, supervisor, sleep.pause_entry, clock)
    spending = BudgetVerbs(meter_store, budgets, meters, access, supervisor, clock)
    forks = Forks(access, supervisor, capturer, creator, machines, lifecycle, spending)
    return Host(
        world, root, database, store, clock, capacity, machines, pools, supervisor, creator, access, lifecycle, creates,
        reconciler, snapshots, capturer, sleep, forks, taken, power, restores, meters, budgets, spending, groups,
        network,
    )  # fmt: skip


def refuse_updates(host: Host, monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int = 0) -> dict[str, Any]:
    """The database takes `after` updates more, and then none for as long as `on` is true."""
    state: dict[str, Any] = {"on": True, "times": 0, "after": after}
    update = host.store.update

    async def failing(record: Sandbox, happenings: Any = ()) -> None:
        if state["on"] and state["after"] <= 0:
            state["times"] += 1
            raise error
        state["after"] -= 1
        await update(record, happenings)

    monkeypatch.setattr(host.store, "update", failing)
    return state


FULL = ClocheError("host.disk_full", "the disk of the host is full, the change could not be recorded")
