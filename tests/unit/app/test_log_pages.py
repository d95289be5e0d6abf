"""What one answer of a log may cost, whatever a guest sends: memory, lines, and the time of everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import SupportsIndex

import pytest

from cloche_server.app.logs import HELD_MAX, LINES_MAX, Log
from cloche_server.core.errors import ClocheError
from cloche_server.core.logs import LINE_MAX, Cursor, LineBuffer, LogEnd, LogItem, LogLine

LONG = "x" * LINE_MAX
TOO_MANY = HELD_MAX // LINE_MAX + 100


def log_of(text: str, count: int, *, placed: bool) -> Log:
    async def begin(cursor: Cursor | None, follow: bool, replay: bool) -> AsyncGenerator[LogItem]:
        for number in range(0 if cursor is None else cursor.offset, count):
            yield LogLine(text, "stdout", Cursor(number + 1) if placed else None)
        yield LogEnd(Cursor(count), final=False)

    return Log(begin)


async def test_a_guest_that_names_no_place_to_go_on_does_not_fill_the_memory() -> None:
    with pytest.raises(ClocheError) as told:
        await log_of(LONG, TOO_MANY, placed=False).page(None, None)
    assert told.value.code == "guest.protocol"


async def test_the_last_lines_are_no_more_than_a_log_can_have() -> None:
    page = await log_of(LONG, TOO_MANY, placed=True).page(None, 100_000)
    assert sum(len(one.text) + 1 for one in page.lines) <= HELD_MAX
    assert (page.next, page.more) == (Cursor(TOO_MANY), False), "the newest are kept"
    few = await log_of("a", 10, placed=True).page(None, 3)
    assert [one.next for one in few.lines] == [Cursor(8), Cursor(9), Cursor(10)]
    assert (await log_of("a", 10, placed=True).page(None, 0)).lines == ()


@pytest.mark.thorough
async def test_a_page_has_a_bounded_number_of_lines_and_the_next_one_goes_on_behind_it() -> None:
    log = log_of("", LINES_MAX + 3, placed=True)
    first = await log.page(None, None)
    assert (len(first.lines), first.more, first.next) == (LINES_MAX, True, Cursor(LINES_MAX))
    second = await log.page(first.next, None)
    assert (len(second.lines), second.more) == (3, False)


async def test_others_have_their_turn_while_a_page_is_made() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(count())
    try:
        await log_of("", 10_000, placed=True).page(None, 100_000)
    finally:
        other.cancel()
    assert turns >= 10


class Counted(bytes):
    """Says how many bytes were copied out of it."""

    copied = 0

    def __radd__(self, other: bytes) -> Counted:
        return Counted(bytes(other) + bytes(self))

    def __getitem__(self, key: SupportsIndex | slice) -> Counted | int:  # type: ignore[override]
        found = super().__getitem__(key)
        if isinstance(found, int):
            return found
        Counted.copied += len(found)
        return Counted(found)


def test_lines_are_cut_without_copying_what_comes_behind_them() -> None:
    data = Counted(b"\n" * 20_000 + b"a\n" * 100 + b"rest")
    Counted.copied = 0
    buffer = LineBuffer()
    assert sum(1 for _ in buffer.feed(data)) == 20_100
    assert buffer.flush() == b"rest"
    assert Counted.copied <= 2 * len(data)
