"""What a machine may use of this host, kept by the kernel: a control group each, in version 1 or 2.

All groups of a data directory lie below `cloche/<block>`, of version 1 in each hierarchy. A controller that a host does
not have limits nothing, and that is said (`probe`), never an error: a machine is not refused for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WANTED: Final = ("cpu", "memory", "pids")
#: Of version 1 and of version 2, where limits on a disk are; asked for only when there is such a limit.
_DISK: Final = {1: "blkio", 2: "io"}
FILE_SYSTEM: Final = Path("/sys/fs/cgroup")
_PARENT: Final = "cloche"
_PERIOD_US: Final = 100_000
#: Weight of all machines together against everything else on the host, in ordinary processes.
_ALL_TOGETHER: Final = 8
#: What a machine that stands back has of its weight.
_STANDING_BACK: Final = 10
_REMOVE_TRIES: Final = 20


@dataclass(frozen=True, slots=True)
class CgroupFacts:
    """`version` 2, 1, or 0 when neither has the wanted controllers; `missing` are those that nobody has. `roots`: where
    each controller's hierarchy is."""

    version: int
    controllers: tuple[str, ...]
    missing: tuple[str, ...]
    roots: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Limits:
    """`cpus`: of processors, with fractions; `weight`: against other machines, 1 is usual. `disk_bps`: bytes per second
    that are read, and written, on the disk `device` (`major:minor`); 0: no limit."""

    cpus: float
    weight: int
    memory_bytes: int
    pids: int
    disk_bps: int = 0
    device: str = ""


def probe(root: Path = FILE_SYSTEM) -> CgroupFacts:
    """Which version holds the controllers here. One with some of them is taken when none has all."""
    unified = _controllers(root)
    if all(name in unified for name in WANTED):
        return CgroupFacts(2, unified, (), dict.fromkeys((*WANTED, "io"), root))
    legacy = tuple(name for name in (*WANTED, _DISK[1]) if (root / name / "cgroup.procs").exists())
    missing = tuple(name for name in WANTED if name not in legacy)
    if not legacy and unified:
        found = tuple(name for name in (*WANTED, "io") if name in unified)
        missing = tuple(name for name in WANTED if name not in unified)
        return CgroupFacts(2 if found else 0, unified, missing, dict.fromkeys(found, root))
    return CgroupFacts(1 if legacy else 0, legacy, missing, {name: root / name for name in legacy})


def _controllers(root: Path) -> tuple[str, ...]:
    try:
        return tuple((root / "cgroup.controllers").read_text("ascii").split())
    except OSError:
        return ()


def values(version: int, limits: Limits) -> dict[str, list[tuple[str, str]]]:
    """File names and what is written into them, by controller, in the order in which it has to be done."""
    quota = str(max(1000, round(limits.cpus * _PERIOD_US)))
    memory, disk, device = str(limits.memory_bytes), limits.disk_bps, limits.device
    if version == 2:
        return {
            "cpu": [("cpu.max", f"{quota} {_PERIOD_US}"), _weight(2, limits.weight)],
            "memory": [("memory.max", memory), ("memory.swap.max", memory), ("memory.oom.group", "1")],
            "pids": [("pids.max", str(limits.pids))],
            "io": [("io.max", f"{device} rbps={disk} wbps={disk}")] if disk else [],
        }
    return {
        "cpu": [
            ("cpu.cfs_period_us", str(_PERIOD_US)),
            ("cpu.cfs_quota_us", quota),
            _weight(1, limits.weight),
        ],
        "memory": [("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)],
        "pids": [("pids.max", str(limits.pids))],
        "blkio": [(f"blkio.throttle.{way}_bps_device", f"{device} {disk}") for way in ("read", "write")]
        if disk
        else [],
    }


def _weight(version: int, weight: int, part: int = 1) -> tuple[str, str]:
    """File name and value; `part`: a whole, or a half, a third of it."""
    if version == 2:
        return "cpu.weight", str(max(1, min(10000, 100 * weight) // part))
    return "cpu.shares", str(max(2, min(262144, 1024 * weight) // part))


def device_of(path: Path) -> str:
    """The disk that a path lies on, as limits name it; empty when it is none that can be limited."""
    number = path.stat().st_dev
    whole = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not whole.exists():
        return ""
    if (whole / "partition").exists():  # limits are for disks
        return (whole.resolve().parent / "dev").read_text().strip()
    return f"{os.major(number)}:{os.minor(number)}"


class Groups:
    """The groups of one data directory. All methods block for moments, and may be called on several threads."""

    def __init__(self, facts: CgroupFacts, block: str) -> None:
        self.facts = facts
        self._block = block
        self._prepared = False
        #: What kept controllers from being handed down.
        self._held_back: list[str] = []

    def _folders(self, machine: str) -> dict[str, Path]:
        """The directory of a machine by controller; of version 2 the same for all."""
        name = machine.lstrip(".")
        return {one: root / _PARENT / self._block / name for one, root in self.facts.roots.items()}

    def make(self, machine: str, limits: Limits) -> tuple[list[int], list[str]]:
        """Makes the groups of a machine. Descriptors of the files through which a process joins them, which are the
        caller's to close, and what could not be limited."""
        folders = self._folders(machine)
        if not self._prepared or not all(folder.parent.is_dir() for folder in folders.values()):
            self._prepare()  # for the first time, or again after `remove_all` of another process
        fds: list[int] = []
        failures = list(self._held_back)
        wanted = values(self.facts.version, limits)
        for controller, folder in folders.items():
            try:
                folder.mkdir(exist_ok=True)
                for name, value in wanted.get(controller, []):
                    _write(folder / name, value, failures)
            except OSError as error:
                failures.append(f"{controller}: {error.strerror}")
        for folder in dict.fromkeys(folders.values()):
            with contextlib.suppress(OSError):
                fds.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        return fds, failures

    def trial(self) -> list[str]:
        """What a machine could not be limited in, found by making and removing a group."""
        name = f"trial-{os.getpid()}"
        fds, failures = self.make(name, Limits(cpus=1.0, weight=1, memory_bytes=1 << 28, pids=16))
        for fd in fds:
            os.close(fd)
        self.remove(name)
        return failures

    def _prepare(self) -> None:
        held_back: list[str] = []
        for root in dict.fromkeys(self.facts.roots.values()):
            parts = (root / _PARENT, root / _PARENT / self._block)
            for part in parts:
                with contextlib.suppress(OSError):
                    part.mkdir(exist_ok=True)
            if self.facts.version == 2:
                there = _controllers(root)
                wanted = [one for one, at in self.facts.roots.items() if at == root and one in there]
                for folder in (root, *parts):
                    refused = _hand_down(folder, wanted)
                    held_back += [f"{one} in {folder}: {why}" for one, why in refused.items()]
                    wanted = [one for one in wanted if one not in refused]
        if (cpu := self.facts.roots.get("cpu")) is not None:
            name, value = ("cpu.weight", 100) if self.facts.version == 2 else ("cpu.shares", 1024)
            for part in (cpu / _PARENT, cpu / _PARENT / self._block):
                _write(part / name, str(value * _ALL_TOGETHER), [])
        self._held_back, self._prepared = held_back, not held_back

    def stand_back(self, machine: str, weight: int, *, back: bool) -> None:
        """Gives a machine a small part of its weight while others want the processors, or all of it again. One that is
        not limited stays as it is."""
        folder = self._folders(machine).get("cpu")
        if folder is not None:
            name, value = _weight(self.facts.version, weight, _STANDING_BACK if back else 1)
            _write(folder / name, value, [])

    def remove(self, machine: str) -> bool:
        """Removes the groups of a machine that has ended. False when a process is still in one."""
        removed = [_remove(folder) for folder in dict.fromkeys(self._folders(machine).values())]
        return all(removed)

    def machines(self) -> set[str]:
        """The names of all groups there are."""
        found = set()
        for root in set(self.facts.roots.values()):
            parent = root / _PARENT / self._block
            with contextlib.suppress(OSError):
                found |= {one.name for one in parent.iterdir() if one.is_dir()}
        return found

    def sweep(self, living: Iterable[str]) -> list[str]:
        """Removes the groups of all but these machines; returns the names of those that resist."""
        keep = {name.lstrip(".") for name in living}
        return [name for name in self.machines() - keep if not self.remove(name)]

    def remove_all(self) -> None:
        """Removes the groups of all machines, which have ended, and what was above them for this data directory."""
        self.sweep(())
        self.leave()

    def leave(self) -> None:
        """Removes what is above the groups of machines for this data directory, unless there is one of them."""
        for root in set(self.facts.roots.values()):
            with contextlib.suppress(OSError):
                (root / _PARENT / self._block).rmdir()
        self._prepared = False

    def held(self, machine: str, pid: int) -> dict[str, str]:
        """What really limits a process, by controller: the limit as the kernel tells it. Controllers whose group the
        process is not in are left out."""
        names = {1: _SHOWN_1, 2: _SHOWN_2}.get(self.facts.version, {})
        found: dict[str, str] = {}
        for controller, folder in self._folders(machine).items():
            with contextlib.suppress(OSError, KeyError):
                if str(pid) in (folder / "cgroup.procs").read_text().split():
                    found[controller] = (folder / names[controller]).read_text().strip()
        return found


_SHOWN_1: Final = {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes", "pids": "pids.max"}
_SHOWN_2: Final = {"cpu": "cpu.max", "memory": "memory.max", "pids": "pids.max"}


def _hand_down(folder: Path, controllers: Sequence[str]) -> dict[str, str]:
    """Lets the groups below a folder of version 2 have these controllers. Those that it cannot have, and why.

    All in one write, which the kernel does whole or not at all: where processes are in the folder, as in a container
    whose server takes its own group for the root, some controllers could be had, and no process could join a group
    below any more."""
    file = folder / "cgroup.subtree_control"
    try:
        file.write_text(" ".join(f"+{one}" for one in controllers))
    except OSError as error:
        if error.errno in {errno.EBUSY, errno.EOPNOTSUPP}:
            return dict.fromkeys(controllers, error.strerror or "busy")
    else:
        return {}
    refused: dict[str, str] = {}
    for one in controllers:  # one of them is refused for a reason of its own
        told: list[str] = []
        _write(file, f"+{one}", told)
        if told:
            refused[one] = told[0]
    return refused


def _write(path: Path, value: str, failures: list[str]) -> None:
    """A file that is not there is one that this kernel was built without."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        failures.append(f"{path.name}: {error.strerror}")
        return
    try:
        os.write(fd, value.encode())
    except OSError as error:
        failures.append(f"{path.name}: {error.strerror}")
    finally:
        os.close(fd)


def _remove(folder: Path) -> bool:
    for attempt in range(_REMOVE_TRIES):
        try:
            folder.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno != errno.EBUSY:
                return False
        time.sleep(0.005 * (attempt + 1))  # the kernel lets go of a process a moment after it has ended
    return False
