"""Budgets: limits on what the sandboxes of one account may use together. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from cloche_server.core.lifecycle import Status
from cloche_server.core.meters import Metered
from cloche_server.core.walls import until

LIMITS: Final = ("cpu_seconds", "wall_seconds", "exec_count", "bytes_out")
#: Limits of things that are counted one by one.
WHOLE: Final = frozenset({"exec_count", "bytes_out"})
#: A VMM has threads beside those of its vCPUs.
MORE_THREADS: Final = 1


@dataclass(frozen=True, slots=True)
class Amounts:
    """What counts against a budget. `wall_seconds`: time running."""

    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    exec_count: int = 0
    bytes_out: int = 0

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(*(getattr(self, name) + getattr(other, name) for name in LIMITS))

    def minus(self, other: Amounts) -> Amounts:
        return Amounts(*(max(0, getattr(self, name) - getattr(other, name)) for name in LIMITS))


def amounts_of(one: Metered, now: float) -> Amounts:
    """What one sandbox has used so far of what budgets limit."""
    running = until(one.walls, one.status, now).get(Status.RUNNING.value, 0.0)
    return Amounts(one.meter.cpu_seconds, running, one.meter.exec_count, one.meter.bytes_out)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits; None is none. `warn_at`: the part of a limit that is told of. `grace_seconds`: between the pause at a
    limit and the end."""

    cpu_seconds: float | None = None
    wall_seconds: float | None = None
    exec_count: int | None = None
    bytes_out: int | None = None
    warn_at: float = 0.8
    grace_seconds: float = 60.0

    def limits(self) -> dict[str, float]:
        return {name: limit for name in LIMITS if (limit := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Account:
    """A budget and what has been used of it by members that are none any more. `offsets`: what a member had used before
    it became one. `exceeded_at`: since when its members may not run, and `exceeded_by` which limit did it."""

    id: str
    workspace: str
    budget: Budget
    closed: Amounts = field(default_factory=Amounts)
    offsets: Mapping[str, Amounts] = field(default_factory=dict)
    warned: bool = False
    exceeded_at: float | None = None
    exceeded_by: str | None = None

    @property
    def ends_at(self) -> float | None:
        """When its members are deleted, unless the budget is raised before."""
        return None if self.exceeded_at is None else self.exceeded_at + self.budget.grace_seconds


def used_up(budget: Budget, used: Amounts) -> list[str]:
    """The limits of which nothing is left."""
    return [name for name, limit in budget.limits().items() if getattr(used, name) >= limit]


def reached(budget: Budget, used: Amounts) -> str | None:
    """The limit at which the members are paused. The last command that is allowed may run to its end: `exec_count` is
    reached by the next one that is asked for."""
    return next((name for name in used_up(budget, used) if name != "exec_count"), None)


def warns(budget: Budget, used: Amounts) -> str | None:
    """The limit that is nearly reached."""
    limits = budget.limits().items()
    return next((name for name, limit in limits if getattr(used, name) >= budget.warn_at * limit), None)


def left(budget: Budget, used: Amounts) -> dict[str, float]:
    """What may still be used."""
    return {name: max(0, limit - getattr(used, name)) for name, limit in budget.limits().items()}


def earliest(account: Account, used: Amounts, running: int, cpus: int) -> float:
    """Seconds in which no limit and no warning can come that has not come yet, with `running` members that have `cpus`
    together. Infinite when none is measured by time."""
    budget, soonest = account.budget, math.inf
    for name, rate in (("cpu_seconds", cpus + MORE_THREADS * running), ("wall_seconds", running)):
        limit = getattr(budget, name)
        if limit is None or rate == 0:
            continue
        for part in (1.0,) if account.warned else (budget.warn_at, 1.0):
            soonest = min(soonest, max(0.0, part * limit - getattr(used, name)) / rate)
    return soonest


def divide(budget: Budget, used: Amounts, parts: int) -> tuple[Budget, Budget]:
    """What is left in `parts` equal parts: the budget with one of them, and one of the others. What cannot be divided
    stays with the first."""
    mine: dict[str, float] = {}
    share: dict[str, float] = {}
    for name, rest in left(budget, used).items():
        share[name] = int(rest) // parts if name in WHOLE else rest / parts
        mine[name] = getattr(budget, name) - share[name] * (parts - 1)
    return replace(budget, **mine), replace(budget, **share)  # type: ignore[arg-type]


def gather(budget: Budget, share: Budget, times: int) -> Budget:
    """With shares that nobody took."""
    grown = {name: limit + times * (getattr(share, name) or 0) for name, limit in budget.limits().items()}
    return replace(budget, **grown)  # type: ignore[arg-type]
