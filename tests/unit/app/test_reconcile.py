"""A new server over what an old one has left: every state of a record, with and without a machine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from app_host import Host

from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import ProcessRef, TerminationReason
from kit.fake_engine import FakeMachine, settle


async def leave(host: Host) -> None:
    """The server ends; its machines run on."""
    await host.supervisor.close()


async def test_running_ones_are_adopted(host: Host, second: Host) -> None:
    records = [await host.create(ttl_seconds=100 + n) for n in range(3)]
    await leave(host)
    report = await second.reconciler.run(same_boot=True)
    assert (report.adopted, report.failed, report.finished, report.orphans) == (3, 0, 0, 0)
    assert {e.record.id: e.record for e in second.supervisor.entries()} == {r.id: r for r in records}
    assert second.capacity.usage().sandboxes == 3
    second.world.alive[records[0].id].die()
    await settle(lambda: Status.FAILED in {e.record.status for e in second.supervisor.entries()})
    for record in records:
        await second.lifecycle.delete("w", record.id)
    assert await second.left() == []


@pytest.mark.parametrize("same_boot", [True, False])
async def test_dead_ones_have_failed(host: Host, second: Host, same_boot: bool) -> None:
    record = await host.create()
    await leave(host)
    host.world.alive[record.id].die()
    report = await second.reconciler.run(same_boot=same_boot)
    assert report.failed == 1
    entry = second.supervisor.entries()[0]
    wanted = TerminationReason.VMM_DIED if same_boot else TerminationReason.HOST_RESTART
    assert entry.record.termination is not None
    assert entry.record.termination.reason is wanted
    with pytest.raises(ClocheError) as told:
        await second.access.serving("w", record.id)
    assert told.value.code == "sandbox.failed"
    assert second.capacity.usage().memory_mb == 0
    third = await second.reconciler.run(same_boot=True)
    assert third.failed == 0
    await second.lifecycle.delete("w", record.id)
    assert await second.left() == []


async def test_a_ttl_that_passed_meanwhile(host: Host, second: Host) -> None:
    await host.create(ttl_seconds=10)
    await leave(host)
    second.clock.time += 11
    await second.reconciler.run(same_boot=True)
    await settle(lambda: not second.supervisor.entries())
    assert await second.left() == []


@pytest.mark.parametrize("call", ["Engine.launch", "Engine.launch.connect", "Machine.restore", "Guest.renew"])
async def test_a_create_that_the_old_server_did_not_end(host: Host, second: Host, call: str) -> None:
    reached = host.world.block[call] = asyncio.Event()
    task = asyncio.ensure_future(host.create())
    await reached.wait()
    # The old server stands still from here on, as one that was killed does.
    host.world.block.pop(call)
    host.world.open_guests.clear()
    report = await second.reconciler.run(same_boot=True)
    assert report.finished == 1
    assert second.supervisor.entries() == []
    assert await second.rows() == []
    assert [p.name for p in second.root.iterdir()] == []
    assert not second.world.alive
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("machine_alive", [True, False])
@pytest.mark.parametrize("directory", [True, False])
async def test_a_delete_that_the_old_server_did_not_end(
    host: Host, second: Host, machine_alive: bool, directory: bool
) -> None:
    record = await host.create()
    await leave(host)
    await host.store.update(replace(record, status=Status.DELETING, version=record.version + 1))
    if not machine_alive:
        host.world.alive[record.id].die()
    if not directory:
        (host.root / record.id).rmdir()
    report = await second.reconciler.run(same_boot=True)
    assert report.finished == 1
    assert await second.left() == []
    past = await second.store.get(record.id)
    assert past is not None
    assert past.status is Status.DELETED
    assert past.termination is not None


async def test_what_has_no_record_goes(host: Host, second: Host) -> None:
    kept = await host.create()
    await leave(host)
    lonely = FakeMachine(second.world, "lonely", second.root / "lonely", ProcessRef(7777, 1))
    lonely.directory.mkdir()
    (second.root / "only-files").mkdir()
    (second.root / "only-files" / "overlay.qcow2").write_bytes(b"x")
    (second.root / "a-file").write_bytes(b"x")
    report = await second.reconciler.run(same_boot=True)
    assert report.orphans == 3
    assert set(second.world.alive) == {kept.id}
    assert [p.name for p in second.root.iterdir()] == [kept.id]


async def test_another_process_of_that_name_is_not_adopted(host: Host, second: Host) -> None:
    record = await host.create()
    await leave(host)
    await host.store.update(replace(record, process=ProcessRef(1, 1), version=record.version + 1))
    report = await second.reconciler.run(same_boot=True)
    assert report.failed == 1
    assert second.world.alive == {}, "a machine that nobody steers must not run on"


async def test_one_record_that_resists_does_not_hold_up_the_others(
    host: Host, second: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [await host.create() for _ in range(3)]
    await leave(host)
    adopt = second.machines.engine.adopt

    async def failing(machine_id: str, directory: Path, ref: ProcessRef) -> object:
        if machine_id == records[0].id:
            raise OSError(24, "too many open files")
        return await adopt(machine_id, directory, ref)

    monkeypatch.setattr(second.machines.engine, "adopt", failing)
    with pytest.raises(ClocheError, match="left as they are"):
        await second.reconciler.run(same_boot=True)
    assert set(second.world.alive) == {record.id for record in records}
    assert {r.status for r in await second.rows()} == {Status.RUNNING}


async def test_machines_that_a_new_database_does_not_know_are_not_ended(host: Host, second: Host) -> None:
    """A database that was lost is no reason to end what runs."""
    records = [await host.create() for _ in range(2)]
    await leave(host)
    for record in records:
        await host.store.forget(record.id)
    second.database.new = True
    with pytest.raises(ClocheError, match="2 machines run below"):
        await second.reconciler.run(same_boot=True)
    assert len(second.world.alive) == 2
    assert len(list(second.root.iterdir())) == 2
