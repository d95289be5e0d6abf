"""What sandboxes have used, and budgets: frozen records, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

__all__ = ["Budget", "BudgetStatus", "Cost", "Usage", "UsageGroup", "UsageSum"]


@dataclass(frozen=True, slots=True)
class Cost:
    """By the prices of the server: of active CPU time, provisioned memory, and what the disk took."""

    currency: str
    cpu: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sandbox, or several together, have used since their creation. `raw` holds the whole answer.

    `wall_seconds` is by the state it was in. `cost` is there when the server has prices.
    """

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
    first_started_at: datetime | None = None
    last_started_at: datetime | None = None
    ended_at: datetime | None = None
    cost: Cost | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class UsageGroup:
    """So many sandboxes with the same value of a label; None: without it."""

    value: str | None
    count: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class UsageSum:
    """The usage of many sandboxes, and by the values of one label when that was asked for."""

    count: int
    usage: Usage
    groups: tuple[UsageGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class Budget:
    """What a sandbox may use; at least one limit.

    `wall_seconds` is time running. At `warn_at` of a limit the server tells of it, at the limit the sandbox is paused,
    and when the budget is not raised within `grace_seconds` it is deleted.
    """

    cpu_seconds: float | None = None
    wall_seconds: float | None = None
    exec_count: int | None = None
    bytes_out: int | None = None
    warn_at: float | None = None
    grace_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """A budget as it stands. `id` is the same for all sandboxes that share it. `status`: `ok`, `warned`, `exceeded`."""

    id: str
    budget: Budget
    used: Mapping[str, float]
    left: Mapping[str, float]
    status: str
    exceeded_by: str | None = None
    exceeded_at: datetime | None = None
    deletes_at: datetime | None = None
    sandboxes: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
