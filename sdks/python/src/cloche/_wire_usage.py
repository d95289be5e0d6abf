"""Between the JSON of the API and the records of `usage`: pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any, Final

from ._wire import Json, given, record, records, required, timestamp
from .usage import Budget, BudgetStatus, Cost, Usage, UsageGroup, UsageSum

_FLOATS: Final = ("cpu_seconds", "memory_provisioned_mib_seconds", "memory_used_mib_seconds", "disk_mib_seconds")
_COUNTS: Final = ("disk_bytes", "snapshot_bytes", "exec_count", "bytes_in", "bytes_out", "starts")
_TIMES: Final = ("first_started_at", "last_started_at", "ended_at")


def budget_body(budget: Budget | Mapping[str, float] | None) -> dict[str, Any] | None:
    """A budget as it is sent; fields that were not given are left to the server."""
    if budget is None:
        return None
    return given(**(asdict(budget) if isinstance(budget, Budget) else dict(budget)))


def moment(value: datetime | str | None) -> str | None:
    """A time as it is sent. One without a time zone is refused, as it would mean another moment elsewhere."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("the time needs a time zone, such as datetime.now(UTC)")
        return value.isoformat()
    return value


def usage(data: Json) -> Usage:
    """What was used."""
    cost = data.get("cost")
    known: dict[str, Any] = {name: float(data.get(name) or 0) for name in _FLOATS}
    known |= {name: int(data.get(name) or 0) for name in _COUNTS}
    known |= {name: timestamp(data.get(name)) for name in _TIMES}
    return Usage(
        wall_seconds={str(name): float(seconds) for name, seconds in record(data.get("wall_seconds") or {}).items()},
        cost=_cost(cost) if isinstance(cost, Mapping) else None,
        raw=data,
        **known,
    )


def _cost(data: Json) -> Cost:
    amounts = {name: float(data.get(name) or 0) for name in ("cpu", "memory", "disk", "total")}
    return Cost(str(data.get("currency") or ""), **amounts)


def usage_sum(data: Json) -> UsageSum:
    """What several have used."""
    groups = tuple(
        UsageGroup(one.get("value"), int(one.get("count") or 0), usage(record(one.get("usage") or {})))
        for one in records(data.get("groups") or [])
    )
    return UsageSum(int(data.get("count") or 0), usage(record(required(data, "usage"))), groups)


def budget_status(data: Json) -> BudgetStatus:
    """How a budget stands."""
    return BudgetStatus(
        id=str(required(data, "id")),
        budget=Budget(**{f.name: data.get(f.name) for f in fields(Budget)}),
        used=dict(data.get("used") or {}),
        left=dict(data.get("left") or {}),
        status=str(data.get("status") or ""),
        exceeded_by=data.get("exceeded_by"),
        exceeded_at=timestamp(data.get("exceeded_at")),
        deletes_at=timestamp(data.get("deletes_at")),
        sandboxes=tuple(data.get("sandboxes") or ()),
        raw=data,
    )
