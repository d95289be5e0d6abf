"""What a sandbox has used. Pure: readings and the time are arguments.

Counters of a process begin anew with each process, so what the processes before have used is kept beside the reading of
the present one. Amounts over time hold the last reading until the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final

from cloche_server.core.lifecycle import Status
from cloche_server.core.records import BootMode, ProcessRef, Sandbox
from cloche_server.core.walls import Walls, until

MIB: Final = 1024 * 1024
#: States in which the host holds the memory of the sandbox, or makes room for it.
HOLDING_MEMORY: Final = frozenset(
    {
        Status.CREATING,
        Status.RUNNING,
        Status.PAUSED,
        Status.HIBERNATING,
        Status.WAKING,
        Status.STOPPING,
        Status.STARTING,
        Status.RESTORING,
    }
)


@dataclass(frozen=True, slots=True)
class Meter:
    """What has been counted of one sandbox, beside the time in its states. Charged until `at` (Unix seconds)."""

    at: float
    process: ProcessRef | None = None
    #: Of the processes before this one.
    cpu_before: float = 0.0
    #: What the counter of this process said when it became this sandbox's, and what it said last.
    cpu_origin: float = 0.0
    cpu_seen: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    memory_used_mib_seconds: float = 0.0
    disk_mib_seconds: float = 0.0
    exec_count: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    @property
    def cpu_seconds(self) -> float:
        return self.cpu_before + self.cpu_seen - self.cpu_origin


def begin(record: Sandbox, now: float) -> Meter:
    """The meter of a sandbox of which nothing has been counted yet."""
    if record.process is None:
        return Meter(at=now)
    # A machine of a pool has worked before it was this sandbox; one that was woken or booted has worked for it alone.
    pooled = record.boot_mode not in {BootMode.WAKE, BootMode.COLD}
    origin = record.cpu_origin if pooled else 0.0
    return Meter(at=now, process=record.process, cpu_origin=origin, cpu_seen=origin)


def charge(meter: Meter, now: float) -> Meter:
    """The time until `now` at the readings that stand. However it is cut, the sum is the same."""
    if now <= meter.at:
        return meter
    passed = now - meter.at
    return replace(
        meter,
        at=now,
        memory_used_mib_seconds=meter.memory_used_mib_seconds + meter.memory_bytes / MIB * passed,
        disk_mib_seconds=meter.disk_mib_seconds + meter.disk_bytes / MIB * passed,
    )


def read(meter: Meter, process: ProcessRef, cpu_seconds: float) -> Meter:
    """With what the counter of its process says. A counter never goes back, and another process has another one."""
    if process != meter.process:
        return replace(
            meter, process=process, cpu_before=meter.cpu_seconds, cpu_origin=0.0, cpu_seen=max(0.0, cpu_seconds)
        )
    return replace(meter, cpu_seen=max(meter.cpu_seen, cpu_seconds))


@dataclass(frozen=True, slots=True)
class Metered:
    """One sandbox with its meter, as it is kept after its end."""

    sandbox_id: str
    workspace: str
    status: Status
    created_at: float
    ended_at: float | None
    cpus: int
    memory_mb: int
    metadata: Mapping[str, str]
    walls: Walls
    meter: Meter


@dataclass(frozen=True, slots=True)
class Usage:
    """The sum of what one or several sandboxes have used. Times in Unix seconds."""

    wall_seconds: Mapping[str, float] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    memory_provisioned_mib_seconds: float = 0.0
    memory_used_mib_seconds: float = 0.0
    disk_mib_seconds: float = 0.0
    disk_bytes: int = 0
    snapshot_bytes: int = 0
    exec_count: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    starts: int = 0
    first_started_at: float | None = None
    last_started_at: float | None = None


def usage_of(one: Metered, now: float, snapshot_bytes: int = 0) -> Usage:
    """What one sandbox has used until `now`."""
    seconds = until(one.walls, one.status, now)
    ended = one.status is Status.DELETED
    meter = one.meter if ended else charge(one.meter, now)
    held = sum(seconds.get(status.value, 0.0) for status in HOLDING_MEMORY)
    return Usage(
        wall_seconds=seconds,
        cpu_seconds=meter.cpu_seconds,
        memory_provisioned_mib_seconds=one.memory_mb * held,
        memory_used_mib_seconds=meter.memory_used_mib_seconds,
        disk_mib_seconds=meter.disk_mib_seconds,
        disk_bytes=0 if ended else meter.disk_bytes,
        snapshot_bytes=snapshot_bytes,
        exec_count=meter.exec_count,
        bytes_in=meter.bytes_in,
        bytes_out=meter.bytes_out,
        starts=one.walls.starts,
        first_started_at=one.walls.first_start,
        last_started_at=one.walls.last_start,
    )


_SUMMED: Final = tuple(
    f.name for f in fields(Usage) if f.name not in {"wall_seconds", "first_started_at", "last_started_at"}
)


def add(one: Usage, other: Usage) -> Usage:
    """Both together."""
    seconds = dict(one.wall_seconds)
    for status, more in other.wall_seconds.items():
        seconds[status] = seconds.get(status, 0.0) + more
    firsts = [t for t in (one.first_started_at, other.first_started_at) if t is not None]
    lasts = [t for t in (one.last_started_at, other.last_started_at) if t is not None]
    return Usage(
        wall_seconds=seconds,
        first_started_at=min(firsts, default=None),
        last_started_at=max(lasts, default=None),
        **{name: getattr(one, name) + getattr(other, name) for name in _SUMMED},
    )
