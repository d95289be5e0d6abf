"""Starting one QEMU process: every file is opened here, and handed over as a descriptor."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.records import ProcessRef, Shape
from cloche_server.engine.qemu import wall
from cloche_server.engine.qemu.argv import ColdBoot, DiskFile, VmPlan, build_argv
from cloche_server.engine.qemu.nodes import node_of
from cloche_server.engine.qemu.probe import QemuFacts
from cloche_server.host import mounts, overlay, process
from cloche_server.host.jail import Jail, Launcher, Program, may_set_limits
from cloche_server.telemetry import log

_log = log.get("launch")

NAME_PREFIX: Final = "cloche-"
#: Holds the user id of the machine's process; written by the server, which alone may look there.
UID_FILE: Final = "uid"
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW
_FIRST_FD: Final = 3
_MIB: Final = 1024 * 1024
#: A machine has three for each layer of its disk, and few others.
MOST_FILES: Final = 4096


@dataclass(frozen=True, slots=True)
class QemuConfig:
    """`wall` None: processes are not locked in. `file_limit_mb`: no process writes a file that is larger."""

    facts: QemuFacts
    accel: str
    tcg_buffer_mb: int
    launcher: Launcher
    wall: wall.Wall | None
    file_limit_mb: int
    #: Whether machines get tap devices: what is saved of one with and of one without do not fit each other.
    taps: bool = True

    def forget(self, machine_id: str) -> None:
        """Removes what a machine that has ended leaves beside its directory. Blocking, for a moment."""
        if self.wall is not None and not self.wall.groups.remove(machine_id):
            _log.warning("cgroup.not_removed", machine=machine_id)


@dataclass(frozen=True, slots=True)
class Start:
    """One machine that is to be started; `directory` exists or its parent does. `boot` None: it waits for its
    restore. `nic`: a tap device of ours; None: its card leads nowhere."""

    machine_id: str
    directory: Path
    shape: Shape
    memory: Path
    disk: Path
    nic: int | None = None
    boot: ColdBoot | None = None
    #: Writes its memory to the file.
    keeps_memory: bool = False


class Handover:
    """Descriptors of ours, by the numbers that a process will have them by. Closed at the end of the block."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.fds: dict[int, int] = {}

    def owned(self, fd: int) -> int:
        """`fd`, which is closed at the end."""
        self._stack.callback(os.close, fd)
        return fd

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Opens a file; its number over there."""
        return self.give(self.owned(os.open(path, flags | _OPEN, mode)))

    def give(self, fd: int, number: int | None = None) -> int:
        """Its number over there. The descriptor stays its owner's."""
        number = max((_FIRST_FD - 1, *self.fds)) + 1 if number is None else number
        self.fds[number] = fd
        return number


def spawn(config: QemuConfig, start: Start) -> ProcessRef:
    """Blocking. Raises OSError, `host.unsupported`, `sandbox.boot_failed` for a disk that is not as it was left."""
    if not Path(config.facts.binary).exists():
        name = Path(config.facts.binary).name
        raise ClocheError("host.unsupported", f"the program `{name}` is not installed on this host")
    start.directory.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as stack:
        hands = Handover(stack)
        hands.give(hands.owned(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)), 0)
        log = hands.owned(os.open(start.directory / "qemu.log", _APPEND | _OPEN, 0o640))
        hands.give(log, 1)
        hands.give(log, 2)
        qmp = stack.enter_context(_listener(start.directory / "qmp.sock"))
        agent = stack.enter_context(_listener(start.directory / "agent.sock"))
        qmp_fd, agent_fd = hands.give(qmp.fileno()), hands.give(agent.fileno())
        console_fd = hands.open(start.directory / "console.log", _APPEND)
        layers = _open_disk(start.disk, hands)
        jail, memory, boot = _lock_in(config, start, hands)
        plan = VmPlan(
            binary=os.path.realpath(config.facts.binary),
            name=NAME_PREFIX + start.machine_id,
            accel=config.accel,
            cpus=start.shape.cpus,
            memory_mb=start.shape.memory_mb,
            memory=memory,
            node=node_of(start.disk),
            layers=layers,
            tcg_buffer_mb=config.tcg_buffer_mb,
            qmp_fd=qmp_fd,
            agent_fd=agent_fd,
            console_fd=console_fd,
            boot=boot,
            nic_fd=None if start.nic is None else hands.give(start.nic),
            keeps_memory=start.keeps_memory,
        )
        limits = {"CORE": 0, "NOFILE": MOST_FILES, "FSIZE": _file_limit_mb(config, start) * _MIB}
        if jail is not None:
            limits["NPROC"] = start.shape.cpus + wall.MOST_THREADS
        groups = _join(config, start, hands)
        program = Program(tuple(build_argv(plan)), hands.fds, jail, start.directory, groups, limits)
        try:
            pid = config.launcher.start(program)
        except BaseException:
            config.forget(start.machine_id)
            raise
    try:
        # A process that has ended already has no start time; the pair is then recognised as dead.
        return ProcessRef(pid, process.start_time(pid) or 0)
    except BaseException:
        process.end_child(pid)
        raise


def file_limit_mb(disk_mb: int) -> int:
    """The largest file of a machine with such a disk: the disk with the tables of its qcow2 file."""
    return disk_mb + disk_mb // 50 + 256


def _file_limit_mb(config: QemuConfig, start: Start) -> int:
    if not may_set_limits():  # when its disk grows the limit could not
        return config.file_limit_mb
    try:
        size = overlay.read_header(start.disk).size
    except ValueError as error:
        raise ClocheError("sandbox.boot_failed", f"the disk of the machine cannot be trusted: {error}") from error
    needed = file_limit_mb(-(-size // _MIB))
    if start.keeps_memory:
        needed = max(needed, start.shape.memory_mb + 256)
    return min(needed, config.file_limit_mb)


_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT


def _open_disk(top: Path, hands: Handover) -> tuple[DiskFile, ...]:
    try:
        chain = overlay.chain(top)
    except ValueError as error:
        raise ClocheError("sandbox.boot_failed", f"the disk of the machine cannot be trusted: {error}") from error
    layers = [DiskFile("qcow2", (hands.open(top, os.O_RDWR), hands.open(top, os.O_RDONLY)))]
    for path in chain[1:]:
        layers.append(DiskFile("qcow2" if path.suffix == ".qcow2" else "raw", (hands.open(path, os.O_RDONLY),)))
    return tuple(layers)


def _lock_in(config: QemuConfig, start: Start, hands: Handover) -> tuple[Jail | None, Path, ColdBoot | None]:
    """The jail, and what the files are called in it that are opened by name."""
    uid_file = start.directory / UID_FILE
    if config.wall is None:
        uid_file.unlink(missing_ok=True)
        return None, start.memory, start.boot
    uids = config.wall.uids
    uid = uids.take()
    uid_file.write_text(str(uid))
    groups = set(wall.kvm_groups(config.accel == "kvm"))
    if start.keeps_memory:
        os.chown(start.memory, uid, uid)
    else:
        groups.add(uids.readable_by_group(start.memory))
    trees = [(str(wall.MEMORY), hands.owned(mounts.detached(start.memory, writable=start.keeps_memory)))]
    boot = start.boot
    if boot is not None:
        for name, path in ((wall.KERNEL, boot.kernel), (wall.INITRD, boot.initrd)):
            if not path.stat().st_mode & stat.S_IROTH:
                groups.add(uids.readable_by_group(path))
            trees.append((str(name), hands.owned(mounts.detached(path))))
        boot = ColdBoot(wall.KERNEL, wall.INITRD, boot.tsc_khz)
    jail = config.wall.jail(uid, start.directory.absolute(), trees=tuple(trees), groups=tuple(sorted(groups)))
    return jail, wall.MEMORY, boot


def _join(config: QemuConfig, start: Start, hands: Handover) -> tuple[int, ...]:
    """The groups that limit the machine."""
    if config.wall is None:
        return ()
    limits = config.wall.limits(start.shape, config.tcg_buffer_mb if config.accel == "tcg" else 0)
    fds, failures = config.wall.groups.make(start.machine_id, limits)
    if failures:
        _log.warning("cgroup.incomplete", machine=start.machine_id, failures=failures)
    return tuple(hands.owned(fd) for fd in fds)


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
