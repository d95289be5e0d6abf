"""Who has not said who they are: nobody keeps others out by standing in the door."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from cloche_server.ssh.house import MAX_STRANGERS, MAX_STRANGERS_OF_ONE, House, Limits


class Stranger:
    def __init__(self) -> None:
        self.is_cut = False

    def end(self, sentence: str) -> None:
        raise AssertionError(f"nobody is told {sentence}")

    def cut(self) -> None:
        self.is_cut = True


def _house(group: asyncio.TaskGroup) -> House:
    clock: Any = SimpleNamespace(monotonic=lambda: 1.0, now=lambda: 1.0)
    nothing: Any = None
    house = House(nothing, nothing, nothing, clock, Limits())
    house.open(group)
    return house


async def test_who_has_stood_there_for_longest_makes_room() -> None:
    async with asyncio.TaskGroup() as group:
        house = _house(group)
        standing = [Stranger() for _ in range(MAX_STRANGERS)]
        assert all(house.arrive(one, f"192.0.2.{at}") for at, one in enumerate(standing))
        assert not any(one.is_cut for one in standing)
        late = [Stranger(), Stranger()]
        assert all(house.arrive(one, f"198.51.100.{at}") for at, one in enumerate(late))
        assert [one.is_cut for one in standing[:3]] == [True, True, False]
        for one in (*standing, *late):
            house.leave(one)
        await asyncio.wait_for(house.wait_empty(), 5)


async def test_of_one_address_the_next_is_refused_and_the_others_stay() -> None:
    async with asyncio.TaskGroup() as group:
        house = _house(group)
        standing = [Stranger() for _ in range(MAX_STRANGERS_OF_ONE)]
        assert all(house.arrive(one, "192.0.2.1") for one in standing)
        assert not house.arrive(Stranger(), "192.0.2.1")
        assert not any(one.is_cut for one in standing)
