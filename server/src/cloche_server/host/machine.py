"""Facts about this machine: memory, disk, CPU flags, boot id."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Memory:
    total_mb: int
    available_mb: int


def memory() -> Memory:
    """From /proc/meminfo; a value that is missing there counts as 0."""
    values = {}
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0])
    return Memory(values.get("MemTotal", 0) // 1024, values.get("MemAvailable", 0) // 1024)


@dataclass(frozen=True, slots=True)
class Disk:
    total_mb: int
    free_mb: int


def disk(path: Path) -> Disk:
    usage = shutil.disk_usage(path)
    return Disk(usage.total // _MIB, usage.free // _MIB)


def cpu_flags() -> frozenset[str]:
    """The CPU feature flags of the first processor."""
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(rest.split())
    return frozenset()


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "model name":
            return rest.strip()
    return platform.processor() or "unknown"


def cpu_count() -> int:
    return len(os.sched_getaffinity(0))


def boot_id() -> str:
    """Changes with every boot of the host; a process reference of another boot is void."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def kernel() -> str:
    return platform.release()


def architecture() -> str:
    return platform.machine()


def tsc_khz() -> int | None:
    """The TSC frequency of the host in kHz. A guest under TCG sees the host's counter and cannot
    calibrate it on a busy host. BogoMIPS is twice the TSC's MHz on kernels that take the delay loop from
    the TSC; unlike `cpu MHz` it does not follow frequency scaling.
    """
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "bogomips":
            return round(float(rest) * 500)
    return None
