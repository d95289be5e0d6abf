"""Starts in one guest: a few at a time, in their order, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from cloche_server.app.process_table import ProcessTable
from cloche_server.core.errors import ClocheError
from cloche_server.guest.starts import Starts


async def test_a_few_at_a_time_in_the_order_in_which_they_came() -> None:
    starts, gate = Starts(at_once=2), asyncio.Event()
    begun: list[int] = []

    async def one(number: int) -> None:
        async with starts.turn():
            begun.append(number)
            await gate.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(one(number))
        for _ in range(20):
            await asyncio.sleep(0)
        assert begun == [0, 1]
        gate.set()
    assert begun == list(range(6))


async def test_one_whose_turn_does_not_come_is_told_that_it_was_not_started() -> None:
    starts = Starts(at_once=1, patience=0.01)
    async with starts.turn():
        with pytest.raises(ClocheError) as caught:
            async with starts.turn():
                raise AssertionError("it was not its turn")
    assert (caught.value.code, caught.value.retry_after) == ("sandbox.busy", 5)
    assert "was not started" in caught.value.message
    async with starts.turn():
        pass


async def test_whoever_gives_up_or_fails_takes_no_turn_away() -> None:
    starts = Starts(at_once=1)
    with pytest.raises(ValueError, match="failed"):
        async with starts.turn():
            waiting = asyncio.ensure_future(starts.turn().__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            raise ValueError("failed")
    async with starts.turn():
        pass


def test_the_start_of_a_machine_is_known_by_its_link() -> None:
    table, link = ProcessTable(), object()
    assert table.boot_of(link) == ""
    table.belongs(link, "b1")
    assert table.boot_of(link) == "b1"
    assert table.boot_of(object()) == "", "a machine that starts anew has a new link, and is asked again"
