"""All parts of a running server, built and joined. Knows every concrete class."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from cloche_server.app.access import Access
from cloche_server.app.archive_import import Importer
from cloche_server.app.audit import Audit
from cloche_server.app.bake import Baker
from cloche_server.app.broker import Broker
from cloche_server.app.budget import Budgets
from cloche_server.app.budget_verbs import BudgetVerbs
from cloche_server.app.capacity import Capacity
from cloche_server.app.capturing import Capturer
from cloche_server.app.code import Codes
from cloche_server.app.create import Creator
from cloche_server.app.dialing import SandboxDialer
from cloche_server.app.entry import Entry
from cloche_server.app.events import Events
from cloche_server.app.exec import Execs
from cloche_server.app.export import Exporter
from cloche_server.app.filelinks import FileLinks
from cloche_server.app.files import Files
from cloche_server.app.filetools import FileTools
from cloche_server.app.fork import Forks
from cloche_server.app.git import Git
from cloche_server.app.groups import Groups
from cloche_server.app.idempotency import IdempotentCreates
from cloche_server.app.idle import IdleActions
from cloche_server.app.journal import Journal
from cloche_server.app.lifecycle import LifecycleVerbs
from cloche_server.app.logs import Logs
from cloche_server.app.machines import Machines
from cloche_server.app.meter import Meters
from cloche_server.app.names import NamedCreates
from cloche_server.app.network import NetworkVerbs
from cloche_server.app.pools import Pools
from cloche_server.app.ports import Ports
from cloche_server.app.processes import Processes
from cloche_server.app.promote_template import Promoter
from cloche_server.app.reconcile import Reconciler, Report
from cloche_server.app.restore import Restores
from cloche_server.app.room import Room
from cloche_server.app.run_jobs import RunJobs
from cloche_server.app.runs import Runs
from cloche_server.app.sandbox_services import SandboxServices
from cloche_server.app.secrets import Secrets
from cloche_server.app.selftest import SelfTests
from cloche_server.app.service_events import ServiceEvents
from cloche_server.app.services import Services
from cloche_server.app.shortcuts import Shortcuts
from cloche_server.app.sleep import SleepVerbs
from cloche_server.app.snapshots import Snapshots
from cloche_server.app.sshkeys import SshKeys
from cloche_server.app.stop import StopVerbs
from cloche_server.app.supervisor import Supervisor
from cloche_server.app.template_keeper import TemplateKeeper
from cloche_server.app.templates import Templates
from cloche_server.app.terminal import Terminals
from cloche_server.app.tokens import Tokens
from cloche_server.app.upkeep import Upkeep
from cloche_server.app.violations import Violations
from cloche_server.app.webhooks import Webhooks
from cloche_server.core.ports import Network
from cloche_server.core.previews import PortAccess, PreviewBase
from cloche_server.core.records import Sandbox, Shape
from cloche_server.engine.qemu.driver import QemuEngine
from cloche_server.host.append import AppendLog
from cloche_server.host.clock import SystemClock
from cloche_server.host.machine import cpu_count
from cloche_server.host.outbound import Sender
from cloche_server.network.networks import Networks
from cloche_server.network.reach import SlotReach
from cloche_server.settings import Settings
from cloche_server.storage.layers import Layers
from cloche_server.storage.snapshots import SnapshotCatalog
from cloche_server.storage.templates import TemplateCatalog
from cloche_server.store.db import Database
from cloche_server.store.meters import MeterStore
from cloche_server.store.ports import PortStore
from cloche_server.store.runs import RunStore
from cloche_server.store.sandboxes import SandboxStore
from cloche_server.store.secrets import SecretStore
from cloche_server.store.sshkeys import SshKeyStore
from cloche_server.store.tokens import IdempotencyStore, TokenStore
from cloche_server.store.webhooks import WebhookStore

#: Files that the audit log is kept in; the oldest goes when the newest is full.
AUDIT_PARTS: Final = 4


class Parts:
    """Everything that lives while the server runs, wired once."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        engine: QemuEngine,
        network: Network,
        group: asyncio.TaskGroup,
        preview_key: bytes,
        preview_base: PreviewBase | None,
    ) -> None:
        self._preview = preview_key, preview_base
        self._settings = settings
        self._group = group
        self._clock = SystemClock()
        self._engine = engine
        self._machinery(database, network)
        self._verbs(database)
        self.services = self._services(database)
        self.services.forks.on_children = self.ports.inherit
        self.service_events = ServiceEvents(self.supervisor, self._clock, group, self._inherits_services)
        self.services.units.on_defined = self.service_events.attend
        self.upkeep.chores += [self.ports.prune, self.services.run_jobs.prune, self.services.ssh_keys.prune]

    def _machinery(self, database: Database, network: Network) -> None:
        settings, clock, engine = self._settings, self._clock, self._engine
        self.store = SandboxStore(database)
        self.catalog = TemplateCatalog(settings.data)
        self.snapshots = SnapshotCatalog(settings.data)
        gate = asyncio.Semaphore(settings.parallel_boots)
        self.machines = Machines(engine, settings.data / "sandboxes", gate, Layers(settings.data), network)
        self.capacity = Capacity(settings)
        self.pools = Pools(
            self.machines,
            self.capacity,
            launched=settings.pool_launched,
            warm=settings.pool_warm,
            practise_after=settings.pool_practice_seconds,
        )
        self.supervisor = Supervisor(self.store, self.machines, self.capacity, clock, self._group)
        access = self.access = Access(self.supervisor, self.store, clock)
        self.pools.last_use = lambda: access.used_at
        self.reconciler = Reconciler(self.store, self.machines, self.capacity, self.supervisor, self.snapshots, clock)
        baker = Baker(settings.data, engine, self.catalog, clock, network)
        self.creator = Creator(
            settings, self.catalog, baker, self.machines, self.pools, self.capacity, self.supervisor, clock
        )

    def _verbs(self, database: Database) -> None:
        settings, clock, access, supervisor = self._settings, self._clock, self.access, self.supervisor
        self.lifecycle = LifecycleVerbs(access, supervisor, clock)
        self.capturer = Capturer(supervisor, self.machines, self.catalog)
        self.room = Room(self.capacity, self.pools)
        self.sleep = SleepVerbs(access, supervisor, self.machines, self.capturer, self.room, clock)
        self.power = StopVerbs(access, supervisor, self.machines, self.catalog, self.room, clock)
        IdleActions(supervisor, self.sleep, self.power)
        self.taken = Snapshots(access, supervisor, self.capturer, self.machines, self.snapshots, clock)
        meters = MeterStore(database)
        keep = settings.usage_keep_days * 86400
        self.meters = Meters(meters, supervisor, self.machines, self.snapshots, clock, keep)
        self.budgets = Budgets(meters, self.meters, access, supervisor, self.sleep.pause_entry, clock)
        self.budgets.on_event = self._told
        self.spending = BudgetVerbs(meters, self.budgets, self.meters, access, supervisor, clock)
        self.keeper = TemplateKeeper(self.catalog, self.snapshots, self.store, self.pools)
        self.dialer = SandboxDialer(
            access, supervisor, clock, settings.preview_connections, settings.preview_workspace_connections
        )
        if isinstance(network := self.machines.network, Networks):
            self.dialer.shortcut = Shortcuts(SlotReach(network.slots), supervisor, clock).dial
        usual = PortAccess(settings.preview_access)
        self.ports = Ports(access, PortStore(database), clock, self._preview[0], usual, self._preview[1])
        self.idempotency = IdempotencyStore(database)
        self.groups = self.machines.groups = Groups(supervisor, self.machines.network)
        key_file, journal = settings.secret_key_file, supervisor.journal
        self.secrets = Secrets(SecretStore(database), settings.data, key_file, clock, journal)
        self.violations = Violations(self.machines.network, journal)
        self.broker = self.machines.broker = Broker(self.secrets, supervisor, self.machines.network)
        self.upkeep = Upkeep(
            settings,
            self.catalog,
            self.pools,
            self._engine.fingerprint,
            Shape(settings.default_cpus, settings.default_memory_mb),
            self.store,
            self.idempotency,
            supervisor.journal,
            clock,
            self.keeper,
        )

    def _services(self, database: Database) -> Services:
        settings, clock, access, supervisor = self._settings, self._clock, self.access, self.supervisor
        machines, catalog, snapshots, creator = self.machines, self.catalog, self.snapshots, self.creator
        tool = self._engine.disk_tool(settings.data)
        execs, files = Execs(access), Files(access)
        runs = Runs(settings, catalog, creator, execs, files, self.lifecycle, cpu_count())
        processes, units = Processes(access), SandboxServices(access)
        tokens = Tokens(TokenStore(database), clock)
        return Services(
            settings=settings,
            clock=clock,
            isolation=self._engine.isolation,
            access=access,
            creator=creator,
            creates=NamedCreates(IdempotentCreates(creator, access, self.idempotency), access, self.lifecycle),
            lifecycle=self.lifecycle,
            sleep=self.sleep,
            power=self.power,
            forks=Forks(access, supervisor, self.capturer, creator, machines, self.lifecycle, self.spending),
            snapshots=self.taken,
            restores=Restores(access, supervisor, machines, self.taken, catalog, self.room, clock),
            promoter=Promoter(settings, machines, catalog, snapshots, clock, tool),
            exporter=Exporter(machines, catalog, snapshots),
            importer=Importer(settings, machines, catalog, snapshots, clock, tool),
            execs=execs,
            files=files,
            runs=runs,
            run_jobs=RunJobs(
                runs,
                RunStore(database),
                Sender(private=settings.webhook_private),
                clock,
                self._group,
                settings.run_keep_hours,
            ),
            processes=processes,
            terminals=Terminals(processes),
            file_tools=FileTools(access),
            file_links=FileLinks(access, clock, self._preview[0]),
            git=Git(access, execs),
            codes=Codes(access),
            units=units,
            logs=Logs(access, settings.data / "sandboxes", processes, units),
            templates=Templates(catalog, self.keeper),
            tokens=tokens,
            ssh_keys=SshKeys(SshKeyStore(database), access, tokens, clock),
            events=Events(access, supervisor),
            webhooks=_webhooks(settings, WebhookStore(database), supervisor.journal, self._group),
            meters=self.meters,
            budgets=self.spending,
            audit=_audit(settings),
            ports=self.ports,
            secrets=self.secrets,
            network=NetworkVerbs(access, supervisor, machines.network, self.broker, self.groups),
            selftests=SelfTests(access, machines, catalog),
        )

    def _inherits_services(self, record: Sandbox) -> bool:
        """Of a new sandbox: what it was made from may have had some. What was baked by a recipe has none."""
        meta = self.catalog.get(record.template_id)
        return bool(record.parent_id or record.snapshot_id or meta is None or meta.template.thaw)

    def _told(self, entry: Entry, kind: str, payload: Mapping[str, object]) -> None:
        record = entry.record
        self._group.create_task(self.supervisor.journal.tell(kind, record.workspace, record.id, payload))

    async def take_over(self, *, same_boot: bool) -> Report:
        """What an earlier server has left: its sandboxes, their meters and their budgets."""
        await self.secrets.start()
        await self.services.ports.load()
        await self.meters.load()
        await self.budgets.load()
        report = await self.reconciler.run(same_boot=same_boot)
        await self.groups.tell_all()
        await self.budgets.settle(await self.meters.settle())
        await self.services.run_jobs.start()
        self.service_events.take_over()
        return report

    async def close(self) -> None:
        """Undoes creates under way, lets go of every sandbox and ends their tasks."""
        await self.services.webhooks.close()
        await self.services.run_jobs.close()
        await self.services.creator.close()
        await self.services.runs.close()
        await self.service_events.close()
        await self.meters.close()
        await self.supervisor.close()
        await self.supervisor.journal.catch_up()
        if self.services.audit is not None:
            await self.services.audit.close()


def _audit(settings: Settings) -> Audit | None:
    if not settings.audit_max_mb:
        return None
    return Audit(
        AppendLog(settings.data / "audit.log", settings.audit_max_mb * 1024 * 1024 // AUDIT_PARTS, AUDIT_PARTS)
    )


def _webhooks(settings: Settings, store: WebhookStore, journal: Journal, group: asyncio.TaskGroup) -> Webhooks:
    private = settings.webhook_private
    return Webhooks(store, journal, SystemClock(), group, lambda: Sender(private=private), private=private)
