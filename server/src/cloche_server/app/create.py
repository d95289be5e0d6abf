"""Create: a sandbox from a template, as a list of steps with undo."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cloche_server.app.bake import Baker
from cloche_server.app.capacity import Capacity, refused
from cloche_server.app.entry import Entry, find_named, name_taken
from cloche_server.app.machines import Machines, Slot, Source
from cloche_server.app.pools import Pools
from cloche_server.app.promoted import with_own_shape
from cloche_server.app.sandbox_services import define_all
from cloche_server.app.steps import Step, run_steps, told_as_boot_failure
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.budgets import Account, Budget
from cloche_server.core.errors import ClocheError
from cloche_server.core.expiry import expires_at, lifetime_end
from cloche_server.core.lifecycle import Status
from cloche_server.core.network import NetworkMode, NetworkPolicy, SecretGrant
from cloche_server.core.records import BootMode, ExecDefaults, IdleAction, Resources, Sandbox
from cloche_server.core.services import ServiceSpec
from cloche_server.core.walls import Walls
from cloche_server.host.clock import Clock
from cloche_server.settings import Settings
from cloche_server.storage.locate import not_baked
from cloche_server.storage.templates import TemplateCatalog, TemplateMeta
from cloche_server.store.db import Conflict
from cloche_server.store.sandboxes import IdempotencyKey
from cloche_server.telemetry import log, metrics

_log = log.get("create")

#: So many machines of the pools may turn out to be dead before a create makes its own.
POOLED_TRIES = 4
CLOSE_TIMEOUT = 15.0
#: Boundaries by strength; a caller's minimum is met by itself and everything after it.
BOUNDARIES = ("any", "microvm", "microvm-kvm")


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What a caller asks for, checked for form but not yet against this host."""

    workspace: str
    template: str = "base"
    cpus: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    ttl_seconds: int | None = None
    persistent: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    defaults: ExecDefaults = field(default_factory=ExecDefaults)
    minimum_boundary: str = "any"
    key: IdempotencyKey | None = None
    name: str | None = None
    idle_seconds: int = 0
    idle_action: IdleAction = IdleAction.HIBERNATE
    #: Continue from this instead of the template, which `template` then only names.
    source: Source | None = None
    cold: bool = False
    parent_id: str | None = None
    fork_tree_id: str | None = None
    snapshot_id: str | None = None
    checkpoint_id: str | None = None
    max_lifetime_seconds: int = 0
    #: The end of the sandbox it is forked from.
    ends_at: float | None = None
    #: A budget of its own, or the account of another one that it shares.
    budget: Budget | None = None
    account_id: str | None = None
    #: None: what the operator has chosen.
    network: NetworkPolicy | None = None
    network_group: str | None = None
    grants: tuple[SecretGrant, ...] = ()
    #: Names and definitions, each behind those that it depends on.
    services: tuple[tuple[str, ServiceSpec], ...] = ()
    #: What is taken while nothing is baked under the name of the template.
    stand_in: str | None = None


@dataclass(slots=True)
class _Creation:
    """What the steps of one create have made so far."""

    request: CreateRequest
    meta: TemplateMeta
    resources: Resources
    began: float
    slot: Slot | None = None
    entry: Entry | None = None
    pending_id: str = ""
    use_pools: bool = True
    pooled: bool = False
    ca_pem: str | None = None


class Creator:
    """Creates sandboxes."""

    def __init__(
        self,
        settings: Settings,
        catalog: TemplateCatalog,
        baker: Baker,
        machines: Machines,
        pools: Pools,
        capacity: Capacity,
        supervisor: Supervisor,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._baker = baker
        self._machines = machines
        self._pools = pools
        self._capacity = capacity
        self._supervisor = supervisor
        self._clock = clock
        self._active: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Ends the creates that are under way, and waits until they are undone."""
        for task in self._active:
            task.cancel()
        if self._active:
            await asyncio.wait(set(self._active), timeout=CLOSE_TIMEOUT)

    async def create(self, request: CreateRequest) -> Sandbox:
        """Makes a sandbox that answers. When it raises, or is cancelled, nothing is left.

        Errors: `template.not_found`, `template.corrupt`, `template.bake_failed`, `request.invalid`,
        `isolation.unavailable`, `capacity.unavailable` (nothing was made), `sandbox.boot_failed`, `host.disk_full`.
        """
        began = time.perf_counter()
        task = asyncio.current_task()
        assert task is not None
        self._active.add(task)
        try:
            self._check_boundary(request.minimum_boundary)
            request = with_own_shape(self._catalog, request, self._machines.engine.fingerprint)
            resources_of = self._sizes(request)
            meta = await self._template(request, resources_of)
            resources = self._with_disk(resources_of, request, meta)
            work, took = await self._make(request, meta, resources, began)
        except ClocheError as error:
            metrics.create_failures.labels(error.code).inc()
            raise
        finally:
            self._active.discard(task)
        assert work.entry is not None
        record = work.entry.record
        metrics.creates.labels(record.boot_mode.value).inc()
        metrics.create_seconds.labels(record.boot_mode.value).observe(time.perf_counter() - began)
        _log.info("sandbox.created", sandbox=record.id, mode=record.boot_mode.value, ms=record.boot_ms, steps=took)
        return record

    async def _make(
        self, request: CreateRequest, meta: TemplateMeta, resources: Resources, began: float
    ) -> tuple[_Creation, dict[str, float]]:
        for tries_left in itertools.count(POOLED_TRIES, -1):
            use_pools = tries_left > 0 and request.source is None
            work = _Creation(request, meta, resources, began, use_pools=use_pools)
            try:
                return work, await run_steps("create", self._steps(work))
            except asyncio.CancelledError:
                if work.entry is not None and work.entry.doomed:
                    raise ClocheError(
                        "sandbox.invalid_state",
                        f"the sandbox {work.entry.record.id} was deleted while it was created",
                        details={"status": Status.DELETED.value},
                    ) from None
                raise
            except ClocheError as error:
                if not work.pooled or error.code != "sandbox.boot_failed":
                    raise
                # Its machine may have died in the pool, and nothing is left of this try.
                _log.warning("create.pooled_machine_failed", machine=work.pending_id, error=error.message)
        raise AssertionError("the last try takes nothing from a pool, and so returns or raises")

    # ---------------------------------------------------------------- what is asked for

    def _check_boundary(self, minimum: str) -> None:
        isolation = self._machines.engine.isolation
        have = isolation.boundary + ("-kvm" if isolation.accel == "kvm" else "")
        if BOUNDARIES.index(minimum) > BOUNDARIES.index(have):
            raise ClocheError(
                "isolation.unavailable",
                f"the boundary {minimum} was asked for; this host offers {have} (accel {isolation.accel})",
                details={"minimum_boundary": minimum, "accel": isolation.accel},
            )

    def _sizes(self, request: CreateRequest) -> Resources:
        settings = self._settings
        if request.source is not None:
            shape, disk = request.source.template.shape, request.disk_mb or 0
            if disk > max(settings.max_disk_mb, request.source.disk_mb):
                raise invalid("disk_mb", f"disk_mb is {disk}, this host allows at most {settings.max_disk_mb}")
            return Resources(shape.cpus, shape.memory_mb, disk)
        cpus = settings.default_cpus if request.cpus is None else request.cpus
        memory = settings.default_memory_mb if request.memory_mb is None else request.memory_mb
        for field_name, value, most in (
            ("cpus", cpus, settings.max_cpus),
            ("memory_mb", memory, settings.max_memory_mb),
            ("disk_mb", request.disk_mb or 0, settings.max_disk_mb),
        ):
            if value > most:
                raise invalid(field_name, f"{field_name} is {value}, this host allows at most {most}")
        return Resources(cpus, memory, request.disk_mb or 0)

    def _with_disk(self, resources: Resources, request: CreateRequest, meta: TemplateMeta) -> Resources:
        smallest = meta.template.disk_mb if request.source is None else request.source.disk_mb
        disk = smallest if request.disk_mb is None else request.disk_mb
        if disk < smallest:
            raise invalid("disk_mb", f"disk_mb is {disk}, the template {meta.template.name} needs {smallest}")
        return Resources(resources.cpus, resources.memory_mb, disk)

    async def _template(self, request: CreateRequest, resources: Resources) -> TemplateMeta:
        if request.source is not None:
            return self._catalog.existing(request.source.template.id)
        name, shape = request.template, resources.shape
        family = self._catalog.resolve(name, request.workspace)
        if family is None and request.stand_in is not None:
            family = self._catalog.resolve(request.stand_in, request.workspace)
        if family is None:
            raise await asyncio.to_thread(not_baked, self._settings.recipes, name)
        fingerprint = self._machines.engine.fingerprint
        meta = self._catalog.find(family, shape, fingerprint, request.workspace)
        if meta is None:
            model = self._catalog.newest(family, None, request.workspace)
            assert model is not None, "a family has at least one baked template"
            self.check_room(replace(resources, disk_mb=resources.disk_mb or model.template.disk_mb))
            # A size that nobody has used yet: baked once, kept for all who follow.
            meta = await self._baker.bake_like(model, shape, lambda text: _log.info("bake.progress", text=text))
        if not self._catalog.checked(meta):
            await asyncio.to_thread(self._catalog.check, meta)
        return meta

    def check_room(self, resources: Resources) -> None:
        """Raises `capacity.unavailable` for what would not fit even if the pools gave way."""
        refusal = self._capacity.refusal(resources, self._pools.promised())
        if refusal is not None:
            raise refused(refusal)

    # ---------------------------------------------------------------- the steps

    def _steps(self, work: _Creation) -> list[Step]:
        return [
            Step("reserve", lambda: self._reserve(work), lambda: self._unreserve(work)),
            Step("record", lambda: self._record(work), lambda: self._unrecord(work)),
            Step("launch", lambda: self._launch(work), lambda: self._discard(work), deadline=120),
            Step("restore", lambda: self._restore(work), deadline=200 if work.request.cold else 120),
            Step("grow_disk", lambda: self._grow(work), deadline=60),
            Step("network", lambda: self._plug_in(work), deadline=30),
            Step("renew", lambda: self._renew(work), deadline=60),
            Step("services", lambda: self._define(work), deadline=60),
            Step("start", lambda: self._start(work)),
        ]

    async def _reserve(self, work: _Creation) -> None:
        slot = self._pools.take(work.meta.template) if work.use_pools else None
        if slot is not None:
            work.slot, work.pending_id, work.pooled = slot, slot.id, True
            # Its promise is there; only a larger disk is asked for anew.
            self._capacity.release(slot.id)
            refusal = self._capacity.try_promise(slot.id, work.resources)
            if refusal is None:
                return
            work.slot, work.pending_id = None, ""
            self._capacity.take_over(slot.id, Resources(*_slot_size(slot)))
            self._pools.put_back(slot)
            raise refused(refusal)
        self.check_room(work.resources)
        key = self._machines.new_id()
        refusal = self._capacity.try_promise(key, work.resources)
        while refusal is not None and await self._pools.give_up_one():
            refusal = self._capacity.try_promise(key, work.resources)
        if refusal is not None:
            raise refused(refusal)
        work.pending_id = key

    async def _unreserve(self, work: _Creation) -> None:
        try:
            await self._discard(work)  # a pooled machine was taken here, before the launch step began
        finally:
            if work.pending_id:
                self._capacity.release(work.pending_id)

    async def _record(self, work: _Creation) -> None:
        request, now = work.request, self._clock.now()
        ttl = self._settings.usual_ttl_seconds if request.ttl_seconds is None else request.ttl_seconds
        ends_at = lifetime_end(now, request.max_lifetime_seconds, self._settings.max_lifetime_seconds, request.ends_at)
        account = self._account(request)
        defaults = work.meta.defaults
        record = Sandbox(
            id=work.pending_id,
            workspace=request.workspace,
            status=Status.CREATING,
            template=request.template,
            template_name=work.meta.template.name,
            template_id=work.meta.template.id,
            resources=work.resources,
            isolation=self._machines.engine.isolation,
            defaults=ExecDefaults(
                env={**defaults.env, **request.defaults.env},
                cwd=request.defaults.cwd or defaults.cwd,
                user=request.defaults.user or defaults.user,
            ),
            metadata=dict(request.metadata),
            created_at=now,
            name=request.name,
            ttl_seconds=ttl,
            persistent=request.persistent,
            expires_at=expires_at(now, ttl, request.persistent, ends_at),
            max_lifetime_seconds=request.max_lifetime_seconds,
            ends_at=ends_at,
            walls=Walls(since=now),
            account_id=account.id if account is not None else request.account_id,
            layer_id=work.pending_id,
            cold=request.cold,
            parent_id=request.parent_id,
            fork_tree_id=request.fork_tree_id,
            snapshot_id=request.snapshot_id,
            checkpoint_id=request.checkpoint_id or request.snapshot_id,
            idle_seconds=request.idle_seconds,
            idle_action=request.idle_action,
            network=request.network or NetworkPolicy(NetworkMode(self._settings.network_default)),
            grants=request.grants,
            **self._machines.place(request.workspace, request.network_group, work.pending_id),
        )
        try:
            work.entry = await self._supervisor.admit(record, request.key, account)
        except Conflict:
            entries, name = self._supervisor.entries(), request.name
            if name is not None and (other := find_named(entries, request.workspace, name)):
                raise name_taken(name, other.record.id, fork=request.parent_id is not None) from None
            raise ClocheError(
                "request.idempotency_conflict", "this Idempotency-Key is in use by another request"
            ) from None
        work.entry.creating = asyncio.current_task()

    def _account(self, request: CreateRequest) -> Account | None:
        return None if request.budget is None else Account(self._machines.new_id(), request.workspace, request.budget)

    async def _unrecord(self, work: _Creation) -> None:
        if work.pending_id:
            await self._supervisor.withdraw(work.pending_id)
            if work.entry is not None:
                self._machines.left(work.entry.record)

    async def _launch(self, work: _Creation) -> None:
        if work.slot is None:
            source = work.request.source
            mode = source.mode if source is not None else BootMode.SNAPSHOT
            work.slot = await self._machines.launch(work.meta.template, work.pending_id, mode, source)

    async def _discard(self, work: _Creation) -> None:
        if work.slot is not None:
            await self._machines.discard(work.slot)
            work.slot = None

    async def _restore(self, work: _Creation) -> None:
        assert work.slot is not None
        if not work.slot.restored:
            with told_as_boot_failure():
                await self._machines.restore(work.slot)

    async def _grow(self, work: _Creation) -> None:
        assert work.slot is not None
        with told_as_boot_failure():
            await self._machines.grow_disk(work.slot, work.resources.disk_mb)

    async def _plug_in(self, work: _Creation) -> None:
        assert work.entry is not None
        work.ca_pem = await self._machines.plug_in(work.entry.record)

    async def _renew(self, work: _Creation) -> None:
        assert work.slot is not None
        with told_as_boot_failure():
            if work.slot.renewed:
                await self._machines.greet(work.slot, work.ca_pem)
            else:
                thaw = work.request.source is not None
                await self._machines.renew(work.slot, thaw=thaw, ca_pem=work.ca_pem)

    async def _define(self, work: _Creation) -> None:
        assert work.slot is not None
        assert work.entry is not None
        with told_as_boot_failure():
            await define_all(work.entry, work.slot.guest, work.request.services)

    async def _start(self, work: _Creation) -> None:
        assert work.slot is not None
        assert work.entry is not None
        slot = work.slot
        await self._supervisor.start(
            work.entry,
            slot.machine,
            slot.guest,
            process=slot.machine.ref,
            cpu_origin=reading.cpu_seconds if (reading := slot.machine.measure()) is not None else 0.0,
            boot_mode=slot.mode,
            started_at=self._clock.now(),
            boot_ms=max(1, round((time.perf_counter() - work.began) * 1000)),
        )


def _slot_size(slot: Slot) -> tuple[int, int, int]:
    return slot.template.shape.cpus, slot.template.shape.memory_mb, slot.disk_mb


def invalid(field_name: str, message: str) -> ClocheError:
    return ClocheError("request.invalid", message, details={"field": field_name})
