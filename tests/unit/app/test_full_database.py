"""A database that has no room, for real: told as such each time, and usable again as soon as there is room."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from app_host import Host

from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Sandbox
from cloche_server.store.db import Database
from cloche_server.store.sandboxes import IdempotencyKey

BIG = {"k": "x" * 4000}


async def _limit(database: Database, pages: int) -> None:
    await database.run(lambda c: c.execute(f"PRAGMA max_page_count = {pages:d}").fetchall())


@pytest.fixture
async def full(host: Host) -> AsyncIterator[Host]:
    """No new page for anything, until `_limit` gives some."""
    await _limit(host.database, 1)  # SQLite takes the present size then
    yield host
    await _limit(host.database, 1 << 20)


async def _fails(work: Any) -> None:
    with pytest.raises(ClocheError) as told:
        await work
    assert told.value.code == "host.disk_full", told.value


async def test_every_write_says_so_and_none_stays_open(full: Host) -> None:
    record = await _some_record(full)
    for number in range(20):
        another = replace(record, id=f"{number:020d}", metadata=BIG)
        try:
            await full.store.insert(another, IdempotencyKey(str(number), "x" * 4000))
        except ClocheError as error:
            assert error.code == "host.disk_full"  # noqa: PT017
            break
    else:
        raise AssertionError("the database was never full")
    for _ in range(3):
        await _fails(full.store.insert(replace(another, id="other"), IdempotencyKey("other", "x" * 4000)))
        await _fails(full.store.update(replace(record, metadata={"k": "y" * 60000}, version=record.version + 1)))
    assert await full.store.get("other") is None
    await _limit(full.database, 1 << 20)
    await full.store.insert(replace(another, id="other"), IdempotencyKey("other", "h"))
    await full.store.update(replace(record, metadata=BIG, version=record.version + 1))


async def _some_record(host: Host) -> Sandbox:
    await _limit(host.database, 1 << 20)
    record = await host.create()
    await host.supervisor.close()
    await _limit(host.database, 1)
    return record


async def test_creates_are_refused_and_leave_nothing(full: Host) -> None:
    for _ in range(3):
        try:
            await full.create(metadata=BIG)
        except ClocheError as error:
            assert error.code == "host.disk_full"  # noqa: PT017
    await _fails(full.create(metadata={"k": "x" * 60000}))
    assert set(full.world.alive) == {e.record.id for e in full.supervisor.entries()}
    for entry in full.supervisor.entries():
        await full.lifecycle.delete("w", entry.record.id)
    assert await full.left() == []
