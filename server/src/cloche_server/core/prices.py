"""What usage costs, by a table of prices. Without prices there are no costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cloche_server.core.meters import Usage

#: A month of storage is thirty days.
MONTH: Final = 30 * 86400


@dataclass(frozen=True, slots=True)
class Prices:
    """0: not charged."""

    currency: str = "USD"
    cpu_hour: float = 0.0
    memory_gib_hour: float = 0.0
    disk_gib_month: float = 0.0

    @property
    def any(self) -> bool:
        return bool(self.cpu_hour or self.memory_gib_hour or self.disk_gib_month)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of active CPU time, of memory that was provisioned, and of what the disk took."""

    currency: str
    cpu: float
    memory: float
    disk: float

    @property
    def total(self) -> float:
        return self.cpu + self.memory + self.disk


def cost_of(usage: Usage, prices: Prices) -> Cost | None:
    """None without prices."""
    if not prices.any:
        return None
    return Cost(
        prices.currency,
        usage.cpu_seconds / 3600 * prices.cpu_hour,
        usage.memory_provisioned_mib_seconds / 1024 / 3600 * prices.memory_gib_hour,
        usage.disk_mib_seconds / 1024 / MONTH * prices.disk_gib_month,
    )
