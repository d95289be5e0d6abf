"""Budgets: creates that fail, and servers that end."""

from __future__ import annotations

import asyncio

import pytest
from app_host import FULL, Host
from app_states import status
from budget_kit import Events, becomes, entry_of, fork, gone, refused, work

from cloche_server.core.budgets import Budget
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from kit.fake_engine import settle


@pytest.mark.parametrize("call", ["Engine.launch", "Machine.restore", "Guest.renew"])
async def test_a_create_that_fails_leaves_no_account(host: Host, call: str) -> None:
    host.world.fault[call] = ClocheError("host.unsupported", "broken")
    with pytest.raises(ClocheError):
        await host.create(budget=Budget(cpu_seconds=10))
    assert await host.meters._store.accounts() == []
    host.budgets.look()
    await host.meters.flush()
    assert await host.meters._store.accounts() == []
    assert await host.left() == []


async def test_the_next_server_knows_them(host: Host, second: Host) -> None:
    """Limits, what was used by whom, who was told, and how long the grace lasts."""
    parent = await host.create(budget=Budget(cpu_seconds=100, warn_at=0.1, grace_seconds=60))
    (child,) = await fork(host, parent, 1)
    ended = (await fork(host, parent, 1))[0]
    held = await host.create(budget=Budget(cpu_seconds=1, grace_seconds=60))
    for one, seconds in ((parent, 10), (child, 20), (ended, 5), (held, 2)):
        work(host, one, seconds)
    host.budgets.look()
    await becomes(host, held, Status.PAUSED)
    await host.meters.sample()
    await host.meters.flush()
    await host.lifecycle.delete("w", ended.id)  # and nobody has written that it belonged to them
    await host.supervisor.close()
    second.clock.time = host.clock.time + 50
    told: Events = []
    second.budgets.on_event = lambda entry, kind, payload: told.append((entry.record.id, kind, payload))
    await second.take_over()
    standing = await second.spending.get("w", child.id)
    assert (standing.used.cpu_seconds, standing.members) == (35, tuple(sorted([parent.id, child.id])))
    second.budgets.look()
    assert told == [], "that was told before"
    await refused(second, held, second.sleep.resume("w", held.id))
    second.clock.time += 10
    second.budgets.look()
    await gone(second, held)
    assert status(second, parent.id) is Status.RUNNING


async def test_a_budget_given_later_counts_from_then_also_for_the_next_server(host: Host, second: Host) -> None:
    """The last one was killed before it had written what was counted until then."""
    record = await host.create()
    await host.meters.flush()
    for _ in range(100):
        host.access.count_exec(entry_of(host, record))
    await host.spending.set("w", record.id, Budget(exec_count=2))
    await host.supervisor.close()
    second.clock.time = host.clock.time
    await second.take_over()
    for _ in range(2):
        second.access.count_exec(entry_of(second, record))
    with pytest.raises(ClocheError):
        second.access.count_exec(entry_of(second, record))


async def test_who_leaves_an_account_leaves_what_was_used_also_for_the_next_server(host: Host, second: Host) -> None:
    parent = await host.create(budget=Budget(cpu_seconds=30))
    (child,) = await fork(host, parent, 1)
    work(host, child, 20)
    await host.spending.remove("w", child.id)
    await host.supervisor.close()
    second.clock.time = host.clock.time
    await second.take_over()
    assert (await second.spending.get("w", parent.id)).used.cpu_seconds == 20


async def test_a_full_disk_keeps_no_server_from_starting(
    host: Host, second: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await host.create(budget=Budget(exec_count=2))
    await host.supervisor.close()

    async def full(*_: object) -> None:
        raise FULL

    write = second.meters._store.write
    monkeypatch.setattr(second.meters._store, "write", full)
    await second.take_over()
    await second.lifecycle.delete("w", record.id)
    monkeypatch.setattr(second.meters._store, "write", write)
    await second.meters.flush()
    assert (await second.meters.sum("w")).count == 1


async def test_accounts_of_nobody_go_at_a_start(host: Host, second: Host) -> None:
    record = await host.create(budget=Budget(cpu_seconds=100))
    await host.lifecycle.delete("w", record.id)
    await host.supervisor.close()
    assert len(await host.meters._store.accounts()) == 1
    await second.take_over()
    assert await second.meters._store.accounts() == []


async def test_the_background_task_holds_and_ends(host: Host, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche_server.app.budget.SHORTEST", 0.0)
    running = asyncio.ensure_future(host.budgets.run())
    record = await host.create(budget=Budget(bytes_out=10, grace_seconds=60))
    await settle(lambda: entry_of(host, record).traffic.alarm <= 10)
    entry_of(host, record).traffic.out(10)
    await becomes(host, record, Status.PAUSED)
    assert not running.done()
    running.cancel()
