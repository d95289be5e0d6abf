"""The use cases over a host in memory and a real database."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloche_server.app.access import Access
from cloche_server.app.capacity import Capacity
from cloche_server.app.create import CreateRequest, Creator
from cloche_server.app.idempotency import IdempotentCreates
from cloche_server.app.lifecycle import LifecycleVerbs
from cloche_server.app.machines import Machines
from cloche_server.app.pools import Pools
from cloche_server.app.reconcile import Reconciler
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.ports import BootFiles
from cloche_server.core.records import ExecDefaults, Sandbox
from cloche_server.settings import Settings
from cloche_server.storage.layers import Layers
from cloche_server.storage.snapshots import SnapshotCatalog
from cloche_server.storage.templates import TemplateMeta
from cloche_server.store.db import Database
from cloche_server.store.sandboxes import SandboxStore
from cloche_server.store.tokens import IdempotencyStore
from kit.fake_engine import FakeClock, FakeEngine, World, template


class FakeCatalog:
    """One baked template, `base`."""

    def __init__(self, root: Path) -> None:
        self.meta = TemplateMeta(
            template(root), (), "", ExecDefaults(), BootFiles(root, root, root), "fake", "inputs", {}, {}
        )

    def resolve(self, name: str) -> str | None:
        return "base" if name == "base" else None

    def find(self, *_: object) -> TemplateMeta:
        return self.meta

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


def settings(data: Path, **changes: Any) -> Settings:
    free = {"memory_reserve_mb": 0, "disk_reserve_mb": 0, "memory_overcommit": 100, "disk_overcommit": 1000}
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
    machines = Machines(engine, root, asyncio.Semaphore(4), Layers(data))
    capacity = Capacity(chosen)
    pools = Pools(machines, capacity, launched=chosen.pool_launched, warm=chosen.pool_warm)
    supervisor = Supervisor(store, machines, capacity, clock, crew)  # type: ignore[arg-type]
    catalog: Any = FakeCatalog(data)
    baker: Any = None
    creator = Creator(chosen, catalog, baker, machines, pools, capacity, supervisor, clock)
    access = Access(supervisor, store, clock)
    lifecycle = LifecycleVerbs(access, supervisor, clock)
    creates = IdempotentCreates(creator, access, IdempotencyStore(database))
    reconciler = Reconciler(store, machines, capacity, supervisor, SnapshotCatalog(data), clock)
    return Host(
        world, root, database, store, clock, capacity, machines, pools, supervisor, creator, access, lifecycle, creates,
        reconciler,
    )  # fmt: skip
