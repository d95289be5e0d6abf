"""The QEMU engine: launch, adopt, find. Baking is beside it in `bake.py`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import BakedTemplate, BootFiles, Pages, SavedState
from cloche_server.core.records import Isolation, ProcessRef, Shape
from cloche_server.engine.qemu.argv import CPU_MODEL, ColdBoot, VmPlan, build_argv, machine_digest
from cloche_server.engine.qemu.machine import QemuMachine
from cloche_server.engine.qemu.probe import QemuFacts
from cloche_server.engine.qemu.qmp import QmpLost
from cloche_server.host import machine as host_machine
from cloche_server.host import process
from cloche_server.host.watch import ProcessWatch

NAME_PREFIX: Final = "cloche-"


@dataclass(frozen=True, slots=True)
class QemuConfig:
    facts: QemuFacts
    accel: str
    tcg_buffer_mb: int
    #: Whether machines get tap devices: what is saved of one with and of one without do not fit each other.
    taps: bool = True


class QemuEngine:
    """Runs microvms with one QEMU binary and one acceleration."""

    def __init__(self, config: QemuConfig) -> None:
        self._config = config

    @property
    def isolation(self) -> Isolation:
        return Isolation(boundary="microvm", vmm="qemu", accel=self._config.accel)

    @property
    def fingerprint(self) -> str:
        config = self._config
        cpu = CPU_MODEL[config.accel] if config.accel == "tcg" else f"host:{host_machine.cpu_model()}"
        card = "tap" if config.taps else "none"
        return f"qemu {config.facts.version_text} {config.accel} {cpu} {machine_digest(config.accel)} net={card}"

    async def launch(
        self,
        machine_id: str,
        directory: Path,
        template: BakedTemplate,
        disk: Path,
        state: SavedState | None = None,
        *,
        nic: int | None = None,
    ) -> QemuMachine:
        memory = template.directory / "mem"
        if state is not None and state.memory is not None:
            memory = state.memory

        def start() -> ProcessRef:
            directory.mkdir(mode=0o700, exist_ok=True)
            return self._spawn(directory, machine_id, template.shape, memory=memory, disk=disk, nic=nic)

        if state is None:
            return await self._started(machine_id, directory, start, memory, template.directory / "dev")
        return await self._started(machine_id, directory, start, memory, state.device_state, state.pages)

    async def start_cold(
        self,
        machine_id: str,
        directory: Path,
        files_: BootFiles,
        shape: Shape,
        memory: Path,
        disk: Path,
        *,
        nic: int | None = None,
    ) -> QemuMachine:
        """Boots `disk` from a kernel, for a bake: it writes to the file `memory`."""
        return await self._cold(machine_id, directory, files_, shape, memory, disk, nic, keeps_memory=True)

    async def boot(
        self,
        machine_id: str,
        directory: Path,
        files: BootFiles,
        shape: Shape,
        memory: Path,
        disk: Path,
        *,
        nic: int | None = None,
    ) -> QemuMachine:
        return await self._cold(machine_id, directory, files, shape, memory, disk, nic, keeps_memory=False)

    async def _cold(
        self,
        machine_id: str,
        directory: Path,
        files_: BootFiles,
        shape: Shape,
        memory: Path,
        disk: Path,
        nic: int | None,
        *,
        keeps_memory: bool,
    ) -> QemuMachine:
        boot = ColdBoot(files_.kernel, files_.initrd, host_machine.tsc_khz())

        def start() -> ProcessRef:
            directory.mkdir(mode=0o700, exist_ok=True)
            return self._spawn(
                directory, machine_id, shape, memory=memory, disk=disk, nic=nic, boot=boot, keeps_memory=keeps_memory
            )

        return await self._started(machine_id, directory, start, memory, None)

    async def _started(
        self,
        machine_id: str,
        directory: Path,
        start: Callable[[], ProcessRef],
        memory: Path,
        device_state: Path | None,
        pages: Pages | None = None,
    ) -> QemuMachine:
        """Runs `start` on a thread and connects. Whatever interrupts it, no process is left behind."""
        starting = asyncio.get_running_loop().run_in_executor(None, start)
        cancelled: asyncio.CancelledError | None = None
        while not starting.done():
            try:
                await asyncio.wait({starting})
            except asyncio.CancelledError as error:  # the thread cannot be stopped, and may start a process yet
                cancelled = error
        if cancelled is not None:
            if starting.exception() is None:
                await asyncio.to_thread(process.end_child, starting.result().pid)
            raise cancelled
        try:
            ref = starting.result()
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise _launch_error(error) from error
        try:
            watch = ProcessWatch.open(ref)
        except OSError as error:
            process.end_child(ref.pid)
            raise _launch_error(error) from error
        if watch is None:
            process.end_child(ref.pid)
            raise ClocheError("sandbox.boot_failed", "QEMU ended at once", details={"qemu": _log_tail(directory)})
        machine = QemuMachine(machine_id, directory, watch, memory, device_state, pages)
        try:
            await machine.connect(timeout=30)
        except BaseException as error:
            await asyncio.shield(machine.kill())
            if isinstance(error, QmpLost):
                raise ClocheError(
                    "sandbox.boot_failed", "QEMU could not be started", details={"qemu": machine.last_words()}
                ) from error
            raise
        return machine

    def _spawn(
        self,
        directory: Path,
        machine_id: str,
        shape: Shape,
        *,
        memory: Path,
        disk: Path,
        nic: int | None,
        boot: ColdBoot | None = None,
        keeps_memory: bool = False,
    ) -> ProcessRef:
        with _listener(directory / "qmp.sock") as qmp, _listener(directory / "agent.sock") as agent:
            plan = VmPlan(
                binary=self._config.facts.binary,
                name=NAME_PREFIX + machine_id,
                accel=self._config.accel,
                cpus=shape.cpus,
                memory_mb=shape.memory_mb,
                memory=memory,
                disk=disk,
                tcg_buffer_mb=self._config.tcg_buffer_mb,
                qmp_fd=qmp.fileno(),
                agent_fd=agent.fileno(),
                boot=boot,
                nic_fd=nic,
                keeps_memory=keeps_memory,
            )
            pid = process.spawn_detached(
                build_argv(plan),
                cwd=directory,
                stdout_path=directory / "qemu.log",
                pass_fds=(qmp.fileno(), agent.fileno(), *(() if nic is None else (nic,))),
            )
        try:
            # A process that has ended already has no start time; the pair is then recognised as dead.
            return ProcessRef(pid, process.start_time(pid) or 0)
        except BaseException:
            process.end_child(pid)
            raise

    async def adopt(self, machine_id: str, directory: Path, ref: ProcessRef) -> QemuMachine | None:
        watch = ProcessWatch.open(ref)
        if watch is None:
            return None
        machine = QemuMachine(machine_id, directory, watch, _memory_file(ref.pid), None)
        try:
            await machine.connect()
            await machine.look()
        except QmpLost:
            # Alive, but deaf: it cannot be steered any more, so it is no sandbox.
            await machine.kill()
            return None
        return machine

    def find(self, root: Path) -> dict[str, ProcessRef]:
        found: dict[str, ProcessRef] = {}
        root = root.resolve()  # the kernel tells where a process really is
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                cwd = (entry / "cwd").readlink()
            except OSError:
                continue
            name = _guest_name(argv)
            if name is not None and cwd.parent == root:
                pid = int(entry.name)
                started = process.start_time(pid)
                if started is not None:
                    found[name] = ProcessRef(pid, started)
        return found

    async def bake(
        self,
        template_id: str,
        files: BootFiles,
        shape: Shape,
        directory: Path,
        work: Path,
        prepare: Callable[[Path], Awaitable[None]],
        progress: Callable[[str], None],
        *,
        nic: int | None = None,
    ) -> None:
        from cloche_server.engine.qemu.bake import bake  # the driver and its baker need each other

        await bake(self, template_id, files, shape, directory, work, prepare, progress, nic)


def _memory_file(pid: int) -> Path:
    """The file a running machine has mapped as its memory, from its command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return Path()
    for word in words:
        if word.startswith(b"memory-backend-file,"):
            options = dict(part.partition(b"=")[::2] for part in word.split(b","))
            return Path(os.fsdecode(options.get(b"mem-path", b"")))
    return Path()


def _guest_name(argv: list[bytes]) -> str | None:
    for flag, value in itertools.pairwise(argv):
        if flag == b"-name" and value.startswith(b"guest=" + NAME_PREFIX.encode()):
            return value.removeprefix(b"guest=" + NAME_PREFIX.encode()).decode("ascii", "replace")
    return None


@contextlib.contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    """A bound, listening Unix socket that QEMU inherits; our copy is closed at the end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)  # of an earlier process of the same sandbox
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(4)
        yield listener
    finally:
        listener.close()


def _launch_error(error: OSError) -> ClocheError:
    import errno

    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ClocheError("host.disk_full", "the disk of the host is full, no sandbox can be made")
    if error.errno in {errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE}:
        return ClocheError(
            "capacity.unavailable",
            "the host has no memory, process or file descriptor left for another sandbox",
            retry_after=5,
        )
    return ClocheError("sandbox.boot_failed", f"the machine could not be started ({error.strerror})")


def _log_tail(directory: Path) -> str:
    try:
        return (directory / "qemu.log").read_bytes()[-2000:].decode("utf-8", "replace").strip()
    except OSError:
        return ""
