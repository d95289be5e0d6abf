"""Looking at processes from outside: what they hold, and which of them belong to a data directory."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Proc:
    """A process, told from a later one with the same pid by its start time."""

    pid: int
    start: int
    cmdline: str
    cwd: str

    @property
    def is_qemu(self) -> bool:
        return "qemu-system" in self.cmdline.split("\0")[0]

    def alive(self) -> bool:
        return start_time(self.pid) == self.start

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def heed_interrupts() -> None:
    """For `preexec_fn`: what a shell starts in the background ignores SIGINT, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_time(pid: int) -> int | None:
    """Field 22 of `/proc/PID/stat`; None when there is no such process, or only its corpse."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def below(directory: Path) -> list[Proc]:
    """Every living process that works below `directory` or names something below it on its command line."""
    root = str(directory)
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        try:
            cmdline = os.fsdecode((entry / "cmdline").read_bytes())
            cwd = str((entry / "cwd").readlink())
        except OSError:
            continue
        started = start_time(pid)
        inside = (
            cwd == root
            or cwd.startswith(root + "/")
            or any(word == root or root + "/" in word for word in cmdline.split("\0"))
        )
        if started is not None and inside:
            found.append(Proc(pid, started, cmdline, cwd))
    return found


def wait_gone(procs: list[Proc], seconds: float) -> list[Proc]:
    """Those that still live after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [p for p in procs if p.alive()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def unix_sockets(directory: Path) -> list[str]:
    """Bound Unix sockets below `directory`, as the kernel lists them."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    paths = {line.split()[7] for line in lines if len(line.split()) > 7}
    return sorted(path for path in paths if path.startswith(f"{directory}/"))


def mounts(directory: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(f"{directory}/")]


def fd_count(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def rss_mib(pid: int) -> float:
    """Resident memory now."""
    return _status_kb(pid, "VmRSS") / 1024


def peak_rss_mib(pid: int) -> float:
    """The most resident memory since the start or since `reset_peak`."""
    return _status_kb(pid, "VmHWM") / 1024


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_kb(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise AssertionError(f"no {name} of process {pid}")
