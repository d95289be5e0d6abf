"""Stop, start and restart over a host in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from app_host import Host

from cloche_server.app.room import Room
from cloche_server.app.stop import StopVerbs
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import BootMode, Sandbox
from kit.fake_engine import settle


@pytest.fixture
def power(host: Host) -> StopVerbs:
    catalog: Any = host.creator._catalog
    return StopVerbs(host.access, host.supervisor, host.machines, catalog, Room(host.capacity, host.pools), host.clock)


def status(host: Host, record: Sandbox) -> Status:
    entry = host.supervisor.get(record.id)
    assert entry is not None
    return entry.record.status


async def test_a_stop_keeps_the_disk_and_gives_the_memory_back(host: Host, power: StopVerbs) -> None:
    record = await host.create()
    before = host.capacity.usage()
    stopped = await power.stop("w", record.id, 5)
    assert (stopped.status, stopped.process) == (Status.STOPPED, None)
    assert host.world.alive == {}
    after = host.capacity.usage()
    assert (after.memory_mb, after.disk_mb) == (0, before.disk_mb)
    assert host.machines.layers.path(record.layer_id).exists()
    assert (await power.stop("w", record.id, 5)).status is Status.STOPPED
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


async def test_a_start_boots_the_same_disk_and_counts_the_ttl_anew(host: Host, power: StopVerbs) -> None:
    record = await host.create(ttl_seconds=1000)
    await power.stop("w", record.id, 5)
    host.clock.time += 900
    started = await power.start("w", record.id)
    assert (started.status, started.boot_mode, started.cold) == (Status.RUNNING, BootMode.COLD, True)
    assert started.expires_at == host.clock.time + 1000
    machine = host.world.alive[record.id]
    assert machine.disk.stem == record.layer_id
    assert started.process == machine.ref
    renewal = [request for name, request in host.world.renewals if name == record.id][-1]
    assert renewal.entropy
    assert (await power.start("w", record.id)).version == started.version, "it runs already"
    machine.die()
    await settle(lambda: status(host, record) is Status.FAILED)
    again = await power.start("w", record.id)
    assert (again.status, again.termination) == (Status.RUNNING, None)


async def test_what_does_not_end_in_time_is_told_and_not_killed(host: Host, power: StopVerbs) -> None:
    record = await host.create()
    host.world.hangs = True
    with pytest.raises(ClocheError) as told:
        await power.stop("w", record.id, 0.05)
    assert told.value.code == "sandbox.stop_timeout"
    assert status(host, record) is Status.STOPPING
    assert set(host.world.alive) == {record.id}
    host.world.alive[record.id].die()
    await settle(lambda: status(host, record) is Status.STOPPED)
    assert (await power.start("w", record.id)).status is Status.RUNNING
    stopped = await power.stop("w", record.id, 0.05, force=True)
    assert stopped.status is Status.STOPPED
    assert host.world.alive == {}


@pytest.mark.parametrize("call", ["Engine.boot", "Guest.connect", "Guest.renew"])
@pytest.mark.parametrize(
    "error", [ClocheError("sandbox.boot_failed", "x"), OSError(28, "full"), asyncio.CancelledError()]
)
async def test_a_start_that_fails_leaves_it_stopped(
    host: Host, power: StopVerbs, call: str, error: BaseException
) -> None:
    record = await host.create()
    await power.stop("w", record.id, 5)
    calls = host.capacity.usage()
    host.world.fault[call] = error
    with pytest.raises(ClocheError):
        await power.start("w", record.id)
    host.world.fault.clear()
    assert status(host, record) is Status.STOPPED
    assert (host.world.alive, host.world.open_guests) == ({}, set())
    assert host.capacity.usage().memory_mb == calls.memory_mb == 0
    assert (await power.start("w", record.id)).status is Status.RUNNING


async def test_no_room_for_a_start(host: Host, power: StopVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await host.create()
    await power.stop("w", record.id, 5)
    from dataclasses import replace

    monkeypatch.setattr(host.capacity, "limits", replace(host.capacity.limits, memory_mb=1))
    with pytest.raises(ClocheError) as told:
        await power.start("w", record.id)
    assert told.value.code == "capacity.unavailable"
    assert status(host, record) is Status.STOPPED


async def test_restart_is_both_and_either(host: Host, power: StopVerbs) -> None:
    record = await host.create()
    first = host.world.alive[record.id].ref
    again = await power.restart("w", record.id, 5)
    assert again.status is Status.RUNNING
    assert again.process != first
    await power.stop("w", record.id, 5)
    assert (await power.restart("w", record.id, 5)).status is Status.RUNNING


async def test_a_paused_one_is_not_stopped(host: Host, power: StopVerbs) -> None:
    record = await host.create()
    await host.sleep.pause("w", record.id)
    with pytest.raises(ClocheError) as told:
        await power.stop("w", record.id, 5)
    assert told.value.code == "sandbox.invalid_state"
    assert "resume" in told.value.details["allowed"]
    assert "expired" not in told.value.details["allowed"]


async def test_a_delete_while_it_stops_or_starts(host: Host, power: StopVerbs) -> None:
    record = await host.create()
    host.world.hangs = True
    stopping = asyncio.ensure_future(power.stop("w", record.id, 5))
    await settle(lambda: status(host, record) is Status.STOPPING)
    await host.lifecycle.delete("w", record.id)
    await asyncio.wait({stopping})
    assert await host.left() == []
