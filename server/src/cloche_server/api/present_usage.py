"""Usage and budgets as the JSON of the API."""

from __future__ import annotations

from typing import Any

from cloche_server.api.present import rfc3339, without_none
from cloche_server.app.budget_verbs import Standing
from cloche_server.app.meter import Sum
from cloche_server.core.budgets import WHOLE
from cloche_server.core.meters import Metered, Usage
from cloche_server.core.prices import Prices, cost_of
from cloche_server.settings import Settings

_AMOUNTS = ("memory_provisioned_mib_seconds", "memory_used_mib_seconds", "disk_mib_seconds", "cpu_seconds")
_COUNTS = ("disk_bytes", "snapshot_bytes", "exec_count", "bytes_in", "bytes_out", "starts")


def prices(settings: Settings) -> Prices:
    return Prices(
        settings.price_currency, settings.price_cpu_hour, settings.price_memory_gib_hour, settings.price_disk_gib_month
    )


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else rfc3339(seconds)


def totals(usage: Usage, table: Prices) -> dict[str, Any]:
    body: dict[str, Any] = {
        "wall_seconds": {status: round(seconds, 3) for status, seconds in usage.wall_seconds.items()},
        **{name: round(getattr(usage, name), 3) for name in _AMOUNTS},
        **{name: getattr(usage, name) for name in _COUNTS},
        "first_started_at": _time(usage.first_started_at),
        "last_started_at": _time(usage.last_started_at),
    }
    cost = cost_of(usage, table)
    if cost is not None:
        parts = {name: round(getattr(cost, name), 9) for name in ("cpu", "memory", "disk", "total")}
        body["cost"] = {"currency": cost.currency, **parts}
    return without_none(body)


def one(metered: Metered, usage: Usage, table: Prices) -> dict[str, Any]:
    about = {
        "sandbox_id": metered.sandbox_id,
        "status": metered.status.value,
        "created_at": rfc3339(metered.created_at),
        "ended_at": _time(metered.ended_at),
        "cpus": metered.cpus,
        "memory_mb": metered.memory_mb,
    }
    return {**without_none(about), **totals(usage, table)}


def summed(found: Sum, table: Prices) -> dict[str, Any]:
    return {
        "count": found.count,
        "usage": totals(found.usage, table),
        "groups": [
            without_none({"value": group.value, "count": group.count, "usage": totals(group.usage, table)})
            for group in found.groups
        ],
    }


def budget(standing: Standing) -> dict[str, Any]:
    account = standing.account
    used = {name: getattr(standing.used, name) for name in ("cpu_seconds", "wall_seconds", "exec_count", "bytes_out")}
    exceeded = account.exceeded_at is not None
    return without_none(
        {
            "id": account.id,
            **account.budget.limits(),
            "warn_at": account.budget.warn_at,
            "grace_seconds": account.budget.grace_seconds,
            "used": {name: amount if name in WHOLE else round(amount, 3) for name, amount in used.items()},
            "left": {n: int(rest) if n in WHOLE else round(rest, 3) for n, rest in standing.left.items()},
            "status": "exceeded" if exceeded else "warned" if account.warned else "ok",
            "exceeded_by": account.exceeded_by,
            "exceeded_at": _time(account.exceeded_at),
            "deletes_at": _time(account.ends_at),
            "sandboxes": list(standing.members),
        }
    )
