"""The QEMU engine: launch, adopt, find. Baking is beside it in `bake.py`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import BakedTemplate, BootFiles, Pages, SavedState
from cloche_server.core.records import Isolation, ProcessRef, Shape
from cloche_server.engine.qemu.argv import CPU_MODEL, ColdBoot, machine_digest
from cloche_server.engine.qemu.found import find_machines
from cloche_server.engine.qemu.launch import QemuConfig, Start, spawn
from cloche_server.engine.qemu.machine import QemuMachine
from cloche_server.engine.qemu.qmp import QmpLost
from cloche_server.engine.qemu.wall import BASE, MEMORY
from cloche_server.host import machine as host_machine
from cloche_server.host import process, uids
from cloche_server.host.confined import Cell, Confined
from cloche_server.host.watch import ProcessWatch
from cloche_server.telemetry import log

_log = log.get("engine")


class QemuEngine:
    """Runs microvms with one QEMU binary and one acceleration."""

    def __init__(self, config: QemuConfig) -> None:
        self._config = config
        #: Machines of an earlier server whose control groups were not empty yet.
        self._resisting: set[str] = set()

    @property
    def isolation(self) -> Isolation:
        jailed = self._config.wall is not None
        return Isolation(boundary="microvm", vmm="qemu", accel=self._config.accel, jailed=jailed)

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
        start = Start(machine_id, directory, template.shape, memory, disk, nic)
        if state is None:
            return await self._started(start, template.directory / "dev")
        return await self._started(start, state.device_state, state.pages)

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
        start = Start(machine_id, directory, shape, memory, disk, nic, boot, keeps_memory=keeps_memory)
        return await self._started(start, None)

    async def _started(self, start: Start, device_state: Path | None, pages: Pages | None = None) -> QemuMachine:
        """Starts a process on a thread and connects. Whatever interrupts it, no process is left behind."""
        starting = asyncio.get_running_loop().run_in_executor(None, self._spawn, start)
        cancelled: asyncio.CancelledError | None = None
        while not starting.done():
            try:
                await asyncio.wait({starting})
            except asyncio.CancelledError as error:  # the thread cannot be stopped, and may start a process yet
                cancelled = error
        if cancelled is not None:
            if starting.exception() is None:
                await asyncio.to_thread(self._end, start, starting.result())
            raise cancelled
        try:
            ref = starting.result()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and start.boot is None:
                raise
            if isinstance(error, FileNotFoundError):
                raise ClocheError("sandbox.boot_failed", "a file that the machine boots from is missing") from error
            raise _launch_error(error) from error
        try:
            watch = ProcessWatch.open(ref)
        except OSError as error:
            self._end(start, ref)
            raise _launch_error(error) from error
        if watch is None:
            self._end(start, ref)
            raise ClocheError("sandbox.boot_failed", "QEMU ended at once", details={"qemu": _log_tail(start.directory)})
        memory = start.memory if self._config.wall is None else MEMORY
        machine = QemuMachine(start.machine_id, start.directory, watch, memory, device_state, pages, self._config)
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

    def _spawn(self, start: Start) -> ProcessRef:
        self._resisting.discard(start.machine_id)  # a bake has the name of the one before
        return spawn(self._config, start)

    def _end(self, start: Start, ref: ProcessRef) -> None:
        process.end_child(ref.pid)
        self._config.forget(start.machine_id)

    async def adopt(self, machine_id: str, directory: Path, ref: ProcessRef) -> QemuMachine | None:
        watch = ProcessWatch.open(ref)
        if watch is None:
            return None
        machine = QemuMachine(machine_id, directory, watch, _memory_file(ref.pid), None, None, self._config)
        try:
            await machine.connect()
            await machine.look()
        except QmpLost:
            # Alive, but deaf: it cannot be steered any more, so it is no sandbox.
            await machine.kill()
            return None
        return machine

    def find(self, root: Path) -> dict[str, ProcessRef]:
        return find_machines(root)

    def clear_up(self, living: Collection[str]) -> None:
        if self._config.wall is not None and (left := self._config.wall.groups.sweep(living)):
            _log.warning("cgroups.not_removed", groups=left)
            self._resisting = set(left)

    def clear_rest(self) -> None:
        for name in list(self._resisting):
            if self._config.wall is not None and self._config.wall.groups.remove(name):
                self._resisting.discard(name)

    def disk_tool(self, data: Path) -> Confined:
        """`qemu-img` for disks below `data` that others have written, behind the same wall as machines."""
        wall = self._config.wall
        if wall is None:
            return Confined("qemu-img", data, None)
        root = wall.tool_root or wall.root
        return Confined("qemu-img", data, Cell(self._config.launcher, root, wall.uids, wall.groups, BASE))

    def close(self) -> None:
        """Lets go of what starts processes; the machines run on."""
        self._config.launcher.close()
        if self._config.wall is not None:
            self._config.wall.groups.leave()

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
    """What the file is called that a running machine has mapped as its memory: inside its jail, or without one the
    path on its command line."""
    if uids.uid_of(pid) != 0:
        return MEMORY
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return Path()
    for word in words:
        if word.startswith(b"memory-backend-file,"):
            options = dict(part.partition(b"=")[::2] for part in word.split(b","))
            return Path(os.fsdecode(options.get(b"mem-path", b"")))
    return Path()


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
