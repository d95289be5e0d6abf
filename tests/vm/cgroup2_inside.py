"""Runs inside a guest, whose kernel has control groups of version 2 only, and drives the host's own `cgroups.py` there.

It is given the directory that `cgroups.py` lies in, and writes one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import cgroups  # type: ignore[import-not-found]

ROOT = Path("/sys/fs/cgroup")
MIB = 1 << 20


def child(fd: int, work: Callable[[], int]) -> int:
    """The pid of a process that has joined a group and then works."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 98
        try:
            os.write(fd, b"0")
            os.write(told, b"x")
            code = work()
        finally:
            os._exit(code)
    os.read(ready, 1)
    os.close(ready)
    os.close(told)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def sleeps() -> int:
    time.sleep(600)
    return 0


def forks() -> int:
    made = 0
    try:
        while made < 100:
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
            made += 1
    except OSError:
        return made
    return 99


def takes() -> int:
    return len(bytearray(120 * MIB)) and 0


def spins() -> int:
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
    return 0


def kill(folder: Path) -> None:
    (folder / "cgroup.kill").write_text("1")


def value(path: Path, key: str) -> int:
    return int(dict(line.split() for line in path.read_text().splitlines())[key])


def whole() -> dict[str, object]:
    facts = cgroups.probe()
    told: dict[str, object] = {"version": facts.version, "missing": facts.missing}
    groups = cgroups.Groups(facts, "b1")
    disk = cgroups.device_of(Path("/"))
    if not disk:
        disk = Path("/sys/block/vda/dev").read_text().strip()
    limits = cgroups.Limits(0.25, 2, 64 * MIB, 8, 4 * MIB, disk)
    fds, told["failures"] = groups.make("m1", limits)
    (fd,) = fds
    folder = ROOT / "cloche/b1/m1"
    told["handed_down"] = [
        (part / "cgroup.subtree_control").read_text().split() for part in (ROOT, ROOT / "cloche", ROOT / "cloche/b1")
    ]
    told["swap_and_oom"] = [
        (folder / name).read_text().strip() for name in ("memory.oom.group", "cpu.weight") if (folder / name).exists()
    ]
    told["io"] = (folder / "io.max").read_text().strip()

    first = child(fd, sleeps)
    told["held"] = groups.held("m1", first)
    told["held_by_another"] = groups.held("m1", os.getpid())
    told["removed_while_used"] = groups.remove("m1")
    second = child(fd, takes)
    told["memory"] = [ended(second), ended(first)]  # all of the group end together
    told["oom_kills"] = value(folder / "memory.events", "oom_group_kill")

    told["forks"] = ended(child(fd, forks))
    kill(folder)
    while (folder / "cgroup.procs").read_text().strip():
        time.sleep(0.01)
    told["spun"] = ended(child(fd, spins))
    told["throttled"] = value(folder / "cpu.stat", "nr_throttled")

    third = child(fd, sleeps)
    kill(folder)
    told["killed"] = ended(third) == -signal.SIGKILL
    other, _ = groups.make("m2", limits)
    told["machines"] = sorted(groups.machines())
    told["resisting"] = groups.sweep(["m2"])
    told["kept"] = sorted(groups.machines())
    groups.remove_all()
    told["left"] = (ROOT / "cloche/b1").exists()
    again, told["failures_again"] = groups.make("m3", limits)
    told["removed"] = groups.remove("m3")
    groups.remove_all()
    for one in (*fds, *other, *again):
        os.close(one)
    (ROOT / "cloche").rmdir()
    return told


def inside_a_container() -> tuple[list[str], int]:
    """The server is itself in what it takes for the root: nothing can be handed down, and that is told."""
    box = ROOT / "box"
    box.mkdir()
    home = ROOT / next(iter(Path("/proc/self/cgroup").read_text().splitlines())).partition("::/")[2]
    try:
        (box / "cgroup.procs").write_text(str(os.getpid()))
        groups = cgroups.Groups(cgroups.probe(box), "b1")
        failures: list[str] = groups.trial()
        (fd,), _ = groups.make("m", cgroups.Limits(0.25, 1, 64 * MIB, 8))
        joined = ended(child(fd, lambda: 0))
        os.close(fd)
        groups.remove_all()
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        for part in (box / "cloche/b1", box / "cloche", box):
            if part.exists():
                part.rmdir()
    return failures, joined


def main() -> None:
    told = whole()
    told["in_a_container"], told["joined_there"] = inside_a_container()
    sys.stdout.write(json.dumps(told))


main()
