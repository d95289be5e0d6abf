"""Prices, and the two ends that a sandbox may have."""

from __future__ import annotations

import pytest

from cloche_server.core.budgets import Amounts, Budget, reached, used_up, warns
from cloche_server.core.expiry import expires_at, lifetime_end
from cloche_server.core.meters import Usage
from cloche_server.core.prices import MONTH, Prices, cost_of


def test_costs() -> None:
    usage = Usage(cpu_seconds=7200, memory_provisioned_mib_seconds=512 * 3600, disk_mib_seconds=2048 * MONTH)
    assert cost_of(usage, Prices()) is None
    cost = cost_of(usage, Prices("EUR", cpu_hour=0.05, memory_gib_hour=0.01, disk_gib_month=0.2))
    assert cost is not None
    assert (cost.currency, cost.cpu, cost.memory, cost.disk) == ("EUR", pytest.approx(0.1), pytest.approx(0.005), 0.4)
    assert cost.total == pytest.approx(0.505)


@pytest.mark.parametrize(
    ("wanted", "most", "parent", "end"),
    [
        (0, 0, None, None),
        (60, 0, None, 160),
        (0, 60, None, 160),
        (30, 60, None, 130),
        (90, 60, None, 160),
        (0, 0, 120, 120),
        (60, 0, 120, 120),
        (10, 0, 120, 110),
    ],
)
def test_the_end_that_nothing_moves(wanted: int, most: int, parent: float | None, end: float | None) -> None:
    assert lifetime_end(100, wanted, most, parent) == end


def test_a_ttl_never_goes_beyond_it() -> None:
    assert expires_at(100, 60, False) == 160
    assert expires_at(100, 60, False, 130) == 130
    assert expires_at(100, 10, False, 130) == 110
    assert expires_at(100, 60, True, 130) is None
    assert expires_at(100, 0, False, 130) is None


def test_the_last_command_that_is_allowed_may_run() -> None:
    budget = Budget(exec_count=3, cpu_seconds=10, warn_at=0.5)
    assert warns(budget, Amounts(exec_count=1)) is None
    assert warns(budget, Amounts(exec_count=2)) == "exec_count"
    assert reached(budget, Amounts(exec_count=3)) is None
    assert used_up(budget, Amounts(exec_count=3)) == ["exec_count"]
    assert reached(budget, Amounts(cpu_seconds=10)) == "cpu_seconds"
