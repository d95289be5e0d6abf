"""The composition root: builds everything, runs it, stops it in reverse. Knows every concrete class."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator, Mapping

import uvicorn
import uvloop

from cloche_server import __version__
from cloche_server.api.app import build_app
from cloche_server.api.protocol import Sharing, handing_over
from cloche_server.app.access import Access
from cloche_server.app.archive_import import Importer
from cloche_server.app.bake import Baker
from cloche_server.app.budget import Budgets
from cloche_server.app.budget_verbs import BudgetVerbs
from cloche_server.app.capacity import Capacity
from cloche_server.app.capturing import Capturer
from cloche_server.app.console import Consoles
from cloche_server.app.create import Creator
from cloche_server.app.dialing import SandboxDialer
from cloche_server.app.entry import Entry
from cloche_server.app.events import Events
from cloche_server.app.exec import Execs
from cloche_server.app.export import Exporter
from cloche_server.app.files import Files
from cloche_server.app.fork import Forks
from cloche_server.app.idempotency import IdempotentCreates
from cloche_server.app.idle import IdleActions
from cloche_server.app.journal import Journal
from cloche_server.app.lifecycle import LifecycleVerbs
from cloche_server.app.machines import Machines
from cloche_server.app.meter import Meters
from cloche_server.app.names import NamedCreates
from cloche_server.app.pools import Pools
from cloche_server.app.ports import Ports
from cloche_server.app.promote_template import Promoter
from cloche_server.app.reconcile import Reconciler, Report
from cloche_server.app.restore import Restores
from cloche_server.app.room import Room
from cloche_server.app.services import Services
from cloche_server.app.sleep import SleepVerbs
from cloche_server.app.snapshots import Snapshots
from cloche_server.app.stop import StopVerbs
from cloche_server.app.supervisor import Supervisor
from cloche_server.app.template_keeper import TemplateKeeper
from cloche_server.app.templates import Templates
from cloche_server.app.tend import tend
from cloche_server.app.tokens import Tokens
from cloche_server.app.upkeep import Upkeep
from cloche_server.app.webhooks import Webhooks
from cloche_server.core.previews import PortAccess, PreviewBase
from cloche_server.core.records import Shape
from cloche_server.engine.qemu.driver import QemuEngine
from cloche_server.gateway.gateway import Gateway
from cloche_server.gateway.routes import is_ours
from cloche_server.gateway.tls import Certificate
from cloche_server.host.clock import SystemClock
from cloche_server.host.instance import Instance
from cloche_server.host.outbound import Sender
from cloche_server.settings import Settings
from cloche_server.storage.layers import Layers
from cloche_server.storage.snapshots import SnapshotCatalog
from cloche_server.storage.templates import TemplateCatalog
from cloche_server.store.db import Database
from cloche_server.store.meters import MeterStore
from cloche_server.store.ports import PortStore
from cloche_server.store.sandboxes import SandboxStore
from cloche_server.store.tokens import IdempotencyStore, TokenStore
from cloche_server.store.webhooks import WebhookStore
from cloche_server.telemetry import log
from cloche_server.wiring import (
    build_engine,
    build_gateway,
    listen,
    open_database,
    prepare_data,
    preview_base,
    preview_key,
    preview_listener,
)

_log = log.get("main")


class Main:
    """The whole server in one object, so that tests can run it in their own process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.address: tuple[str, int] | None = None
        self.started = asyncio.Event()
        self.services: Services | None = None
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Asks the server to end. Sandboxes run on."""
        self._stop.set()
        if self.services is not None:
            self.services.stopping.set()

    async def run(self) -> None:
        """Runs until `stop`. Raises `ClocheError` with a sentence when it cannot start."""
        settings = self.settings
        await asyncio.to_thread(prepare_data, settings.data)
        with Instance(settings.data) as instance:
            listener = listen(settings.host, settings.port, "--port")
            previews = None
            try:
                previews = preview_listener(settings)
                self.address = listener.getsockname()[:2]
                instance.announce(*self.address)
                async with open_database(settings.data) as database:
                    await self._serve(database, instance, listener, previews)
            finally:
                listener.close()
                if previews is not None:
                    previews.close()

    async def _serve(
        self, database: Database, instance: Instance, listener: socket.socket, previews: socket.socket | None
    ) -> None:
        engine, reason = await build_engine(self.settings)
        _log.info("server.starting", version=__version__, accel=engine.isolation.accel, why=reason)
        base = preview_base(self.settings, previews)
        key = await asyncio.to_thread(preview_key, self.settings.data)
        async with asyncio.TaskGroup() as group:
            parts = _Parts(self.settings, database, engine, group, key, base)
            self.services = parts.services
            report = await parts.take_over(same_boot=instance.same_boot)
            _log.info("server.reconciled", **{k: getattr(report, k) for k in report.__slots__})
            await parts.services.webhooks.start()
            background = [
                group.create_task(parts.pools.run(), name="pools"),
                group.create_task(tend(parts.supervisor, parts.machines), name="tend"),
                group.create_task(parts.upkeep.run(), name="upkeep"),
                group.create_task(parts.meters.run(), name="meters"),
                group.create_task(parts.budgets.run(), name="budgets"),
            ]
            gateway = build_gateway(self.settings, parts.services, parts.dialer, base)
            previewing = group.create_task(self._preview(gateway, previews), name="previews")
            parts.services.ready.set()
            server = _http_server(self.settings, parts.services, gateway)
            serving = group.create_task(server.serve(sockets=[listener]), name="http")
            assert self.address is not None
            _log.info(
                "server.ready",
                url=f"http://{self.address[0]}:{self.address[1]}",
                data=str(self.settings.data),
                previews=base.host_url("<id>", 0).replace("0-", "<port>-", 1) if base else "off",
            )
            self.started.set()
            await self._stop.wait()
            _log.info("server.stopping")
            server.should_exit = True
            gateway.stop()
            await serving
            await previewing
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await parts.pools.drain()
            await parts.close()
        _log.info("server.stopped")

    async def _preview(self, gateway: Gateway, listener: socket.socket | None) -> None:
        """Serves previews until the gateway is stopped."""
        cert, key = self.settings.preview_cert, self.settings.preview_key
        if cert is None or key is None:
            await gateway.run(listener, None, self.settings.shutdown_grace)
            return
        certificate = await asyncio.to_thread(Certificate, cert, key, gateway.protocols)
        watching = asyncio.ensure_future(certificate.watch())
        try:
            await gateway.run(listener, certificate.context, self.settings.shutdown_grace)
        finally:
            watching.cancel()


def _http_server(settings: Settings, services: Services, gateway: Gateway) -> _Server:
    return _Server(
        uvicorn.Config(
            build_app(services),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(settings.shutdown_grace)),
            timeout_keep_alive=75,
            http=handing_over(Sharing(is_ours, gateway.adopt)),
            ws="none",
            server_header=False,
        )
    )


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers: `serve` below has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Parts:
    """Everything that lives while the server runs, wired once."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        engine: QemuEngine,
        group: asyncio.TaskGroup,
        preview_key: bytes,
        preview_base: PreviewBase | None,
    ) -> None:
        clock = SystemClock()
        store = SandboxStore(database)
        self.catalog = TemplateCatalog(settings.data)
        self._group = group
        gate = asyncio.Semaphore(settings.parallel_boots)
        machines = Machines(engine, settings.data / "sandboxes", gate, Layers(settings.data))
        snapshots = SnapshotCatalog(settings.data)
        self.machines = machines
        capacity = Capacity(settings)
        self.pools = Pools(machines, capacity, launched=settings.pool_launched, warm=settings.pool_warm)
        self.supervisor = Supervisor(store, machines, capacity, clock, group)
        baker = Baker(settings.data, engine, self.catalog, clock)
        access = Access(self.supervisor, store, clock)
        lifecycle = LifecycleVerbs(access, self.supervisor, clock)
        idempotency = IdempotencyStore(database)
        creator = Creator(settings, self.catalog, baker, machines, self.pools, capacity, self.supervisor, clock)
        self.reconciler = Reconciler(store, machines, capacity, self.supervisor, snapshots, clock)
        capturer = Capturer(self.supervisor, machines, self.catalog)
        room = Room(capacity, self.pools)
        sleep = SleepVerbs(access, self.supervisor, machines, capturer, room, clock)
        meters, keep = MeterStore(database), settings.usage_keep_days * 86400
        self.meters = Meters(meters, self.supervisor, machines, snapshots, clock, keep)
        budgets = self._mind_budgets(meters, access, sleep, clock)
        shape = Shape(settings.default_cpus, settings.default_memory_mb)
        taken = Snapshots(access, self.supervisor, capturer, machines, snapshots, clock)
        power = StopVerbs(access, self.supervisor, machines, self.catalog, room, clock)
        IdleActions(self.supervisor, sleep, power)
        keeper = TemplateKeeper(self.catalog, snapshots, store, self.pools)
        journal = self.supervisor.journal
        self.dialer = SandboxDialer(access, self.supervisor, clock, settings.preview_connections)
        usual = PortAccess(settings.preview_access)
        ports = Ports(access, PortStore(database), clock, preview_key, usual, preview_base)
        self.upkeep = Upkeep(
            settings, self.catalog, self.pools, engine.fingerprint, shape, store, idempotency, journal, clock, keeper
        )
        self.services = Services(
            settings=settings,
            clock=clock,
            isolation=engine.isolation,
            access=access,
            creator=creator,
            creates=NamedCreates(IdempotentCreates(creator, access, idempotency), access, lifecycle),
            lifecycle=lifecycle,
            sleep=sleep,
            power=power,
            forks=Forks(access, self.supervisor, capturer, creator, machines, lifecycle, budgets),
            snapshots=taken,
            restores=Restores(access, self.supervisor, machines, taken, self.catalog, room, clock),
            promoter=Promoter(settings, machines, self.catalog, snapshots, clock),
            exporter=Exporter(machines, self.catalog, snapshots),
            importer=Importer(settings, machines, self.catalog, snapshots, clock),
            execs=Execs(access),
            files=Files(access),
            consoles=Consoles(access, settings.data / "sandboxes"),
            templates=Templates(self.catalog, keeper),
            tokens=Tokens(TokenStore(database), clock),
            events=Events(access, self.supervisor),
            webhooks=_webhooks(settings, WebhookStore(database), journal, group),
            meters=self.meters,
            budgets=budgets,
            ports=ports,
        )
        self.services.forks.on_children = ports.inherit
        self.upkeep.chores.append(ports.prune)

    def _mind_budgets(self, store: MeterStore, access: Access, sleep: SleepVerbs, clock: SystemClock) -> BudgetVerbs:
        self.budgets = Budgets(store, self.meters, access, self.supervisor, sleep.pause_entry, clock)
        self.budgets.on_event = self._told
        return BudgetVerbs(store, self.budgets, self.meters, access, self.supervisor, clock)

    def _told(self, entry: Entry, kind: str, payload: Mapping[str, object]) -> None:
        record = entry.record
        self._group.create_task(self.supervisor.journal.tell(kind, record.workspace, record.id, payload))

    async def take_over(self, *, same_boot: bool) -> Report:
        """What an earlier server has left: its sandboxes, their meters and their budgets."""
        await self.meters.load()
        await self.budgets.load()
        await self.services.ports.load()
        report = await self.reconciler.run(same_boot=same_boot)
        await self.budgets.settle(await self.meters.settle())
        return report

    async def close(self) -> None:
        """Undoes creates under way, lets go of every sandbox and ends their tasks."""
        await self.services.webhooks.close()
        await self.services.creator.close()
        await self.meters.close()
        await self.supervisor.close()
        await self.supervisor.journal.catch_up()


def _webhooks(settings: Settings, store: WebhookStore, journal: Journal, group: asyncio.TaskGroup) -> Webhooks:
    private = settings.webhook_private
    return Webhooks(store, journal, SystemClock(), group, lambda: Sender(private=private), private=private)


def serve(settings: Settings) -> None:
    """Runs the server in this process until SIGTERM or SIGINT."""

    async def run() -> None:
        main = Main(settings)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, main.stop)
        await main.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
