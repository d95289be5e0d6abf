"""The composition root: builds everything (`parts.py`), runs it, stops it in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import uvicorn
import uvloop

from cloche_server import __version__
from cloche_server.api.app import build_app
from cloche_server.api.protocol import Sharing, handing_over, protocol_for
from cloche_server.app.netprobes import NetworkProbes
from cloche_server.app.services import Services
from cloche_server.app.tend import tend
from cloche_server.core.previews import PreviewBase
from cloche_server.engine.qemu.driver import QemuEngine
from cloche_server.gateway.gateway import Gateway
from cloche_server.gateway.routes import is_ours
from cloche_server.host.instance import Instance
from cloche_server.parts import Parts
from cloche_server.settings import Settings
from cloche_server.store.db import Database
from cloche_server.telemetry import log
from cloche_server.wiring import (
    HostNetwork,
    build_engine,
    build_gateway,
    build_ssh,
    door_listener,
    listen,
    open_database,
    prepare_data,
    preview_base,
    preview_key,
    preview_listener,
    ssh_listener,
)
from cloche_server.wiring_tls import preview_tls

_log = log.get("main")

#: One message of a terminal (bytes). Pings keep what is silent open; who answers none for so long is gone (seconds).
SOCKET_MESSAGE_MAX = 1024 * 1024
SOCKET_PING_SECONDS = 20.0
SOCKET_PONG_SECONDS = 120.0
#: Files that the audit log is kept in; the oldest goes when the newest is full.
AUDIT_PARTS = 4


@dataclass(frozen=True, slots=True)
class _Sockets:
    """What is listened on."""

    api: socket.socket
    previews: socket.socket | None
    ssh: socket.socket | None
    door: socket.socket | None


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
            previews = ssh = door = None
            try:
                previews = preview_listener(settings)
                ssh = ssh_listener(settings)
                door = door_listener(settings)
                self.address = listener.getsockname()[:2]
                instance.announce(*self.address)
                async with open_database(settings.data) as database:
                    await self._serve(database, instance, _Sockets(listener, previews, ssh, door))
            finally:
                for one in (listener, previews, ssh, door):
                    if one is not None:
                        one.close()

    async def _serve(self, database: Database, instance: Instance, sockets: _Sockets) -> None:
        engine, reason = await build_engine(self.settings)
        _log.info("server.starting", version=__version__, accel=engine.isolation.accel, why=reason)
        with contextlib.closing(engine):
            await self._run(database, instance, sockets, engine)

    async def _run(self, database: Database, instance: Instance, sockets: _Sockets, engine: QemuEngine) -> None:
        network = await asyncio.to_thread(HostNetwork, self.settings)
        base = preview_base(self.settings, sockets.previews)
        key = await asyncio.to_thread(preview_key, self.settings.data)
        async with asyncio.TaskGroup() as group:
            parts = Parts(self.settings, database, engine, network.network, group, key, base)
            self.services = parts.services
            probes = NetworkProbes(network.network, sockets.api.getsockname()[1])
            parts.services.selftests.probers.append(probes.probe)
            await network.start()
            report = await parts.take_over(same_boot=instance.same_boot)
            _log.info("server.reconciled", **{k: getattr(report, k) for k in report.__slots__})
            await parts.services.webhooks.start()
            background = [
                group.create_task(parts.pools.run(), name="pools"),
                group.create_task(tend(parts.supervisor, parts.machines), name="tend"),
                group.create_task(parts.upkeep.run(), name="upkeep"),
                group.create_task(parts.meters.run(), name="meters"),
                group.create_task(parts.budgets.run(), name="budgets"),
                group.create_task(parts.groups.run(), name="groups"),
                *network.background(group),
                *([group.create_task(parts.violations.run(), name="violations")] if network.network.enabled else []),
                group.create_task(parts.services.tokens.watch(), name="tokens"),
            ]
            if (audit := parts.services.audit) is not None:
                await audit.open()
                background.append(group.create_task(audit.run(), name="audit"))
            gateway = build_gateway(self.settings, parts.services, parts.dialer, base)
            previewing = group.create_task(self._preview(gateway, sockets, parts.services, base), name="previews")
            close_ssh = await self._open_ssh(group, parts, sockets.ssh)
            parts.services.ready.set()
            server = _http_server(self.settings, parts.services, gateway)
            serving = group.create_task(server.serve(sockets=[sockets.api]), name="http")
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
            await asyncio.gather(serving, previewing, close_ssh())
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await parts.pools.drain()
            await parts.close()
            await network.close()
        _log.info("server.stopped")

    async def _open_ssh(
        self, group: asyncio.TaskGroup, parts: Parts, listener: socket.socket | None
    ) -> Callable[[], Awaitable[None]]:
        """Serves SSH, where that is switched on, until what this returns is called."""

        async def nothing() -> None:
            return

        if listener is None:
            return nothing
        ssh = await asyncio.to_thread(build_ssh, self.settings, parts.services, parts.dialer)
        parts.services.ssh = ssh.address(listener.getsockname()[1])
        serving = group.create_task(ssh.run(listener, self.settings.shutdown_grace), name="ssh")

        async def close() -> None:
            ssh.stop()
            await serving

        return close

    async def _preview(self, gateway: Gateway, sockets: _Sockets, services: Services, base: PreviewBase | None) -> None:
        """Serves previews until the gateway is stopped."""
        async with preview_tls(self.settings, gateway, services.ports, base, services.clock) as tls:
            await gateway.run(sockets.previews, tls, self.settings.shutdown_grace, sockets.door)


def _http_server(settings: Settings, services: Services, gateway: Gateway) -> _Server:
    return _Server(
        uvicorn.Config(
            build_app(services),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(settings.shutdown_grace)),
            timeout_keep_alive=75,
            http=handing_over(Sharing(is_ours, gateway.adopt), protocol_for(settings)),
            ws="wsproto",
            ws_per_message_deflate=False,
            ws_max_size=SOCKET_MESSAGE_MAX,
            ws_ping_interval=SOCKET_PING_SECONDS,
            ws_ping_timeout=SOCKET_PONG_SECONDS,
            server_header=False,
        )
    )


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers: `serve` below has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
