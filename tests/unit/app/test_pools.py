"""The pools: filling, taking, death, giving way, and faults while they fill."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from app_host import Crew, Host, assemble

from cloche_server.app import pools as pools_module
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.ports import BakedTemplate
from cloche_server.core.records import BootMode, Shape
from cloche_server.store.db import Database
from kit.fake_engine import World, settle, template

Running = asyncio.Task[None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools_module, "BACKOFF", (0.02, 0.1))


@pytest.fixture
def base(tmp_path: Path) -> BakedTemplate:
    return template(tmp_path)


@pytest.fixture
async def running(host: Host, base: BakedTemplate, crew: Crew) -> AsyncIterator[Running]:
    """Full pools that go on filling."""
    host.pools.aim(base)
    task = crew.create_task(host.pools.run())
    await settle(host.pools.quick_to_fill)
    yield task
    task.cancel()
    await asyncio.wait({task})
    await host.pools.drain()
    assert host.world.is_empty(host.root) == []


def promised(host: Host) -> int:
    return host.capacity.usage().sandboxes


async def test_both_are_filled_and_counted(host: Host, running: Running) -> None:
    assert host.pools.counts() == {"launched": 2, "warm": 2}
    assert len(host.world.alive) == promised(host) == 4


async def test_what_is_taken_is_replaced(host: Host, base: BakedTemplate, running: Running) -> None:
    slot = host.pools.take(base)
    assert slot is not None
    assert slot.mode is BootMode.WARM
    await settle(host.pools.quick_to_fill)
    assert promised(host) == 5
    await host.machines.discard(slot)
    host.capacity.release(slot.id)


async def test_a_refill_waits_while_sandboxes_are_used(
    host: Host, base: BakedTemplate, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools_module, "SETTLE", 0.01)
    monkeypatch.setattr(pools_module, "SETTLE_MOST", 1000.0)
    looked: list[None] = []

    def used_now() -> float:
        looked.append(None)
        return time.monotonic()

    host.pools.last_use = used_now
    slot = host.pools.take(base)
    assert slot is not None
    await settle(lambda: len(looked) > 5)
    assert not host.pools.quick_to_fill()
    host.pools.last_use = lambda: float("-inf")
    await settle(host.pools.quick_to_fill)
    await host.machines.discard(slot)
    host.capacity.release(slot.id)


async def test_a_warm_one_has_names_and_noise_of_its_own_before_it_is_given_out(
    host: Host, base: BakedTemplate, running: Running
) -> None:
    """They are not renewed when it becomes a sandbox: only its clock is set, which shows that it answers."""
    warm = list(host.pools._slots[BootMode.WARM])
    record = await host.create()
    assert record.id == warm[0].id
    requests = [request for name, request in host.world.renewals if name == record.id]
    assert None not in (requests[0].entropy, requests[0].hostname, requests[0].machine_id)
    assert all(request.time_now and request.entropy is None and not request.hostname for request in requests[1:])
    assert len(requests) > 1
    unique = {(r.entropy, r.hostname, r.machine_id) for _, r in host.world.renewals if r.entropy}
    assert len(unique) == len({name for name, _ in host.world.renewals})
    await host.lifecycle.delete("w", record.id)


async def test_put_back_is_as_before(host: Host, base: BakedTemplate, running: Running) -> None:
    assert all(machine.stands_back for machine in host.world.alive.values()), "nobody is in them yet"
    slot = host.pools.take(base)
    assert slot is not None
    machine = host.world.alive[slot.id]
    assert not machine.stands_back
    host.pools.put_back(slot)
    assert machine.stands_back
    assert host.pools.take(base) is slot
    assert not machine.stands_back
    host.pools.put_back(slot)


@pytest.mark.thorough
@pytest.mark.parametrize("which", [0, 1, 2, 3])
async def test_a_dead_one_is_never_given_out_and_is_replaced(
    host: Host, base: BakedTemplate, running: Running, which: int
) -> None:
    victim = sorted(host.world.alive)[which]
    machine = host.world.alive[victim]
    machine.die()
    given = []
    while (slot := host.pools.take(base)) is not None:
        given.append(slot)
    assert victim not in {slot.id for slot in given}
    assert len(given) == 3
    await settle(lambda: host.pools.quick_to_fill() and victim not in host.world.held)
    assert not (host.root / victim).exists()
    for slot in given:
        await host.machines.discard(slot)
        host.capacity.release(slot.id)
    assert promised(host) == 4


async def test_another_template_empties_and_fills_anew(
    host: Host, base: BakedTemplate, running: Running, tmp_path: Path
) -> None:
    newer = template(tmp_path, shape=Shape(2, 512))
    assert host.pools.take(newer) is None
    host.pools.aim(newer)
    await settle(lambda: all(s.template == newer for d in host.pools._slots.values() for s in d))
    await settle(host.pools.quick_to_fill)
    assert host.pools.take(base) is None
    host.pools.aim()
    await settle(lambda: not host.world.alive and promised(host) == 0)
    host.pools.aim(base)


async def test_each_of_several_templates_has_its_own(
    host: Host, base: BakedTemplate, running: Running, tmp_path: Path
) -> None:
    other = template(tmp_path, "other")
    host.pools.aim(base, other)
    await settle(lambda: host.pools.counts() == {"launched": 4, "warm": 4})
    slot = host.pools.take(other)
    assert slot is not None
    assert slot.template == other
    await host.machines.discard(slot)
    host.capacity.release(slot.id)
    await settle(lambda: host.pools.quick_to_fill() and host.pools.counts()["warm"] == 4)
    host.pools.aim(other)
    await settle(lambda: host.pools.counts() == {"launched": 2, "warm": 2})
    assert host.pools.take(base) is None


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["Engine.launch", "Engine.launch.connect", "Machine.restore", "Guest.renew"])
@pytest.mark.parametrize("error", [ClocheError("sandbox.boot_failed", "x"), OSError(24, "too many"), RuntimeError("?")])
async def test_a_refill_that_fails_is_tried_again_later(
    host: Host, base: BakedTemplate, crew: Crew, call: str, error: Exception
) -> None:
    """And leaves nothing each time, tries ever less often, and never ends the server."""
    host.world.fault[call] = error
    host.pools.aim(base)
    task = crew.create_task(host.pools.run())
    await asyncio.sleep(0.4)
    tries = host.world.calls.count(call)
    assert 2 <= tries <= 12
    assert not task.done()
    await settle(lambda: host.world.is_empty(host.root) == [] and promised(host) == 0)
    host.world.fault.clear()
    await settle(host.pools.quick_to_fill)
    task.cancel()
    await asyncio.wait({task})
    await host.pools.drain()
    assert promised(host) == 0


@pytest.mark.parametrize(
    "call", ["Engine.launch", "Engine.launch.connect", "Machine.restore", "Guest.renew", "Guest.exec"]
)
@pytest.mark.parametrize("who", ["stop", "create"])
async def test_a_refill_under_way_gives_way(host: Host, base: BakedTemplate, crew: Crew, call: str, who: str) -> None:
    reached = host.world.block[call] = asyncio.Event()
    host.pools.aim(base)
    task = crew.create_task(host.pools.run())
    await reached.wait()
    assert promised(host) == 1
    if who == "create":
        host.pools.aim()
        assert await host.pools.give_up_one()
        assert promised(host) == 0
        assert not await host.pools.give_up_one()
    task.cancel()
    await asyncio.wait({task})
    assert host.world.is_empty(host.root) == []
    assert promised(host) == 0


async def test_creates_get_all_that_the_host_has(tmp_path: Path, database: Database, world: World, crew: Crew) -> None:
    """Pools are filled with what is left over, and give way up to the very last."""
    host = assemble(tmp_path, database, world, crew, max_sandboxes=6)
    host.pools.aim(host.creator._catalog.meta.template)  # type: ignore[attr-defined]
    task = crew.create_task(host.pools.run())
    for _ in range(4):
        made = await asyncio.gather(*(host.create() for _ in range(9)), return_exceptions=True)
        good = [m for m in made if not isinstance(m, BaseException)]
        refused = [m for m in made if isinstance(m, ClocheError)]
        assert (len(good), len(refused)) == (6, 3)
        assert {e.code for e in refused} == {"capacity.unavailable"}
        assert all(e.retry_after for e in refused)
        assert promised(host) == 6
        await asyncio.gather(*(host.lifecycle.delete("w", record.id) for record in good))
    await settle(host.pools.quick_to_fill)
    assert promised(host) == 4
    task.cancel()
    await asyncio.wait({task})
    await host.pools.drain()
    assert await host.left() == []


async def test_cancelled_while_it_takes_the_place_of_a_pooled_machine(
    tmp_path: Path, database: Database, world: World, crew: Crew
) -> None:
    host = assemble(tmp_path, database, world, crew, max_sandboxes=4)
    host.pools.aim(host.creator._catalog.meta.template)  # type: ignore[attr-defined]
    task = crew.create_task(host.pools.run())
    await settle(host.pools.quick_to_fill)
    task.cancel()
    await asyncio.wait({task})
    for call in ("Guest.aclosed", "Machine.kill"):
        # Another template than the pools hold, so one of them has to give way.
        host.pools._template = None
        slot = host.pools._slots[BootMode.LAUNCHED][0]
        reached = world.block[call] = asyncio.Event()
        giving = asyncio.ensure_future(host.pools.give_up_one())
        await reached.wait()
        giving.cancel()
        await asyncio.sleep(0.01)
        assert not giving.done(), "it goes on until the machine is gone"
        world.block.pop(call)
        # The blocked call waits for ever: let it go by ending the machine as the kernel would.
        slot.machine.die()  # type: ignore[attr-defined]
        for other in asyncio.all_tasks():
            if "_discard" in repr(other.get_coro()) and other is not giving:
                other.cancel()
        await asyncio.wait({giving})
        assert not (host.root / slot.id).exists()
    await host.pools.drain()
    assert promised(host) == 0


async def test_drain_goes_on_after_a_failure(host: Host, base: BakedTemplate, crew: Crew) -> None:
    host.pools.aim(base)
    task = crew.create_task(host.pools.run())
    await settle(host.pools.quick_to_fill)
    task.cancel()
    await asyncio.wait({task})
    host.world.fault["Machine.kill"] = ClocheError("internal", "x")
    await host.pools.drain()
    assert promised(host) == 0
    assert list(host.root.iterdir()) == []


async def test_what_never_fits_ends_no_pooled_machine(host: Host, running: Running) -> None:
    before = set(host.world.alive)
    with pytest.raises(ClocheError) as told:
        await host.create(disk_mb=host.capacity.limits.disk_mb - 1, memory_mb=256)
    assert told.value.code in {"capacity.unavailable", "request.invalid"}
    assert set(host.world.alive) == before


async def test_they_give_way_to_one_that_wakes(host: Host, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As to one that starts again, or goes back to a snapshot: they ask for memory in the same way."""
    record = await host.create()
    await settle(host.pools.quick_to_fill)
    await host.sleep.hibernate("w", record.id)
    full = replace(host.capacity.limits, memory_mb=host.capacity.usage().memory_mb)
    monkeypatch.setattr(host.capacity, "limits", full)
    assert (await host.sleep.wake("w", record.id)).status is Status.RUNNING
    assert sum(host.pools.counts().values()) == 3
    await host.lifecycle.delete("w", record.id)
