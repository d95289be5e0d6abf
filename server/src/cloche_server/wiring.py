"""Parts that the server and the operator commands both build: data directory, database, engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from cloche_server.app.attached import Attachments
from cloche_server.app.callers import ApiCallers
from cloche_server.app.dialing import SandboxDialer
from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError
from cloche_server.core.previews import PreviewBase
from cloche_server.engine.qemu.driver import QemuEngine
from cloche_server.engine.qemu.launch import QemuConfig
from cloche_server.engine.qemu.probe import choose_accel, probe_qemu
from cloche_server.engine.qemu.wall import Wall, find_root, find_tool_root, prove
from cloche_server.gateway import http2
from cloche_server.gateway.admission import Gate
from cloche_server.gateway.brakes import Brakes
from cloche_server.gateway.gateway import Gateway, Limits
from cloche_server.gateway.tunnel import tunnel
from cloche_server.host import cgroups, files
from cloche_server.host import machine as host_machine
from cloche_server.host import network as host_network
from cloche_server.host.cgroups import Groups
from cloche_server.host.clock import random_bytes
from cloche_server.host.jail import Launcher
from cloche_server.host.uids import claim
from cloche_server.network.link import Netd
from cloche_server.network.networks import Carrier, Networks, NoNetwork
from cloche_server.network.slots import Slots
from cloche_server.settings import Settings
from cloche_server.ssh.house import House
from cloche_server.ssh.house import Limits as SshLimits
from cloche_server.ssh.server import SshServer, host_key
from cloche_server.storage.kernel import find_kernel
from cloche_server.store.db import Database


async def build_engine(settings: Settings) -> tuple[QemuEngine, str]:
    """The engine, and the sentence that says why it has this acceleration. Raises `host.unsupported`."""
    if host_machine.architecture() != "x86_64":
        raise ClocheError("host.unsupported", f"{host_machine.architecture()} hosts are not supported yet, only x86_64")
    facts = await probe_qemu(settings.qemu)
    kernel = await asyncio.to_thread(find_kernel, settings.data)
    accel, reason = await choose_accel(settings.accel, facts, kernel.vmlinuz if kernel else None)
    launcher = Launcher()
    wall = await build_wall(settings, facts.binary, accel, launcher) if settings.jail == "on" else None
    config = QemuConfig(
        facts, accel, settings.tcg_buffer_mb, launcher, wall, _file_limit_mb(settings), taps=settings.network == "on"
    )
    return QemuEngine(config), reason


async def build_wall(settings: Settings, binary: str, accel: str, launcher: Launcher) -> Wall:
    """What locks machines in, after it was tried. Raises `host.unsupported`."""
    root = await find_root(binary, kvm=accel == "kvm")
    uids = await asyncio.to_thread(claim, settings.data, settings.uid_base)
    groups = Groups(await asyncio.to_thread(cgroups.probe), uids.name)
    bps = settings.max_disk_mb_per_second * 1024 * 1024
    device = await asyncio.to_thread(cgroups.device_of, settings.data) if bps else ""
    tool = shutil.which("qemu-img")
    tool_root = await find_tool_root(tool) if tool is not None else None
    wall = Wall(root, uids, groups, bps if device else 0, device, tool_root)
    await prove(launcher, wall, binary)
    return wall


def _file_limit_mb(settings: Settings) -> int:
    """The largest file a machine writes: a full disk with the tables of its qcow2 file, or the memory of a bake."""
    return max(settings.max_disk_mb + settings.max_disk_mb // 50, settings.max_memory_mb) + 256


def build_network(settings: Settings, carrier: Carrier | None = None) -> NoNetwork | Networks:
    """The network of this data directory. Raises `host.unsupported` where there can be none."""
    if settings.network == "off":
        return NoNetwork(Slots(settings.data / "net", 0))
    for obstacle in (host_network.tap_obstacle(), host_network.nft_obstacle()):
        if obstacle is not None:
            raise ClocheError(
                "host.unsupported",
                f"sandboxes can have no network here: {obstacle}; mend that, or start with `--network off`",
            )
    return Networks(Slots(settings.data / "net", settings.network_prepared), carrier)


def words(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


class HostNetwork:
    """The network while a server runs: slots that are kept ready, and netd. To make one blocks."""

    def __init__(self, settings: Settings) -> None:
        on = settings.network == "on"
        told = {
            "resolvers": words(settings.network_resolvers) or None,
            "proxy": settings.network_proxy or None,
            "never": words(settings.network_never),
        }
        # The first user of the block: no machine is ever given it.
        uid = claim(settings.data, settings.uid_base).first if on else 0
        self._netd = Netd(settings.data, uid, told, settings.network_ca) if on else None
        self.network = build_network(settings, self._netd)

    async def start(self) -> None:
        """Raises `network.unavailable`."""
        if self._netd is not None:
            await self._netd.start()

    def background(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """What runs for as long as the server does; cancel to stop."""
        if self._netd is None or not isinstance(self.network, Networks):
            return []
        return [
            group.create_task(self.network.slots.run(), name="slots"),
            group.create_task(self._netd.run(self.network.again), name="netd"),
            group.create_task(self.network.run_doors(), name="doors"),
        ]

    async def close(self) -> None:
        """What sandboxes need runs on; without any, nothing does."""
        if self._netd is None or not isinstance(self.network, Networks):
            return
        await self.network.slots.drain()
        used = await asyncio.to_thread(self.network.slots.held)
        await self._netd.close(stop=not used)


async def end_network(settings: Settings) -> None:
    """When no machine is left and no server runs: removes every slot, and ends netd."""
    await Slots(settings.data / "net", 0).take_stock(())
    await Netd(settings.data, settings.uid_base, {}).end()


def prepare_data(data: Path) -> None:
    """The data directory and its parts. Only root may look in: it holds everybody's files.

    Raises `host.unsupported`.
    """
    try:
        for part in (
            "",
            "templates",
            "images",
            "kernels",
            "sandboxes",
            "layers",
            "snapshots",
            "boot",
            "zeros",
            "net",
            "run",
        ):
            (data / part).mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(data / "run", os.W_OK):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    except OSError as error:
        raise ClocheError(
            "host.unsupported", f"the data directory {data} cannot be used ({error.strerror}); choose another --data"
        ) from error


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket. Raises `host.unsupported`; `flag` is where another port is chosen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ClocheError(
            "host.unsupported",
            f"the server cannot listen on {host}:{port} ({error.strerror}); choose another {flag} or end what has it",
        ) from error
    listener.setblocking(False)
    return listener


def preview_listener(settings: Settings) -> socket.socket | None:
    """None: previews are switched off. Raises `host.unsupported`."""
    if settings.preview_port < 0:
        return None
    return listen(settings.preview_host or settings.host, settings.preview_port, "--preview-port")


def ssh_listener(settings: Settings) -> socket.socket | None:
    """None: SSH is switched off. Raises `host.unsupported`."""
    if settings.ssh_port < 0:
        return None
    return listen(settings.ssh_host or settings.host, settings.ssh_port, "--ssh-port")


def build_ssh(settings: Settings, services: Services, dialer: SandboxDialer) -> SshServer:
    """Blocks: the key of the host is made when there is none. Raises `host.unsupported`."""
    limits = SshLimits(
        settings.ssh_connections,
        settings.ssh_workspace_connections,
        settings.ssh_failures_per_minute,
        settings.ssh_login_timeout,
        settings.ssh_idle_timeout,
    )
    house = House(services.ssh_keys, Attachments(services.access), dialer, services.clock, limits)
    if services.audit is not None:
        house.audit = services.audit.record
    return SshServer(house, host_key(settings.data))


def door_listener(settings: Settings) -> socket.socket | None:
    """Without TLS, for ACME. None: it is not needed. Raises `host.unsupported`."""
    if not settings.preview_acme or settings.preview_acme_port < 0:
        return None
    return listen(settings.preview_host or settings.host, settings.preview_acme_port, "--preview-acme-port")


def preview_base(settings: Settings, listener: socket.socket | None) -> PreviewBase | None:
    """Under which names clients reach previews."""
    if listener is None:
        return None
    if settings.preview_url:
        parts = urlsplit(settings.preview_url)
        return PreviewBase(parts.scheme, parts.hostname or "localhost", parts.port)
    scheme = "http" if settings.preview_cert is None and not settings.preview_acme else "https"
    return PreviewBase(scheme, settings.preview_domain.lower(), listener.getsockname()[1])


def preview_key(data: Path) -> bytes:
    """The key that signs preview tokens, made once."""
    path = data / "preview.key"
    if not path.exists():
        files.write_atomic(path, random_bytes(32), 0o600)
    return path.read_bytes()


def build_gateway(settings: Settings, services: Services, dialer: SandboxDialer, base: PreviewBase | None) -> Gateway:
    """From clients to ports of guests."""
    brakes = Brakes(
        settings.preview_requests_per_minute, settings.preview_requests_burst, settings.preview_failures_per_minute
    )
    gate = Gate(services.ports, dialer, ApiCallers(services.tokens), services.clock, brakes)
    limits = Limits(settings.preview_timeout, settings.preview_idle_timeout)
    gateway = Gateway(dialer, gate, services.ports, services.clock, limits, base)
    gateway.tunnel = tunnel
    if services.audit is not None:
        gateway.audit = services.audit.record
    gateway.http2 = http2.serve
    return gateway


@contextlib.asynccontextmanager
async def open_database(data: Path) -> AsyncIterator[Database]:
    database = Database(data / "cloche.db")
    await database.open()
    try:
        yield database
    finally:
        await database.close()
