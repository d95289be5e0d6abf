"""Meters and accounts as rows, and a database of a server that knew neither."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from cloche_server.core.budgets import Account, Amounts, Budget
from cloche_server.core.lifecycle import Status
from cloche_server.core.meters import Meter, Metered
from cloche_server.core.records import ExecDefaults, Isolation, ProcessRef, Resources, Sandbox, with_status
from cloche_server.core.walls import Walls
from cloche_server.store import db as db_module
from cloche_server.store.db import Database
from cloche_server.store.meters import MeterStore
from cloche_server.store.sandboxes import SandboxStore
from cloche_server.store.sql import load_migrations

RECORD = Sandbox(
    "abcdefgh12", "w", Status.RUNNING, "base", "base", "base-x", Resources(1, 256, 4096), Isolation(),
    ExecDefaults(), {"k": "v"}, 100.0, max_lifetime_seconds=60, ends_at=160.0, cpu_origin=1.25, account_id="acc",
    walls=Walls(110.5, {"creating": 10.5}, 1, 110.5, 110.5),
)  # fmt: skip
METERED = Metered(
    "abcdefgh12", "w", Status.RUNNING, 100.0, None, 1, 256, {"k": "v"}, RECORD.walls,
    Meter(120.0, ProcessRef(1, 2), 1.0, 0.5, 3.0, 100, 200, 5.5, 6.5, 7, 8, 9),
)  # fmt: skip
ACCOUNT = Account(
    "acc", "w", Budget(cpu_seconds=1.5, exec_count=3, grace_seconds=0), Amounts(1, 2, 3, 4),
    {"abcdefgh12": Amounts(0.5)}, True, 130.0, "cpu_seconds",
)  # fmt: skip


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    db = Database(tmp_path / "c.db")
    await db.open()
    yield db
    await db.close()


async def test_all_comes_back_as_it_was(database: Database) -> None:
    store, sandboxes = MeterStore(database), SandboxStore(database)
    await sandboxes.insert(RECORD, None, ACCOUNT)
    assert await sandboxes.get(RECORD.id) == RECORD
    assert await store.accounts() == [ACCOUNT]
    await store.write([METERED], [replace(ACCOUNT, warned=False, exceeded_at=None, exceeded_by=None)])
    assert await store.living() == [METERED]
    assert await store.get("w", RECORD.id) == METERED
    assert await store.get("other", RECORD.id) is None
    assert (await store.accounts())[0].warned is False
    ended = replace(METERED, status=Status.DELETED, ended_at=150.0, metadata={"k": "v", "secret.x": "y"})
    await store.write([ended], [], ["acc"])
    assert await store.living() == []
    assert await store.get("w", RECORD.id) == replace(ended, metadata={"k": "v"}), "secrets end with their sandbox"
    assert await store.accounts() == []
    assert await store.prune(150.0) == 0
    assert await store.prune(150.1) == 1


async def test_all_or_nothing(database: Database) -> None:
    store = MeterStore(database)
    broken = replace(METERED, sandbox_id="other", workspace=None)  # type: ignore[arg-type]
    with pytest.raises(db_module.Conflict):
        await store.write([METERED, broken], [ACCOUNT])
    assert (await store.living(), await store.accounts()) == ([], [])


async def test_pages(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche_server.store.meters.PAGE", 3)
    store = MeterStore(database)
    many = [replace(METERED, sandbox_id=f"s{number:02d}", created_at=float(number)) for number in range(10)]
    await store.write([*many, replace(METERED, sandbox_id="t", workspace="other")], [])
    assert [one async for one in store.of("w", None, None)] == many
    assert [one async for one in store.of("w", None, 4.0)] == many[:4]


async def test_ends_that_no_meter_was_told(database: Database) -> None:
    store, sandboxes = MeterStore(database), SandboxStore(database)
    deleted = with_status(RECORD, Status.DELETED, 200.0, ended_at=200.0, version=2)
    await sandboxes.insert(RECORD)
    assert await store.unmetered_ends(0.0) == []
    await sandboxes.update(deleted)
    assert await store.unmetered_ends(0.0) == [deleted]
    await store.write([METERED], [])
    assert await store.unmetered_ends(0.0) == [deleted]
    await store.write([replace(METERED, status=Status.DELETED, ended_at=200.0)], [])
    assert await store.unmetered_ends(0.0) == []


async def test_a_create_that_came_to_nothing_takes_its_budget_along_but_not_that_of_others(database: Database) -> None:
    store, sandboxes = MeterStore(database), SandboxStore(database)
    await sandboxes.insert(RECORD, None, ACCOUNT)
    child = replace(RECORD, id="child", account_id="acc")
    await sandboxes.insert(child)
    await sandboxes.forget("child")
    assert await store.accounts() == [ACCOUNT]
    await sandboxes.forget(RECORD.id)
    assert await store.accounts() == []


async def test_stop_with_sandboxes_charges_until_then(database: Database) -> None:
    sandboxes = SandboxStore(database)
    await sandboxes.insert(RECORD)
    await sandboxes.delete_all(130.5)
    (record,) = await sandboxes.living()
    assert (record.status, record.walls.seconds) == (Status.DELETING, {"creating": 10.5, "running": 20})
    await sandboxes.delete_all(140.0)
    assert await sandboxes.living() == [record]


async def test_a_database_without_meters_is_taken_over(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "c.db")
    for number, script in load_migrations()[:2]:
        connection.executescript(script)
        connection.execute(f"PRAGMA user_version = {number}")
    old = {
        "id": "abcdefgh12", "workspace": "w", "status": "running", "template": "base", "template_name": "base",
        "template_id": "base-x", "cpus": 1, "memory_mb": 256, "disk_mb": 4096, "isolation": "{}", "defaults": "{}",
        "metadata": "{}", "created_at": 100.0, "ttl_seconds": 0, "persistent": 0, "boot_ms": 0, "boot_mode": "warm",
        "generation": 1, "version": 1,
    }  # fmt: skip
    marks = ", ".join("?" * len(old))
    connection.execute(f"INSERT INTO sandboxes ({', '.join(old)}) VALUES ({marks})", tuple(old.values()))
    connection.commit()
    connection.close()
    database = Database(tmp_path / "c.db")
    await database.open()
    (record,) = await SandboxStore(database).living()
    assert (record.walls, record.ends_at, record.account_id) == (Walls(since=100.0), None, None)
    await database.close()
