"""Idle actions and waiting for a state."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from app_host import Host

from cloche_server.app.entry import Entry
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.records import IdleAction, TerminationReason
from kit.fake_engine import settle


@pytest.fixture
def done(host: Host) -> list[str]:
    """What was done to idle sandboxes, in place of the verbs."""
    found: list[str] = []

    async def on_idle(entry: Entry) -> None:
        found.append(entry.record.id)

    host.supervisor.on_idle = on_idle
    return found


async def entry_of(host: Host, **options: Any) -> Entry:
    record = await host.create(**options)
    entry = host.supervisor.get(record.id)
    assert entry is not None
    return entry


async def nudge(host: Host, entry: Entry) -> None:
    """Makes the task of a sandbox look at the clock."""
    await host.supervisor.change(entry, lambda record: record)
    await asyncio.sleep(0)


async def test_after_its_time_it_is_idle_and_not_before(host: Host, done: list[str]) -> None:
    entry = await entry_of(host, idle_seconds=10)
    host.clock.time += 9
    await nudge(host, entry)
    assert done == []
    host.clock.time += 1
    await nudge(host, entry)
    await settle(lambda: done == [entry.record.id])


async def test_without_a_time_never(host: Host, done: list[str]) -> None:
    entry = await entry_of(host)
    host.clock.time += 1e6
    await host.lifecycle.set_ttl("w", entry.record.id, 0, None)
    await nudge(host, entry)
    assert done == []


async def test_what_runs_keeps_it_awake_for_as_long_as_it_runs(host: Host, done: list[str]) -> None:
    entry = await entry_of(host, idle_seconds=10)
    with host.access.busy(entry):
        for _ in range(5):
            host.clock.time += 100
            await nudge(host, entry)
    assert done == []
    host.clock.time += 9
    await nudge(host, entry)
    assert done == []
    host.clock.time += 2
    await nudge(host, entry)
    await settle(lambda: len(done) == 1)


async def test_calls_count_and_reading_the_object_does_not(host: Host, done: list[str]) -> None:
    entry = await entry_of(host, idle_seconds=10)
    host.clock.time += 8
    await host.access.serving("w", entry.record.id)
    host.clock.time += 8
    await host.access.find("w", entry.record.id)
    host.access.list("w")
    await nudge(host, entry)
    assert done == []
    host.clock.time += 3
    await nudge(host, entry)
    await settle(lambda: len(done) == 1)


async def test_what_failed_is_tried_again_when_it_was_idle_once_more(host: Host) -> None:
    tries: list[float] = []

    async def on_idle(entry: Entry) -> None:
        tries.append(host.clock.time)
        raise ClocheError("host.disk_full", "x")

    host.supervisor.on_idle = on_idle
    entry = await entry_of(host, idle_seconds=10)
    for _ in range(3):
        host.clock.time += 5
        await nudge(host, entry)
        await settle(lambda: entry.mailbox.empty())
    assert len(tries) == 1
    assert entry.record.status is Status.RUNNING
    host.clock.time += 6
    await nudge(host, entry)
    await settle(lambda: len(tries) == 2)


async def test_it_can_be_changed_later(host: Host, done: list[str]) -> None:
    entry = await entry_of(host)
    host.clock.time += 50
    record = await host.lifecycle.set_idle("w", entry.record.id, 10, IdleAction.DELETE)
    assert (record.idle_seconds, record.idle_action) == (10, IdleAction.DELETE)
    host.clock.time += 9
    await nudge(host, entry)
    assert done == []
    record = await host.lifecycle.set_idle("w", entry.record.id, None, IdleAction.PAUSE)
    assert (record.idle_seconds, record.idle_action) == (10, IdleAction.PAUSE)


async def test_the_reason_of_an_idle_end_can_be_read_afterwards(host: Host) -> None:
    entry = await entry_of(host)
    host.supervisor.send(entry, Event.DELETE, reason=TerminationReason.IDLE)
    await settle(lambda: host.supervisor.get(entry.record.id) is None)
    with pytest.raises(ClocheError) as told:
        await host.access.find("w", entry.record.id)
    assert told.value.details["termination"]["reason"] == "idle"
    assert await host.left() == []


async def test_a_wait_for_what_is_so_answers_at_once(host: Host) -> None:
    record = await host.create()
    assert (await host.lifecycle.wait("w", record.id, frozenset({Status.RUNNING}), 0)).id == record.id


async def test_a_wait_ends_with_the_move_it_waits_for(host: Host) -> None:
    entry = await entry_of(host)
    waiting = asyncio.ensure_future(host.lifecycle.wait("w", entry.record.id, frozenset({Status.PAUSED}), 60))
    await asyncio.sleep(0)
    await host.supervisor.perform(entry, lambda: host.supervisor.move(entry, Event.PAUSE))
    assert (await waiting).status is Status.PAUSED


async def test_a_wait_ends_when_the_sandbox_fails_or_is_gone(host: Host) -> None:
    first, second = await entry_of(host), await entry_of(host)
    waits = [
        asyncio.ensure_future(host.lifecycle.wait("w", one.record.id, frozenset({Status.PAUSED}), 60))
        for one in (first, second)
    ]
    await asyncio.sleep(0)
    host.world.alive[first.record.id].die()
    assert (await waits[0]).status is Status.FAILED
    await host.lifecycle.delete("w", second.record.id)
    with pytest.raises(ClocheError) as told:
        await waits[1]
    assert told.value.code == "sandbox.not_found"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("action", "then"),
    [("pause", Status.PAUSED), ("hibernate", Status.HIBERNATED), ("stop", Status.STOPPED), ("delete", None)],
)
async def test_what_is_done_to_an_idle_one(host: Host, action: str, then: Status | None) -> None:
    """Each of them, and why can be read afterwards."""
    entry = await entry_of(host, idle_seconds=10, idle_action=IdleAction(action))
    host.clock.time += 10
    await nudge(host, entry)
    if then is None:
        await settle(lambda: host.supervisor.entries() == [])
        assert entry.record.termination is not None
        assert entry.record.termination.reason is TerminationReason.IDLE
        return
    await settle(lambda: entry.record.status is then)
    assert entry.record.status_reason == "idle"
    await settle(lambda: then is Status.PAUSED or not host.world.held)
    assert await host.untrue() == []


async def test_an_open_connection_to_a_port_is_activity(host: Host, done: list[str]) -> None:
    entry = await entry_of(host, idle_seconds=10)
    entry.open_streams = 1
    host.clock.time += 100
    await nudge(host, entry)
    assert done == []
    assert host.access.idle_seconds(entry) == 0
    entry.open_streams = 0
    entry.last_activity = host.clock.monotonic()
    host.clock.time += 10
    await nudge(host, entry)
    await settle(lambda: done == [entry.record.id])
