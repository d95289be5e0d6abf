"""The database: records round-trip, updates are conditional, the schema knows its version."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import token_hash
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import (
    BootMode,
    ExecDefaults,
    Isolation,
    ProcessRef,
    Resources,
    Sandbox,
    Termination,
    TerminationReason,
)
from cloche_server.store.db import Conflict, Database
from cloche_server.store.sandboxes import IdempotencyKey, SandboxStore
from cloche_server.store.sql import load_migrations, load_queries, parse
from cloche_server.store.tokens import IdempotencyStore, TokenStore

RECORD = Sandbox(
    id="abcdefgh12",
    workspace="default",
    status=Status.CREATING,
    template="code-interpreter",
    template_name="base",
    template_id="base-1c256m-x",
    resources=Resources(1, 256, 4096),
    isolation=Isolation(accel="tcg"),
    defaults=ExecDefaults({"A": "é\u2028"}, "/w", "user"),
    metadata={"k": "v", "日": "😀"},
    created_at=1.5,
    ttl_seconds=60,
    expires_at=61.5,
)
FULL = replace(
    RECORD,
    status=Status.FAILED,
    persistent=True,
    started_at=2.5,
    boot_ms=12,
    boot_mode=BootMode.WARM,
    process=ProcessRef(12, 345),
    termination=Termination(TerminationReason.VMM_DIED, 3.5, "SIGKILL", "gone"),
    ended_at=3.5,
    generation=2,
    version=2,
)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    db = Database(tmp_path / "c.db")
    await db.open()
    yield db
    await db.close()


async def test_records_round_trip(database: Database) -> None:
    store = SandboxStore(database)
    await store.insert(RECORD)
    assert await store.get(RECORD.id) == RECORD
    await store.update(FULL)
    assert await store.get(RECORD.id) == FULL
    assert await store.living() == [FULL]
    assert await store.get("other") is None


async def test_updates_are_conditional(database: Database) -> None:
    store = SandboxStore(database)
    await store.insert(RECORD)
    with pytest.raises(Conflict):
        await store.insert(RECORD)
    await store.update(replace(RECORD, version=2))
    with pytest.raises(Conflict):
        await store.update(replace(RECORD, version=2, status=Status.RUNNING))
    with pytest.raises(Conflict):
        await store.update(replace(RECORD, version=9))
    found = await store.get(RECORD.id)
    assert found is not None
    assert found.status is Status.CREATING


async def test_deleted_records_are_kept_and_pruned(database: Database) -> None:
    store = SandboxStore(database)
    await store.insert(RECORD)
    assert await store.template_users(RECORD.template_id) == 1
    await store.update(replace(RECORD, status=Status.DELETED, ended_at=100.0, version=2))
    assert await store.living() == []
    assert await store.template_users(RECORD.template_id) == 0
    assert await store.prune(100.0) == 0
    assert await store.prune(100.1) == 1
    assert await store.get(RECORD.id) is None


async def test_what_is_committed_survives_another_opening(tmp_path: Path) -> None:
    first = Database(tmp_path / "c.db")
    await first.open()
    await SandboxStore(first).insert(RECORD)
    second = Database(tmp_path / "c.db")
    await second.open()
    assert await SandboxStore(second).get(RECORD.id) == RECORD
    await first.close()
    await second.close()


async def test_tokens_are_stored_as_hashes_only(database: Database, tmp_path: Path) -> None:
    store = TokenStore(database)
    token = await store.create("ci", "default", bytes(range(16)), 1.0)
    found = await store.find(token)
    assert found is not None
    assert (found.name, found.prefix) == ("ci", token[:12])
    assert await store.find("pds_" + "0" * 32) is None
    with pytest.raises(Conflict):
        await store.create("again", "default", bytes(range(16)), 1.0)
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert token.encode() not in content
    assert token_hash(token).encode() in content


async def test_a_revoked_token_is_gone(database: Database) -> None:
    store = TokenStore(database)
    token = await store.create("ci", "default", bytes(16), 1.0)
    assert await store.revoke(token[:12], 2.0)
    assert not await store.revoke(token[:12], 2.0)
    assert await store.find(token) is None
    assert (await store.list())[0].revoked_at == 2.0


async def test_an_idempotency_key_is_taken_once(database: Database) -> None:
    store, sandboxes = IdempotencyStore(database), SandboxStore(database)
    await sandboxes.insert(replace(RECORD, id="s1", workspace="w", created_at=1.0), IdempotencyKey("k", "h"))
    with pytest.raises(Conflict):
        await sandboxes.insert(replace(RECORD, id="s2", workspace="w"), IdempotencyKey("k", "h"))
    assert await sandboxes.get("s2") is None
    found = await store.find("w", "k")
    assert found is not None
    assert found.sandbox_id == "s1"
    assert await store.find("other", "k") is None
    assert await store.prune(1.0) == 0
    assert await store.prune(2.0) == 1


async def test_a_create_that_came_to_nothing_sets_its_key_free(database: Database) -> None:
    sandboxes = SandboxStore(database)
    await sandboxes.insert(RECORD, IdempotencyKey("k", "h"))
    await sandboxes.forget(RECORD.id)
    assert await IdempotencyStore(database).find(RECORD.workspace, "k") is None
    await sandboxes.insert(RECORD, IdempotencyKey("k", "h"))


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "c.db")
    connection.execute(f"PRAGMA user_version = {load_migrations()[-1][0] + 1}")
    connection.close()
    database = Database(tmp_path / "c.db")
    with pytest.raises(ClocheError, match="newer"):
        await database.open()


async def test_a_damaged_file_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_bytes(b"this is no database, and long enough to be read as one" * 100)
    with pytest.raises(ClocheError):
        await Database(tmp_path / "c.db").open()


async def test_a_transaction_is_all_or_nothing(database: Database) -> None:
    with pytest.raises(Conflict):
        await database.execute_all(
            [
                (
                    "insert_idempotency",
                    {"workspace": "w", "key": "a", "request_hash": "", "sandbox_id": "", "created_at": 0},
                ),
                (
                    "insert_idempotency",
                    {"workspace": "w", "key": "a", "request_hash": "", "sandbox_id": "", "created_at": 0},
                ),
            ]
        )
    assert await database.fetch("find_idempotency", workspace="w", key="a") == []


def test_every_query_is_used() -> None:
    package = Path(__file__).parents[3] / "server" / "src" / "cloche_server"
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    unused = [name for name in load_queries() if f'"{name}"' not in source]
    assert unused == []


@pytest.mark.parametrize("text", ["-- a --\nSELECT 1;", "-- a --\n-- doc\nSELECT 1;\n-- a --\n-- doc\nSELECT 2;"])
def test_badly_written_queries(text: str) -> None:
    with pytest.raises(ValueError, match=r"no description|twice"):
        parse(text)
