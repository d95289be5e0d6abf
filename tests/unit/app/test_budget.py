"""Budgets over a host in memory: told, paused, deleted; shared and split over forks; over restarts and races."""

from __future__ import annotations

import asyncio

import pytest
from app_host import FULL, Host
from app_states import status
from budget_kit import Events, becomes, entry_of, fork, gone, refused, work

from cloche_server.app.fork import ForkRequest
from cloche_server.app.stop import StopVerbs
from cloche_server.core.budgets import Budget
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import TerminationReason
from kit.fake_engine import Gate, settle


@pytest.fixture
def events(host: Host) -> Events:
    told: Events = []
    host.budgets.on_event = lambda entry, kind, payload: told.append((entry.record.id, kind, payload))
    return told


# ---------------------------------------------------------------- warn, pause, kill


async def test_told_then_paused_then_deleted(host: Host, events: Events) -> None:
    record = await host.create(budget=Budget(cpu_seconds=10, warn_at=0.5, grace_seconds=60))
    host.budgets.look()
    assert events == []
    work(host, record, 5)
    for _ in range(3):
        host.budgets.look()
    assert events == [(record.id, "budget.warning", {"limit": "cpu_seconds", "used": 5, "allowed": 10})]
    await host.access.serving("w", record.id)
    work(host, record, 5)
    host.budgets.look()
    await becomes(host, record, Status.PAUSED)
    assert entry_of(host, record).record.status_reason == "budget"
    assert not host.world.alive[record.id].runs
    await settle(lambda: len(events) == 2)
    assert [kind for _, kind, _ in events] == ["budget.warning", "budget.paused"]
    await refused(host, record, host.access.serving("w", record.id))
    await refused(host, record, host.sleep.resume("w", record.id))
    host.clock.time += 59
    host.budgets.look()
    assert status(host, record.id) is Status.PAUSED
    host.clock.time += 1
    for _ in range(3):
        host.budgets.look()
    await gone(host, record)
    assert [kind for _, kind, _ in events] == ["budget.warning", "budget.paused", "budget.exceeded"]
    past = await host.store.get(record.id)
    assert past is not None
    assert past.termination is not None
    assert past.termination.reason is TerminationReason.BUDGET
    host.budgets.look()
    await host.meters.flush()
    assert await host.meters._store.accounts() == []
    assert (await host.meters.usage("w", record.id))[1].cpu_seconds == 10
    assert await host.left() == []


@pytest.mark.parametrize("limit", ["wall_seconds", "bytes_out"])
async def test_other_limits(host: Host, limit: str) -> None:
    record = await host.create(budget=Budget(**{limit: 100}))
    host.budgets.look()
    if limit == "wall_seconds":
        host.clock.time += 40
        await host.sleep.pause("w", record.id)
        host.clock.time += 1000  # time asleep does not count
        await host.sleep.resume("w", record.id)
        host.clock.time += 59
    else:
        entry_of(host, record).traffic.out(99)
    host.budgets.look()
    await host.access.serving("w", record.id)
    host.clock.time += 1
    entry_of(host, record).traffic.out(1)
    host.budgets.look()
    await becomes(host, record, Status.PAUSED)


async def test_the_command_after_the_last_is_refused(host: Host) -> None:
    record = await host.create(budget=Budget(exec_count=2))
    entry = entry_of(host, record)
    for _ in range(2):
        host.access.count_exec(entry)
    host.budgets.look()
    assert status(host, record.id) is Status.RUNNING, "the last one may run to its end"
    with pytest.raises(ClocheError) as told:
        host.access.count_exec(entry)
    assert (told.value.code, told.value.details["limit"]) == ("budget.exceeded", "exec_count")
    assert entry.traffic.execs == 2
    host.budgets.look()
    await becomes(host, record, Status.PAUSED)


async def test_a_stream_rings_before_it_can_pass_the_limit(host: Host) -> None:
    record = await host.create(budget=Budget(bytes_out=1000, warn_at=0.5))
    host.budgets.look()
    traffic = entry_of(host, record).traffic
    host.budgets._poke.clear()
    traffic.out(499)
    assert not host.budgets._poke.is_set()
    traffic.out(1)
    assert host.budgets._poke.is_set()
    host.budgets.look()
    host.budgets._poke.clear()
    traffic.out(499)
    assert not host.budgets._poke.is_set()
    traffic.out(1)
    assert host.budgets._poke.is_set()


async def test_it_is_looked_at_when_it_could_be_reached(host: Host) -> None:
    record = await host.create(budget=Budget(cpu_seconds=100, warn_at=1.0))
    assert host.budgets.look() == 10
    work(host, record, 98)
    assert host.budgets.look() == pytest.approx(1.0), "one vCPU and the other threads of its machine"
    work(host, record, 1.99)
    assert host.budgets.look() == pytest.approx(0.2)


async def test_ttl_and_delete_work_on_a_sandbox_that_is_held(host: Host, quick: None) -> None:
    record = await host.create(budget=Budget(cpu_seconds=1, grace_seconds=1000), ttl_seconds=100)
    other = await host.create(budget=Budget(cpu_seconds=1))
    for one in (record, other):
        work(host, one, 1)
    host.budgets.look()
    for one in (record, other):
        await becomes(host, one, Status.PAUSED)
    await host.lifecycle.set_ttl("w", record.id, 200, None)
    await host.snapshots.remove("w", (await host.snapshots.take("w", other.id)).id)
    await host.lifecycle.delete("w", other.id)
    host.clock.time += 200
    await gone(host, record)
    assert await host.left() == []


@pytest.mark.parametrize("asleep", ["hibernated", "stopped"])
async def test_what_sleeps_is_not_started_and_goes_in_the_end(host: Host, asleep: str) -> None:
    record = await host.create(budget=Budget(cpu_seconds=10, grace_seconds=5))
    await host.spending.set("w", record.id, Budget(wall_seconds=5, grace_seconds=5))
    host.clock.time += 6
    power = StopVerbs(host.access, host.supervisor, host.machines, host.creator._catalog, host.capacity, host.clock)
    if asleep == "hibernated":
        await host.sleep.hibernate("w", record.id)
    else:
        await power.stop("w", record.id, 5)
    host.budgets.look()
    if asleep == "hibernated":
        await refused(host, record, host.sleep.wake("w", record.id))
        await refused(host, record, host.access.serving("w", record.id))
        await refused(host, record, host.forks.make("w", record.id, ForkRequest()))
    else:
        await refused(host, record, power.start("w", record.id))
    assert host.world.alive == {}
    host.clock.time += 5
    host.budgets.look()
    await gone(host, record)


# ---------------------------------------------------------------- raising


async def test_a_raise_lets_it_go_on(host: Host, events: Events) -> None:
    record = await host.create(budget=Budget(cpu_seconds=10, warn_at=0.9))
    work(host, record, 12)
    host.budgets.look()
    await becomes(host, record, Status.PAUSED)
    low = await host.spending.set("w", record.id, Budget(cpu_seconds=11))
    assert low.account.exceeded_at is not None, "that is used up as well"
    raised = await host.spending.set("w", record.id, Budget(cpu_seconds=24, warn_at=0.9))
    assert (raised.account.exceeded_at, raised.used.cpu_seconds, raised.left) == (None, 12, {"cpu_seconds": 12})
    host.clock.time += 1000
    host.budgets.look()
    assert status(host, record.id) is Status.PAUSED, "whoever raised it resumes it"
    await host.sleep.resume("w", record.id)
    work(host, record, 10)
    host.budgets.look()
    assert [kind for _, kind, _ in events].count("budget.warning") == 2, "told anew, for it was raised"
    await host.spending.remove("w", record.id)
    await host.spending.remove("w", record.id)
    work(host, record, 1000)
    host.budgets.look()
    assert status(host, record.id) is Status.RUNNING
    with pytest.raises(ClocheError) as told:
        await host.spending.get("w", record.id)
    assert told.value.code == "budget.not_found"


async def test_a_raise_in_time_stops_a_deletion_that_was_decided(host: Host) -> None:
    """The task of the sandbox is busy when its time is up; the raise comes before it looks."""
    record = await host.create(budget=Budget(cpu_seconds=10, grace_seconds=0))
    gate = host.world.gate["Machine.pause"] = Gate()
    pausing = asyncio.ensure_future(host.sleep.pause("w", record.id))
    await gate.reached.wait()
    work(host, record, 10)
    raising = asyncio.ensure_future(host.spending.set("w", record.id, Budget(cpu_seconds=100)))
    await asyncio.sleep(0)
    host.budgets.look()
    gate.open.set()
    await pausing
    assert (await raising).account.exceeded_at is None
    await settle(lambda: host.supervisor.get(record.id) is not None and entry_of(host, record).mailbox.empty())
    assert status(host, record.id) is Status.PAUSED


async def test_a_raise_that_comes_too_late_is_told(host: Host) -> None:
    record = await host.create(budget=Budget(cpu_seconds=10, grace_seconds=0))
    gate = host.world.gate["Machine.kill"] = Gate()
    work(host, record, 10)
    host.budgets.look()
    await gate.reached.wait()
    with pytest.raises(ClocheError) as told:
        await host.spending.set("w", record.id, Budget(cpu_seconds=100))
    assert told.value.code in {"budget.exceeded", "sandbox.not_found"}
    gate.open.set()
    await gone(host, record)


async def test_a_budget_given_later_counts_from_then(host: Host) -> None:
    record = await host.create()
    work(host, record, 50)
    with pytest.raises(ClocheError, match="has no budget"):
        await host.spending.get("w", record.id)
    given = await host.spending.set("w", record.id, Budget(cpu_seconds=10))
    assert (given.used.cpu_seconds, given.members) == (0, (record.id,))
    work(host, record, 9)
    host.budgets.look()
    assert status(host, record.id) is Status.RUNNING
    work(host, record, 1)
    host.budgets.look()
    await becomes(host, record, Status.PAUSED)


# ---------------------------------------------------------------- forks


async def test_all_who_share_are_counted_and_held_together(host: Host) -> None:
    parent = await host.create(budget=Budget(cpu_seconds=30))
    work(host, parent, 10)
    children = await fork(host, parent, 2)
    family = [parent, *children]
    standing = await host.spending.get("w", children[0].id)
    assert standing.members == tuple(sorted(one.id for one in family))
    for one in family:
        work(host, one, 5)
    assert (await host.spending.get("w", parent.id)).used.cpu_seconds == 25
    await host.lifecycle.delete("w", children[1].id)
    assert (await host.spending.get("w", parent.id)).used.cpu_seconds == 25, "what it used stays used"
    await host.spending.remove("w", parent.id)
    assert (await host.spending.get("w", children[0].id)).used.cpu_seconds == 25
    work(host, children[0], 5)
    host.budgets.look()
    await becomes(host, children[0], Status.PAUSED)
    assert status(host, parent.id) is Status.RUNNING, "it left"


async def test_what_is_left_is_split(host: Host) -> None:
    parent = await host.create(budget=Budget(cpu_seconds=40, exec_count=10))
    work(host, parent, 10)
    for _ in range(3):
        host.access.count_exec(entry_of(host, parent))
    children = await fork(host, parent, 2, "split")
    mine = await host.spending.get("w", parent.id)
    assert mine.left == {"cpu_seconds": 10, "exec_count": 3}
    for child in children:
        standing = await host.spending.get("w", child.id)
        assert (standing.left, standing.members) == ({"cpu_seconds": 10, "exec_count": 2}, (child.id,))
    work(host, children[0], 10)
    host.budgets.look()
    await becomes(host, children[0], Status.PAUSED)
    assert status(host, children[1].id) is Status.RUNNING
    assert status(host, parent.id) is Status.RUNNING


async def test_a_split_of_which_nothing_came_gives_all_back(host: Host) -> None:
    parent = await host.create(budget=Budget(cpu_seconds=40, exec_count=10))
    host.world.fault["Engine.launch"] = FULL
    with pytest.raises(ClocheError):
        await fork(host, parent, 3, "split")
    del host.world.fault["Engine.launch"]
    assert (await host.spending.get("w", parent.id)).left == {"cpu_seconds": 40, "exec_count": 10}
    host.budgets.look()
    await host.meters.flush()
    assert [account.budget.limits() for account in await host.meters._store.accounts()] == [
        {"cpu_seconds": 40, "exec_count": 10}
    ]


async def test_what_a_split_gives_back_is_there_to_go_on_with(host: Host) -> None:
    """The part of the parent was used up while the children were made, of which nothing came."""
    parent = await host.create(budget=Budget(cpu_seconds=40, grace_seconds=60))
    gate = host.world.gate["Engine.launch"] = Gate()
    forking = asyncio.ensure_future(fork(host, parent, 3, "split"))
    await gate.reached.wait()
    work(host, parent, 10)
    host.budgets.look()
    await becomes(host, parent, Status.PAUSED)
    host.world.fault["Machine.restore"] = FULL
    gate.open.set()
    with pytest.raises(ClocheError):
        await forking
    standing = await host.spending.get("w", parent.id)
    assert (standing.left, standing.account.exceeded_at) == ({"cpu_seconds": 30}, None)
    host.clock.time += 1000
    host.budgets.look()
    await host.sleep.resume("w", parent.id)
    host.budgets.look()
    assert status(host, parent.id) is Status.RUNNING


async def test_splits_that_cannot_be(host: Host) -> None:
    without = await host.create()
    with pytest.raises(ClocheError, match="no budget to split"):
        await fork(host, without, 1, "split")
    assert await fork(host, without, 1) != []
    little = await host.create(budget=Budget(exec_count=2))
    with pytest.raises(ClocheError, match="too little for 4 parts"):
        await fork(host, little, 3, "split")
    assert (await host.spending.get("w", little.id)).left == {"exec_count": 2}


async def test_a_snapshot_takes_no_budget_along(host: Host) -> None:
    parent = await host.create(budget=Budget(cpu_seconds=10))
    snapshot = await host.snapshots.take("w", parent.id)
    async with host.snapshots.source("w", snapshot.id) as (_, source):
        other = await host.create(source=source, snapshot_id=snapshot.id)
    assert other.account_id is None
