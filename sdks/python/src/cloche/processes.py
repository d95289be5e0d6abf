"""Processes of sandboxes: frozen records, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .models import Termination

__all__ = ["GuestProcess", "ProcessInfo", "ProcessTable", "Written"]


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that was started over the API. `raw` holds the whole answer.

    `status`: `running`, `exited`, or `lost` when its machine was stopped while it ran. `stdin`: `none`, `pipe`,
    `closed` or `pty`. `pty`: columns and rows. Of its output, `output_bytes` long, what begins at `kept_from` is kept.
    """

    process_id: str
    pid: int
    status: str
    name: str | None = None
    command: str | None = None
    started_at: datetime | None = None
    stdin: str = "none"
    pty: tuple[int, int] | None = None
    output_bytes: int = 0
    kept_from: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    exit_code: int | None = None
    duration_ms: float | None = None
    termination: Termination | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def running(self) -> bool:
        """It has not ended, as far as is known."""
        return self.status == "running"


@dataclass(frozen=True, slots=True)
class GuestProcess:
    """One of all processes in a sandbox. `process_id`: the process of the API that it belongs to."""

    pid: int
    ppid: int
    user: str
    state: str
    cpu_ms: float
    rss_kb: int
    name: str
    command: str
    process_id: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """Everything that runs in a sandbox. `truncated`: and more."""

    processes: Sequence[ProcessInfo]
    guest: Sequence[GuestProcess]
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """What a process has taken of its input. `closed`: it takes no more."""

    bytes: int
    closed: bool
