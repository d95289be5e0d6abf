"""An event that the database cannot take: the others are written, and it stands in nobody's way."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from cloche_server.app.journal import Journal
from cloche_server.core.errors import ClocheError
from cloche_server.core.happenings import Happening

CLOCK: Any = SimpleNamespace(now=lambda: 1.0)


class Store:
    """Takes what is not refused, whole or not at all."""

    def __init__(self, refused: dict[str, Exception]) -> None:
        self.refused = refused
        self.taken: list[str] = []

    async def append(self, happenings: Sequence[Happening]) -> None:
        for one in happenings:
            if (error := self.refused.get(one.sandbox_id)) is not None:
                raise error
        self.taken += [one.sandbox_id for one in happenings]


async def _tell(journal: Journal, *sandboxes: str) -> None:
    for one in sandboxes:
        await journal.tell("sandbox.resumed", "w", one)


async def test_one_that_cannot_be_written_takes_no_other_with_it() -> None:
    full = ClocheError("host.disk_full", "no room")
    store = Store(dict.fromkeys("abc", full))
    journal = Journal(store, CLOCK)  # type: ignore[arg-type]
    await _tell(journal, "a", "b", "c")
    assert store.taken == []
    store.refused = {"b": ValueError("nonsense")}
    grown = journal.grown
    await _tell(journal, "d")
    assert store.taken == ["a", "c", "d"]
    assert grown.is_set(), "readers have been told"
    await _tell(journal, "e")
    assert store.taken == ["a", "c", "d", "e"]


async def test_the_rest_waits_when_the_disk_is_full_meanwhile() -> None:
    full = ClocheError("host.disk_full", "no room")
    store = Store({"a": full, "b": full, "c": full})
    journal = Journal(store, CLOCK)  # type: ignore[arg-type]
    await _tell(journal, "a", "b", "c")
    store.refused = {"b": ValueError("nonsense"), "c": full}
    await journal.catch_up()
    assert store.taken == ["a"]
    store.refused = {}
    await journal.catch_up()
    assert store.taken == ["a", "c"]
