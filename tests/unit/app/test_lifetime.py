"""The end that nothing moves, beside the TTL; and fork names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from app_host import Crew, Host, assemble
from app_states import status

from cloche_server.app.entry import Entry
from cloche_server.app.fork import ForkRequest
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import Sandbox, TerminationReason
from cloche_server.store.db import Database
from kit.fake_engine import World, settle

pytestmark = pytest.mark.usefixtures("quick")


async def ended(host: Host, record: Sandbox) -> TerminationReason:
    await settle(lambda: host.supervisor.get(record.id) is None)
    past = await host.store.get(record.id)
    assert past is not None
    assert past.termination is not None
    return past.termination.reason


async def test_no_renewal_resume_wake_or_start_passes_it(host: Host) -> None:
    record = await host.create(ttl_seconds=60, max_lifetime_seconds=100)
    end = host.clock.time + 100
    assert (record.ends_at, record.expires_at) == (end, end - 40)
    host.clock.time += 50
    for ttl in (3600, 0, 55):
        _, renewed = await host.lifecycle.set_ttl("w", record.id, ttl, None)
        assert (renewed.expires_at or end, renewed.ends_at) == (end, end)
    await host.sleep.pause("w", record.id)
    resumed = await host.sleep.resume("w", record.id)
    await host.sleep.hibernate("w", record.id)
    woken = await host.sleep.wake("w", record.id)
    await host.power.stop("w", record.id, 5)
    started = await host.power.start("w", record.id)
    _, kept = await host.lifecycle.set_ttl("w", record.id, None, True)
    assert [one.deadline for one in (resumed, woken, started, kept)] == [end] * 4
    assert kept.expires_at is None
    host.clock.time = end - 1
    await asyncio.sleep(0.05)
    assert status(host, record.id) is Status.RUNNING
    host.clock.time = end
    assert await ended(host, record) is TerminationReason.MAX_LIFETIME
    assert await host.left() == []


@pytest.mark.parametrize("state", ["paused", "hibernated", "stopped"])
async def test_a_persistent_one_ends_in_every_state(host: Host, state: str) -> None:
    record = await host.create(persistent=True, max_lifetime_seconds=100)
    assert record.expires_at is None
    move = {"paused": host.sleep.pause, "hibernated": host.sleep.hibernate}
    if state == "stopped":
        await host.power.stop("w", record.id, 5)
    else:
        await move[state]("w", record.id)
    host.clock.time += 100
    assert await ended(host, record) is TerminationReason.MAX_LIFETIME


async def test_a_ttl_that_is_shorter_comes_first(host: Host) -> None:
    record = await host.create(ttl_seconds=60, max_lifetime_seconds=100)
    host.clock.time += 60
    assert await ended(host, record) is TerminationReason.TTL


async def test_a_bound_for_all(tmp_path: Path, database: Database, world: World, crew: Crew) -> None:
    host = assemble(tmp_path, database, world, crew, max_lifetime_seconds=100)
    for asked, seconds in ((0, 100), (60, 60)):
        record = await host.create(persistent=True, max_lifetime_seconds=asked)
        assert record.ends_at == host.clock.time + seconds


async def test_children_end_with_their_parent_or_before(host: Host) -> None:
    parent = await host.create(max_lifetime_seconds=100)
    host.clock.time += 30
    for asked, end in ((0, parent.ends_at), (10_000, parent.ends_at), (20, host.clock.time + 20)):
        request = ForkRequest(max_lifetime_seconds=asked, persistent=True)
        (child,) = (await host.forks.make("w", parent.id, request)).children
        assert child.ends_at == end
    free = await host.create()
    (child,) = (await host.forks.make("w", free.id, ForkRequest(max_lifetime_seconds=20))).children
    assert child.ends_at == host.clock.time + 20


async def test_it_passes_while_no_server_runs(host: Host, second: Host) -> None:
    record = await host.create(persistent=True, max_lifetime_seconds=100)
    await host.supervisor.close()
    second.clock.time = host.clock.time + 101
    await second.take_over()
    assert await ended(second, record) is TerminationReason.MAX_LIFETIME
    assert await second.left() == []


async def test_no_number_of_calls_keeps_the_end_from_coming(host: Host) -> None:
    """Whoever calls without a pause always has something in the queue of the sandbox."""
    record = await host.create(ttl_seconds=1000, max_lifetime_seconds=100)
    entry = host.supervisor.get(record.id)
    assert entry is not None

    async def flood(entry: Entry) -> None:
        while host.supervisor.get(record.id) is entry:
            asked = [asyncio.ensure_future(host.lifecycle.set_ttl("w", record.id, 1000, None)) for _ in range(5)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for one in asked:
                one.add_done_callback(lambda done: done.cancelled() or done.exception())

    flooding = [asyncio.ensure_future(flood(entry)) for _ in range(3)]
    for _ in range(20):
        await asyncio.sleep(0)
        host.clock.time += 10
    assert await ended(host, record) is TerminationReason.MAX_LIFETIME
    for one in flooding:
        one.cancel()


async def test_a_renewal_in_time_counts_and_one_that_is_too_late_does_not(host: Host) -> None:
    record = await host.create(ttl_seconds=50)
    host.clock.time += 49
    await host.lifecycle.set_ttl("w", record.id, 50, None)
    host.clock.time += 49
    await asyncio.sleep(0.05)
    assert status(host, record.id) is Status.RUNNING
    host.clock.time += 1
    assert await ended(host, record) is TerminationReason.TTL
    with pytest.raises(ClocheError, match="not found"):
        await host.lifecycle.set_ttl("w", record.id, 50, None)


async def test_a_fork_may_have_a_name(host: Host) -> None:
    parent = await host.create(name="parent")
    (child,) = (await host.forks.make("w", parent.id, ForkRequest(name="child"))).children
    assert child.name == "child"
    captured = len(host.world.captured)
    for name, other in (("child", child), ("parent", parent)):
        with pytest.raises(ClocheError) as told:
            await host.forks.make("w", parent.id, ForkRequest(name=name))
        assert (told.value.code, told.value.details["id"]) == ("sandbox.name_taken", other.id)
    assert len(host.world.captured) == captured, "its parent did not stand still for that"
    twice = [host.forks.make("w", parent.id, ForkRequest(name="race")) for _ in range(2)]
    made = await asyncio.gather(*twice, return_exceptions=True)
    assert sorted(type(one).__name__ for one in made) == ["ClocheError", "Forked"]
    assert await host.untrue() == []
