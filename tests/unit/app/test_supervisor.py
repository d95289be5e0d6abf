"""The task of a sandbox: crashes, deletes, TTLs, a database that refuses, and their races."""

from __future__ import annotations

import asyncio

import pytest
from app_host import FULL, Crew, Host, refuse_updates

from cloche_server.app import tend as tend_module
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.ports import MachineExit
from cloche_server.core.records import TerminationReason
from cloche_server.store.db import Conflict
from kit.fake_engine import FakeMachine, settle

pytestmark = pytest.mark.usefixtures("quick")


def machine(host: Host, sandbox_id: str) -> FakeMachine:
    return host.world.alive[sandbox_id]


async def test_a_crash_is_told(host: Host) -> None:
    record = await host.create()
    machine(host, record.id).die(MachineExit(signal="SIGKILL"))
    entry = host.supervisor.get(record.id)
    assert entry is not None
    await settle(lambda: entry.record.status is Status.FAILED)
    assert entry.record.termination is not None
    assert entry.record.termination.reason is TerminationReason.VMM_DIED
    await settle(lambda: not host.world.held and not host.world.open_guests)
    usage = host.capacity.usage()
    assert (usage.sandboxes, usage.memory_mb, usage.disk_mb) == (1, 0, 1024)
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []
    past = await host.store.get(record.id)
    assert past is not None
    assert past.termination is not None
    assert past.termination.reason is TerminationReason.VMM_DIED, "how it ended is not forgotten by the delete"


@pytest.mark.parametrize("first", ["die", "delete"])
async def test_a_crash_while_a_delete_is_queued(host: Host, crew: Crew, first: str) -> None:
    """Whichever is first, it is deleted, and nothing of this ends the server."""
    for _ in range(20):
        record = await host.create()
        changing = [asyncio.ensure_future(host.lifecycle.set_metadata("w", record.id, {"n": str(n)})) for n in range(3)]
        await asyncio.sleep(0)
        victim = machine(host, record.id)
        if first == "die":
            victim.die()
        deleting = asyncio.ensure_future(host.lifecycle.delete("w", record.id))
        await asyncio.sleep(0)
        victim.die()
        await deleting
        await asyncio.gather(*changing, return_exceptions=True)
        await asyncio.sleep(0)
        assert crew.failed == []
    assert await host.left() == []


async def test_two_deletes_at_once_both_succeed(host: Host) -> None:
    record = await host.create()
    await asyncio.gather(*(host.lifecycle.delete("w", record.id) for _ in range(5)))
    assert await host.left() == []
    with pytest.raises(ClocheError) as told:
        await host.lifecycle.delete("w", record.id)
    assert told.value.code == "sandbox.not_found"


async def test_an_illegal_move_changes_nothing(host: Host) -> None:
    record = await host.create()
    entry = host.supervisor.get(record.id)
    assert entry is not None
    with pytest.raises(ClocheError) as told:
        await host.supervisor.post(entry, Event.BOOTED)
    assert told.value.code == "sandbox.invalid_state"
    with pytest.raises(ClocheError):
        await host.supervisor.post(entry, Event.RELEASED)
    assert entry.record == record
    assert await host.store.get(record.id) == record


# ---------------------------------------------------------------- TTL


async def test_the_ttl_ends_a_sandbox(host: Host) -> None:
    record = await host.create(ttl_seconds=10)
    host.clock.time += 9.9
    await asyncio.sleep(0.05)
    assert host.supervisor.get(record.id) is not None
    host.clock.time += 0.1
    await settle(lambda: host.supervisor.get(record.id) is None)
    assert await host.left() == []
    past = await host.store.get(record.id)
    assert past is not None
    assert past.termination is not None
    assert past.termination.reason is TerminationReason.TTL


async def test_a_renewal_that_was_accepted_counts(host: Host) -> None:
    """Renewals race the expiry: after a renewal without an error the sandbox lives on."""
    for turn in range(30):
        record = await host.create(ttl_seconds=10)
        host.clock.time += 10
        for _ in range(turn % 6):
            await asyncio.sleep(0)
        renewing = asyncio.ensure_future(host.lifecycle.set_ttl("w", record.id, 1000, None))
        await asyncio.wait({renewing})
        refused = renewing.exception()
        if refused is not None:
            assert isinstance(refused, ClocheError)
            assert refused.code == "sandbox.not_found"
            await settle(lambda record=record: host.supervisor.get(record.id) is None)  # type: ignore[misc]
        else:
            await asyncio.sleep(0.05)
            entry = host.supervisor.get(record.id)
            assert entry is not None
            assert entry.record.status is Status.RUNNING
            await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


async def test_a_failed_sandbox_goes_with_its_ttl(host: Host) -> None:
    record = await host.create(ttl_seconds=10)
    machine(host, record.id).die()
    await settle(lambda: not host.world.held)
    host.clock.time += 11
    await settle(lambda: host.supervisor.get(record.id) is None)
    assert await host.left() == []


# ---------------------------------------------------------------- a database that refuses


@pytest.mark.parametrize("error", [FULL, ClocheError("internal", "the database of the server refused an operation")])
async def test_a_crash_that_cannot_be_recorded_is_told_and_recorded_later(
    host: Host, crew: Crew, monkeypatch: pytest.MonkeyPatch, error: ClocheError
) -> None:
    record = await host.create()
    refusal = refuse_updates(host, monkeypatch, error)
    machine(host, record.id).die()
    entry = host.supervisor.get(record.id)
    assert entry is not None
    await settle(lambda: entry.record.status is Status.FAILED)
    assert crew.failed == []
    with pytest.raises(ClocheError) as told:
        await host.access.serving("w", record.id)
    assert told.value.code == "sandbox.failed"
    await settle(lambda: refusal["times"] >= 3)
    refusal["on"] = False
    await settle(lambda: not entry.unsaved)
    assert [r.status for r in await host.rows()] == [Status.FAILED]
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


async def test_a_delete_makes_room_though_it_cannot_be_recorded_first(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await host.create()
    refusal = refuse_updates(host, monkeypatch, FULL)
    remove = host.machines.remove_directory

    async def removed(machine_id: str) -> None:
        await remove(machine_id)
        refusal["on"] = False  # what makes room

    monkeypatch.setattr(host.machines, "remove_directory", removed)
    await host.lifecycle.delete("w", record.id)
    assert refusal["times"] == 1
    assert await host.left() == []


async def test_a_delete_that_cannot_be_recorded_at_all_ends_later(
    host: Host, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await host.create()
    refusal = refuse_updates(host, monkeypatch, FULL)
    with pytest.raises(ClocheError) as told:
        await host.lifecycle.delete("w", record.id)
    assert told.value.code == "host.disk_full"
    assert host.world.is_empty(host.root) == [], "the machine is gone all the same"
    await settle(lambda: refusal["times"] >= 5)
    refusal["on"] = False
    await settle(lambda: host.supervisor.get(record.id) is None)
    assert await host.left() == []
    assert crew.failed == []


@pytest.mark.parametrize("error", [Conflict(), RuntimeError("unforeseen")])
async def test_a_ttl_that_cannot_be_recorded_does_not_spin(
    host: Host, crew: Crew, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await host.create(ttl_seconds=10)
    refusal = refuse_updates(host, monkeypatch, error)
    host.clock.time += 11
    await asyncio.sleep(0.3)
    assert 1 <= refusal["times"] <= 20
    assert crew.failed == []
    refusal["on"] = False
    await settle(lambda: not host.supervisor.entries())
    assert await host.left() == []


async def test_a_change_that_cannot_be_recorded_is_not_made(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await host.create(ttl_seconds=50)
    refusal = refuse_updates(host, monkeypatch, FULL)
    with pytest.raises(ClocheError) as told:
        await host.lifecycle.set_ttl("w", record.id, 70, None)
    assert told.value is FULL
    entry = host.supervisor.get(record.id)
    assert entry is not None
    assert entry.record.ttl_seconds == 50
    refusal["on"] = False
    await host.lifecycle.set_ttl("w", record.id, 70, None)
    assert entry.record.ttl_seconds == 70


# ---------------------------------------------------------------- things that resist


@pytest.mark.parametrize("call", ["Machine.kill", "Guest.aclosed"])
async def test_a_delete_that_fails_is_tried_until_it_succeeds(host: Host, crew: Crew, call: str) -> None:
    record = await host.create()
    host.world.fault[call] = OSError(5, "input/output error")
    with pytest.raises(ClocheError):
        await host.lifecycle.delete("w", record.id)
    entry = host.supervisor.get(record.id)
    assert entry is not None
    assert entry.record.status is Status.DELETING
    with pytest.raises(ClocheError) as told:
        await host.access.serving("w", record.id)
    assert told.value.code in {"sandbox.not_found", "sandbox.invalid_state"}
    host.world.fault.clear()
    await settle(lambda: host.supervisor.get(record.id) is None)
    assert await host.left() == []
    assert crew.failed == []


async def test_one_machine_that_cannot_be_tended_stops_nobody(
    host: Host, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tend_module, "TEND_EVERY", 0.005)
    for _ in range(2):
        await host.create()
    host.world.fault["Machine.tend"] = OSError(28, "no space")
    crew.create_task(tend_module.tend(host.supervisor, host.machines))
    await settle(lambda: host.world.calls.count("Machine.tend") >= 6)
    assert crew.failed == []


async def test_closing_lets_the_machines_live(host: Host) -> None:
    records = [await host.create() for _ in range(3)]
    await host.supervisor.close()
    assert set(host.world.alive) == {record.id for record in records}
    assert host.world.held == set()
    assert host.world.open_guests == set()
    assert {r.status for r in await host.rows()} == {Status.RUNNING}


async def test_a_directory_that_resists_is_removed_later(
    host: Host, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of a create that came to nothing, of which no record is left."""
    from cloche_server.app import machines as machines_module

    monkeypatch.setattr(tend_module, "TEND_EVERY", 0.01)
    remove, resists = machines_module.files.remove_tree, True

    def remove_tree(path: object) -> None:
        if resists:
            raise OSError(24, "too many open files")
        remove(path)  # type: ignore[arg-type]

    monkeypatch.setattr(machines_module.files, "remove_tree", remove_tree)
    crew.create_task(tend_module.tend(host.supervisor, host.machines))
    host.world.fault["Guest.renew"] = ClocheError("sandbox.boot_failed", "x")
    with pytest.raises(ClocheError):
        await host.create()
    await asyncio.sleep(0.05)
    assert len(list(host.root.iterdir())) == 1
    resists = False
    await settle(lambda: not list(host.root.iterdir()))
    assert crew.failed == []
    assert await host.left() == []
