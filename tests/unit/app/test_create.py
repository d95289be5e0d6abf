"""Every step of create fails, hangs and is cancelled in turn, and nothing is left of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from app_host import Host

from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.records import BootMode, Sandbox
from cloche_server.store.sandboxes import IdempotencyKey
from kit.fake_engine import FakeMachine, settle

#: Calls on the fake host in the order in which a create with empty pools makes them.
CALLS = [
    "Network.open",
    "Engine.launch",
    "Engine.launch.connect",
    "Machine.restore",
    "Machine.restore.cont",
    "Guest.connect",
    "Machine.grow_disk",
    "Network.admit",
    "Guest.renew",
]
POOLED = ["Machine.grow_disk", "Network.admit", "Guest.renew"]


async def fill(host: Host, count: int = 1) -> asyncio.Task[None]:
    """Runs the pools until they are full; cancel the task to stop them."""
    host.pools.aim(host.creator._catalog.meta.template)  # type: ignore[attr-defined]
    task = asyncio.ensure_future(host.pools.run())
    await settle(host.pools.quick_to_fill)
    return task


async def test_what_a_create_makes(host: Host) -> None:
    record = await host.create(disk_mb=2048)
    assert record.status is Status.RUNNING
    assert record.boot_mode is BootMode.SNAPSHOT
    assert set(host.world.alive) == {record.id}
    grown = CALLS.index("Network.admit")
    assert host.world.calls == [*CALLS[:grown], "Guest.renew", *CALLS[grown:]], "once more, for the larger disk"
    assert [r.status for r in await host.rows()] == [Status.RUNNING]
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error",
    [
        ClocheError("sandbox.boot_failed", "x"),
        ClocheError("sandbox.unreachable", "x"),
        OSError(5, "input/output error"),
        RuntimeError("unforeseen"),
    ],
)
async def test_a_call_that_fails(host: Host, call: str, error: Exception) -> None:
    host.world.fault[call] = error
    with pytest.raises(type(error) if isinstance(error, RuntimeError) else ClocheError) as told:
        await host.create(disk_mb=2048)
    assert await host.left() == []
    if isinstance(told.value, ClocheError) and not call.startswith(("Engine", "Network")):
        assert told.value.code != "sandbox.unreachable", "there is no sandbox that could be unreachable"
    host.world.fault.clear()
    assert (await host.create()).status is Status.RUNNING


@pytest.mark.parametrize("statement", ["insert_sandbox", "update_sandbox"])
async def test_a_database_that_refuses(host: Host, monkeypatch: pytest.MonkeyPatch, statement: str) -> None:
    refuse = {"on": True}
    execute, execute_all = host.database.execute, host.database.execute_all
    full = ClocheError("host.disk_full", "the disk of the host is full")

    async def failing(name: str, /, **values: object) -> int:
        if refuse["on"] and name == statement:
            raise full
        return await execute(name, **values)

    async def failing_all(statements: Any, **options: Any) -> list[int]:
        if refuse["on"] and any(name == statement for name, _ in statements):
            raise full
        return await execute_all(statements, **options)

    monkeypatch.setattr(host.database, "execute", failing)
    monkeypatch.setattr(host.database, "execute_all", failing_all)
    with pytest.raises(ClocheError) as told:
        await host.create()
    assert told.value is full
    refuse["on"] = False
    assert await host.left() == []


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("again", [0, 3])
async def test_a_caller_that_goes_away(host: Host, call: str, again: int) -> None:
    reached = host.world.block[call] = asyncio.Event()
    task = asyncio.ensure_future(host.create(disk_mb=2048))
    await reached.wait()
    task.cancel()
    for _ in range(again):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert await host.left() == []


async def test_a_caller_that_goes_away_at_each_turn_of_the_loop(host: Host) -> None:
    """Whatever the create awaits just then: either nothing is left, or a whole sandbox."""
    for turns in range(200):
        task = asyncio.ensure_future(host.create(disk_mb=2048))
        for _ in range(turns):
            await asyncio.sleep(0.0005 if turns > 100 else 0)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            await host.lifecycle.delete("w", task.result().id)
        assert await host.left() == [], f"cancelled after {turns} turns"
        if not task.cancelled() and turns > 100:
            return
    raise AssertionError("a create never came to its end")


@pytest.mark.parametrize("call", POOLED)
async def test_a_failing_create_from_a_pool_ends_the_machine_that_it_took(host: Host, call: str) -> None:
    pools = await fill(host)
    await end_now(pools)
    taken = host.pools.counts()
    host.world.fault[call] = ClocheError("host.disk_full", "x")
    with pytest.raises(ClocheError):
        await host.create(disk_mb=2048)
    host.world.fault.clear()
    assert sum(host.pools.counts().values()) == sum(taken.values()) - 1
    assert len(host.world.alive) == sum(host.pools.counts().values())
    assert await host.rows() == []
    await host.pools.drain()
    assert await host.left() == []


async def test_a_pooled_machine_is_not_lost_when_the_ledger_cannot_look(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = await fill(host)
    await end_now(pools)

    def no_descriptor(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(host.capacity, "usage", no_descriptor)
        with pytest.raises(ClocheError) as told:
            await host.create()
    assert told.value.code == "capacity.unavailable"
    held = sum(host.pools.counts().values())
    assert (len(host.world.alive), host.capacity.usage().sandboxes) == (held, held)
    await host.pools.drain()
    assert await host.left() == []


async def test_machines_that_died_in_the_pools_unnoticed_fail_no_create(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = await fill(host)
    await end_now(pools)
    monkeypatch.setattr(FakeMachine, "ended", False)  # nobody has been told yet
    dead = set(host.world.alive)
    for machine in list(host.world.alive.values()):
        machine.die()

    def refuse(machine: FakeMachine) -> None:
        if machine.id in dead:
            raise ClocheError("sandbox.boot_failed", "the machine ended while it was restored from its template")

    monkeypatch.setattr(FakeMachine, "_check", refuse)
    record = await host.create()
    assert record.boot_mode is BootMode.SNAPSHOT
    assert set(host.world.alive) == {record.id}
    assert host.capacity.usage().sandboxes == 1
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


async def end_now(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def test_a_create_takes_the_best_that_the_pools_have(host: Host) -> None:
    pools = await fill(host)
    await end_now(pools)
    modes = [(await host.create()).boot_mode for _ in range(5)]
    assert modes == [BootMode.WARM] * 2 + [BootMode.LAUNCHED] * 2 + [BootMode.SNAPSHOT]
    for record in await host.rows():
        await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


async def test_a_pooled_machine_goes_back_when_the_disk_asked_for_is_too_large(host: Host) -> None:
    pools = await fill(host)
    await end_now(pools)
    before = host.capacity.usage()
    with pytest.raises(ClocheError) as told:
        await host.create(disk_mb=host.capacity.limits.disk_mb - 1)
    assert told.value.code in {"capacity.unavailable", "request.invalid"}
    assert host.capacity.usage().sandboxes == before.sandboxes
    assert host.capacity.usage().disk_mb == before.disk_mb
    await host.pools.drain()
    assert await host.left() == []


# ---------------------------------------------------------------- delete while creating


@pytest.mark.parametrize("call", CALLS[1:])
async def test_deleted_while_it_is_created(host: Host, call: str) -> None:
    reached = host.world.block[call] = asyncio.Event()
    task = asyncio.ensure_future(host.create(disk_mb=2048))
    await reached.wait()
    record = (await host.rows())[0]
    await host.lifecycle.delete("w", record.id)
    with pytest.raises(ClocheError) as told:
        await task
    assert told.value.code == "sandbox.invalid_state"
    assert "deleted while it was created" in told.value.message
    assert await host.left() == []


@pytest.mark.parametrize("verb", ["ttl", "metadata", "delete"])
async def test_a_change_meanwhile_is_answered_when_the_create_fails(host: Host, verb: str) -> None:
    """A message to a sandbox whose task never begins must not wait for ever."""
    reached = host.world.block["Guest.renew"] = asyncio.Event()
    task = asyncio.ensure_future(host.create())
    await reached.wait()
    record = (await host.rows())[0]
    entry = host.supervisor.get(record.id)
    assert entry is not None
    if verb == "ttl":
        change: Any = host.lifecycle.set_ttl("w", record.id, 5, None)
    elif verb == "metadata":
        change = host.lifecycle.set_metadata("w", record.id, {"a": "b"})
    else:
        change = host.supervisor.post(entry, Event.DELETE)
    waiting = asyncio.ensure_future(change)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    done, _ = await asyncio.wait({waiting}, timeout=5)
    assert done, "the change was never answered"
    if verb != "delete":
        assert isinstance(waiting.exception(), ClocheError)
    assert await host.left() == []


async def test_a_change_meanwhile_is_made_when_the_create_succeeds(host: Host) -> None:
    reached = host.world.block["Guest.renew"] = asyncio.Event()
    task = asyncio.ensure_future(host.create())
    await reached.wait()
    record = (await host.rows())[0]
    waiting = asyncio.ensure_future(host.lifecycle.set_ttl("w", record.id, 7, None))
    task.cancel()
    await asyncio.wait({task, waiting})
    host.world.block.clear()

    made = asyncio.ensure_future(host.create())
    await settle(lambda: bool(host.supervisor.entries()))
    entry = host.supervisor.entries()[0]
    _, changed = await host.lifecycle.set_ttl("w", entry.record.id, 7, None)
    await made
    assert changed.ttl_seconds == 7
    await host.lifecycle.delete("w", changed.id)


# ---------------------------------------------------------------- keys


async def creates(host: Host, key: str, body: bytes = b"{}") -> Sandbox:
    from cloche_server.app.create import CreateRequest

    return await host.creates.create(CreateRequest("w"), key, body)


async def test_the_same_key_at_the_same_time_makes_one(host: Host) -> None:
    made = await asyncio.gather(*(creates(host, "k") for _ in range(8)))
    assert len({record.id for record in made}) == 1
    assert len(host.world.alive) == 1
    with pytest.raises(ClocheError, match="another request body"):
        await creates(host, "k", b"other")


async def test_the_next_request_with_a_key_makes_what_the_first_could_not(host: Host) -> None:
    """Also when more than one wait, and when the first was cancelled."""
    reached = host.world.block["Guest.renew"] = asyncio.Event()
    first = asyncio.ensure_future(creates(host, "k"))
    await reached.wait()
    host.world.block.clear()
    others = [asyncio.ensure_future(creates(host, "k")) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    late = [asyncio.ensure_future(creates(host, "k")) for _ in range(3)]
    made = await asyncio.gather(*others, *late)
    assert len({record.id for record in made}) == 1
    assert len(await host.rows()) == 1
    assert len(host.creates._turns) == 0


async def test_a_key_that_another_server_took_is_a_conflict(host: Host) -> None:
    other = await host.create()
    await host.database.execute(
        "insert_idempotency", workspace="w", key="k", request_hash="h", sandbox_id=other.id, created_at=0.0
    )
    from cloche_server.app.create import CreateRequest

    with pytest.raises(ClocheError) as told:
        await host.creator.create(CreateRequest("w", key=IdempotencyKey("k", "h")))
    assert told.value.code == "request.idempotency_conflict"
    assert set(host.world.alive) == {other.id}


async def test_a_server_that_ends_waits_until_creates_are_undone(host: Host) -> None:
    blocked = host.world.block["Guest.renew"] = asyncio.Event()
    creating = [asyncio.ensure_future(host.create()) for _ in range(3)]
    await blocked.wait()
    await settle(lambda: host.world.calls.count("Guest.renew") == 3)
    await host.creator.close()
    await host.supervisor.close()
    assert await host.left() == []
    assert all(task.done() for task in creating)
    await asyncio.wait(creating)
