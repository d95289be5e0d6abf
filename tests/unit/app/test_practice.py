"""Warm machines practise while nobody wants them, leave nothing of it, and can be taken all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from app_host import Crew, Host

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import BakedTemplate
from cloche_server.core.records import BootMode
from kit.fake_engine import settle, template


@pytest.fixture
def base(tmp_path: Path) -> BakedTemplate:
    return template(tmp_path)


@pytest.fixture
async def filling(host: Host, base: BakedTemplate, crew: Crew) -> AsyncIterator[asyncio.Task[None]]:
    """Pools that fill, and practise as soon as they are full."""
    host.pools._practise_after = 0.001
    host.pools.aim(base)
    task = crew.create_task(host.pools.run())
    yield task
    task.cancel()
    await asyncio.wait({task})
    await host.pools.drain()
    assert host.world.is_empty(host.root) == []


def practised(host: Host) -> list[bool]:
    return [slot.practised for slot in host.pools._slots[BootMode.WARM]]


async def test_all_of_them_once_the_pools_are_full_and_nothing_is_left_of_it(
    host: Host, filling: asyncio.Task[None]
) -> None:
    await settle(lambda: practised(host) == [True, True])
    assert host.pools.quick_to_fill()
    assert host.world.calls.count("Guest.write_file") == 2
    assert host.world.left_in_guests == set()
    assert host.world.calls.index("Guest.write_file") > host.world.calls.index("Guest.exec")


async def test_one_that_practises_is_taken_last_and_then_left_alone(
    host: Host, base: BakedTemplate, filling: asyncio.Task[None]
) -> None:
    reached = host.world.block["Guest.write_file"] = asyncio.Event()
    await reached.wait()
    busy = host.pools._slots[BootMode.WARM][0]
    first, second = host.pools.take(base), host.pools.take(base)
    assert first is not None
    assert first is not busy
    assert second is busy
    host.world.block.pop("Guest.write_file")
    await settle(lambda: host.world.left_in_guests == set())
    assert not busy.practised
    for slot in (first, second):
        await host.machines.discard(slot)
        host.capacity.release(slot.id)
    await settle(lambda: practised(host) == [True, True])


async def test_one_that_has_practised_is_taken_first(
    host: Host, base: BakedTemplate, filling: asyncio.Task[None]
) -> None:
    await settle(lambda: practised(host) == [True, True])
    host.pools._slots[BootMode.WARM][0].practised = False
    wanted = host.pools._slots[BootMode.WARM][1]
    slot = host.pools.take(base)
    assert slot is wanted
    await host.machines.discard(slot)
    host.capacity.release(slot.id)


async def test_one_that_practises_gives_way_as_any_other(host: Host, filling: asyncio.Task[None]) -> None:
    reached = host.world.block["Guest.write_file"] = asyncio.Event()
    await reached.wait()
    host.pools.aim()
    while await host.pools.give_up_one():
        pass
    host.world.block.pop("Guest.write_file")
    await settle(lambda: not host.world.alive)


async def test_practice_that_fails_is_not_tried_for_ever(host: Host, filling: asyncio.Task[None]) -> None:
    host.world.fault["Guest.write_file"] = ClocheError("file.no_space", "x")
    await settle(lambda: practised(host) == [True, True])
    assert host.world.calls.count("Guest.write_file") == 2
    assert not filling.done()
    assert host.world.left_in_guests == set()


async def test_without_a_time_for_it_none_does(host: Host, base: BakedTemplate, filling: asyncio.Task[None]) -> None:
    host.pools._practise_after = 0
    await settle(host.pools.quick_to_fill)
    await asyncio.sleep(0.02)
    assert practised(host) == [False, False]
