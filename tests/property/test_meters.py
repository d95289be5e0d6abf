"""Meters and budgets as arithmetic: nothing is lost in a cut, nothing is negative, nothing comes from a division."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.core.budgets import Account, Amounts, Budget, divide, earliest, gather, left, reached
from cloche_server.core.lifecycle import TRANSITIONS, Status
from cloche_server.core.meters import Meter, Usage, add, charge, read
from cloche_server.core.records import ProcessRef
from cloche_server.core.walls import Walls, moved, until

QUICK = settings(deadline=None, max_examples=60)
SECONDS = st.floats(0, 1e6, allow_nan=False)
MOVES = st.lists(st.tuples(st.floats(-1e5, 1e5, allow_nan=False), st.integers(0, 20)), max_size=20)


@QUICK
@given(st.floats(0, 1e9), st.lists(SECONDS, max_size=12), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_cut_changes_no_sum(start: float, cuts: list[float], memory: int, disk: int) -> None:
    meter = Meter(at=start, memory_bytes=memory, disk_bytes=disk)
    end = start + max(cuts, default=0.0)
    whole, cut = charge(meter, end), meter
    for moment in sorted(cuts):
        cut = charge(cut, start + moment)
    for name in ("memory_used_mib_seconds", "disk_mib_seconds"):
        assert math.isclose(getattr(whole, name), getattr(cut, name), rel_tol=1e-6, abs_tol=1e-3)
    assert cut.at == whole.at


@QUICK
@given(MOVES)
def test_time_in_all_states_is_the_age_and_never_negative(moves: list[tuple[float, int]]) -> None:
    """Also when the clock jumps to and fro: it counts on when it has come to where it was."""
    now = latest = 1e6
    walls, status = Walls(since=now), Status.CREATING
    for jump, choice in moves:
        now += jump
        latest = max(latest, now)
        targets = sorted(set(TRANSITIONS[status].values()))
        if status is Status.DELETED or not targets:
            break
        target = targets[choice % len(targets)]
        before = until(walls, status, now)
        walls, status = moved(walls, status, target, now), target
        assert all(seconds >= 0 for seconds in walls.seconds.values())
        assert all(walls.seconds.get(name, 0) >= seconds - 1e-6 for name, seconds in before.items())
        assert math.isclose(sum(walls.seconds.values()), latest - 1e6, rel_tol=1e-9, abs_tol=1e-4)


@QUICK
@given(st.lists(st.tuples(st.integers(1, 3), st.floats(-5, 100, allow_nan=False)), max_size=20), st.floats(0, 50))
def test_cpu_time_of_several_processes_never_shrinks(readings: list[tuple[int, float]], origin: float) -> None:
    meter = Meter(at=0, process=ProcessRef(0, 0), cpu_origin=origin, cpu_seen=origin)
    assert meter.cpu_seconds == 0
    for pid, cpu in readings:
        after = read(meter, ProcessRef(pid, 1), cpu)
        assert after.cpu_seconds >= meter.cpu_seconds - 1e-9
        meter = after


USAGES = st.builds(
    Usage,
    wall_seconds=st.dictionaries(st.sampled_from(["running", "paused"]), st.integers(0, 1000)),
    cpu_seconds=st.integers(0, 1000),
    exec_count=st.integers(0, 1000),
    first_started_at=st.none() | st.integers(0, 10),
    last_started_at=st.none() | st.integers(0, 10),
)


@QUICK
@given(USAGES, USAGES, USAGES)
def test_sums_do_not_depend_on_the_order(a: Usage, b: Usage, c: Usage) -> None:
    assert add(add(a, b), c) == add(a, add(b, c))
    assert add(a, b) == add(b, a)
    assert add(a, Usage()) == a


BUDGETS = st.builds(
    Budget,
    cpu_seconds=st.none() | st.floats(0.1, 1e5),
    wall_seconds=st.none() | st.floats(0.1, 1e5),
    exec_count=st.none() | st.integers(1, 10**6),
    bytes_out=st.none() | st.integers(1, 10**9),
    warn_at=st.floats(0.01, 1.0),
)
USED = st.builds(Amounts, st.floats(0, 1e5), st.floats(0, 1e5), st.integers(0, 10**6), st.integers(0, 10**9))


@QUICK
@given(BUDGETS, USED, st.integers(2, 17), st.data())
def test_a_division_makes_no_budget_and_loses_none(
    budget: Budget, used: Amounts, parts: int, data: st.DataObject
) -> None:
    mine, share = divide(budget, used, parts)
    before, after = left(budget, used), left(mine, used)
    for name, rest in before.items():
        together = after[name] + (parts - 1) * getattr(share, name)
        assert math.isclose(together, rest, rel_tol=1e-6, abs_tol=1e-3)
    unmade = data.draw(st.integers(0, parts - 1))
    grown = left(gather(mine, share, unmade), used)
    for name, rest in before.items():
        assert math.isclose(grown[name] + (parts - 1 - unmade) * getattr(share, name), rest, rel_tol=1e-6, abs_tol=1e-3)


@QUICK
@given(BUDGETS, USED, st.integers(1, 8), st.integers(1, 8), st.floats(0, 1))
def test_nothing_is_reached_before_the_next_look(
    budget: Budget, used: Amounts, running: int, cpus_each: int, part: float
) -> None:
    """Whatever the machines do until then, as long as no thread of theirs is on two cores at once."""
    cpus = running * cpus_each
    for_time = replace(budget, exec_count=None, bytes_out=None)
    if reached(for_time, used) is not None:
        return
    wait = earliest(Account("a", "w", for_time), used, running, cpus)
    if math.isinf(wait):
        assert for_time.limits() == {}
        return
    passed = part * wait * 0.999
    later = used.plus(Amounts(cpu_seconds=passed * (cpus + running), wall_seconds=passed * running))
    assert reached(for_time, later) is None
