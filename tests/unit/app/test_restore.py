"""Back to a snapshot in place: from every state, with faults at every call, and nothing left or lost on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from app_host import FULL, Crew, Host, refuse_updates
from app_states import sandbox_in, status

from cloche_server.app.machines import hostname
from cloche_server.app.sleep import STATE, USED
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import BootMode, Sandbox
from cloche_server.host import files
from kit.fake_engine import Gate, missing_layers, settle

pytestmark = pytest.mark.usefixtures("quick")

CALLS = ["Machine.kill", "Engine.launch", "Engine.launch.connect", "Machine.restore", "Machine.restore.cont",
         "Guest.connect", "Guest.renew"]  # fmt: skip
ERRORS = [ClocheError("sandbox.unreachable", "x"), OSError(5, "input/output error"), RuntimeError("unforeseen")]
STATES = ["running", "paused", "hibernated", "stopped", "failed"]


async def with_snapshot(host: Host, state: str = "running") -> tuple[Sandbox, str]:
    """A sandbox in that state, and a snapshot of a moment before."""
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    if state == "paused":
        await host.sleep.pause("w", record.id)
    elif state == "hibernated":
        await host.sleep.hibernate("w", record.id)
    elif state == "stopped":
        await host.power.stop("w", record.id, 5)
    elif state == "failed":
        host.world.alive[record.id].die()
        await settle(lambda: status(host, record.id) is Status.FAILED)
        await settle(lambda: not host.world.held)
    return host.access.list("w")[0], made.id


async def end(host: Host) -> None:
    assert await host.untrue() == []
    for snapshot in host.snapshots.list("w"):
        await host.snapshots.remove("w", snapshot.id)
    for record in host.access.list("w"):
        await host.lifecycle.delete("w", record.id)
    assert await host.untrue() == []
    assert await host.left() == []


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("state", STATES)
async def test_from_every_state(host: Host, state: str, memory: bool) -> None:
    record, snapshot = await with_snapshot(host, state)
    if not memory:
        snapshot = (await host.snapshots.take("w", (await host.create()).id, memory=False)).id
    before = host.supervisor.get(record.id)
    assert before is not None
    layer = before.record.layer_id
    host.clock.time += 100
    done = await host.restores.restore("w", record.id, snapshot)
    assert (done.id, done.status, done.checkpoint_id) == (record.id, Status.RUNNING, snapshot)
    assert (done.boot_mode, done.cold) == ((BootMode.SNAPSHOT, False) if memory else (BootMode.COLD, True))
    assert done.layer_id != layer
    assert done.termination is None
    assert done.ended_at is None
    assert done.expires_at == host.clock.time + done.ttl_seconds
    assert await host.untrue() == []
    await host.sleep.hibernate("w", record.id)
    await host.sleep.wake("w", record.id)
    await end(host)


async def test_to_the_last_one_if_none_is_named(host: Host) -> None:
    record, first = await with_snapshot(host)
    second = (await host.snapshots.take("w", record.id)).id
    assert (await host.restores.restore("w", record.id, None)).checkpoint_id == second
    assert (await host.restores.restore("w", record.id, first)).checkpoint_id == first
    third = await host.snapshots.take("w", record.id)
    assert third.parent_snapshot_id == first, "it was taken of what went on from the first one"
    found = host.snapshots.lineage("w", first)
    assert {one.id for one in found.children} == {second, third.id}
    assert host.snapshots.lineage("w", third.id).sandboxes == (record.id,)
    assert [one.id for one in host.snapshots.lineage("w", third.id).ancestors] == [first]
    await host.snapshots.remove("w", first)
    assert host.snapshots.lineage("w", third.id).missing == first
    await end(host)


async def test_one_that_has_no_snapshot_and_what_does_not_fit(host: Host) -> None:
    record = await host.create()
    with pytest.raises(ClocheError) as told:
        await host.restores.restore("w", record.id, None)
    assert told.value.code == "request.invalid"
    large = await host.create(disk_mb=2048)
    made = await host.snapshots.take("w", large.id)
    with pytest.raises(ClocheError) as told:
        await host.restores.restore("w", record.id, made.id)
    assert told.value.code == "request.invalid"
    with pytest.raises(ClocheError) as told:
        await host.restores.restore("w", record.id, "nothing")
    assert told.value.code == "snapshot.not_found"
    assert status(host, record.id) is Status.RUNNING
    small = await host.snapshots.take("w", record.id)
    assert (await host.restores.restore("w", large.id, small.id)).resources.disk_mb == 2048
    assert "Machine.grow_disk" in host.world.calls
    await end(host)


async def test_only_another_sandbox_gets_new_names(host: Host) -> None:
    record, snapshot = await with_snapshot(host)
    host.world.renewals.clear()
    await host.restores.restore("w", record.id, snapshot)
    ((name, request),) = host.world.renewals
    assert (name, request.hostname, request.machine_id, request.thaw) == (record.id, None, None, True)
    assert request.entropy
    host.world.renewals.clear()
    other = await host.create()
    host.world.renewals.clear()
    await host.restores.restore("w", other.id, snapshot)
    ((_, request),) = host.world.renewals
    assert request.hostname
    assert request.machine_id
    await end(host)


async def test_a_start_after_it_has_failed_has_the_disk_that_was_promised(host: Host) -> None:
    _, snapshot = await with_snapshot(host)
    large = await host.create(disk_mb=2048)
    host.world.fault["Guest.connect"] = ClocheError("sandbox.unreachable", "x")
    with pytest.raises(ClocheError):
        await host.restores.restore("w", large.id, snapshot)
    host.world.fault.clear()
    host.world.calls.clear()
    assert (await host.power.start("w", large.id)).resources.disk_mb == 2048
    assert "Machine.grow_disk" in host.world.calls
    await end(host)


async def test_one_that_boots_is_told_its_name(host: Host) -> None:
    """As at a start: its kernel has forgotten it. What is on the disk is its own."""
    record = await host.create()
    made = await host.snapshots.take("w", record.id, memory=False)
    host.world.renewals.clear()
    await host.restores.restore("w", record.id, made.id)
    ((_, request),) = host.world.renewals
    assert (request.hostname, request.machine_id) == (hostname(record.id), None)
    await end(host)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", CALLS)
async def test_a_restore_that_fails_can_be_repeated(host: Host, crew: Crew, call: str, error: Exception) -> None:
    """The sandbox has failed then: what it was is gone, and what it shall be is not there yet."""
    record, snapshot = await with_snapshot(host)
    host.world.fault[call] = error
    host.world.calls.clear()
    with pytest.raises(ClocheError):
        await host.restores.restore("w", record.id, snapshot)
    host.world.fault.clear()
    if call == "Machine.kill":
        return  # the next test has more
    await settle(lambda: not host.world.held)
    assert status(host, record.id) is Status.FAILED
    assert await host.untrue() == []
    await host.restores.restore("w", record.id, snapshot)
    assert status(host, record.id) is Status.RUNNING
    await end(host)
    assert crew.failed == []


@pytest.mark.parametrize("verb", ["restore", "start", "delete"])
@pytest.mark.parametrize("new", [False, True])
async def test_a_machine_that_resists_is_ended_by_the_next_verb(host: Host, new: bool, verb: str) -> None:
    """`new`: the one that was to go on."""
    record, snapshot = await with_snapshot(host, "stopped" if new else "running")
    host.world.fault["Machine.kill"] = ClocheError("internal", "it did not end")
    if new:
        host.world.fault["Guest.renew"] = ClocheError("sandbox.unreachable", "x")
    with pytest.raises(ClocheError):
        await host.restores.restore("w", record.id, snapshot)
    host.world.fault.clear()
    assert status(host, record.id) is Status.FAILED
    with pytest.raises(ClocheError) as told:
        await host.snapshots.take("w", record.id)
    assert told.value.code == "sandbox.invalid_state", "something may write to its disk"
    first = host.world.alive[record.id]
    if verb == "restore":
        await host.restores.restore("w", record.id, snapshot)
    elif verb == "start":
        await host.power.start("w", record.id)
    else:
        await host.lifecycle.delete("w", record.id)
    assert first.ended
    await end(host)


async def test_memory_that_cannot_be_removed_is_not_continued_from(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is what a later server would find."""
    record, snapshot = await with_snapshot(host, "hibernated")

    def refuse(path: Path) -> None:
        if path.name in {STATE, USED} and path.exists():
            raise OSError(24, "too many open files")
        remove(path)

    remove = files.remove_tree
    with monkeypatch.context() as patch:
        patch.setattr(files, "remove_tree", refuse)
        with pytest.raises(ClocheError):
            await host.restores.restore("w", record.id, snapshot)
    assert status(host, record.id) is Status.FAILED
    assert not (host.root / record.id / STATE).exists()
    await host.restores.restore("w", record.id, snapshot)
    await end(host)


@pytest.mark.parametrize("state", STATES)
async def test_what_cannot_be_recorded_is_not_begun(host: Host, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    record, snapshot = await with_snapshot(host, state)
    refusal = refuse_updates(host, monkeypatch, FULL)
    with pytest.raises(ClocheError) as told:
        await host.restores.restore("w", record.id, snapshot)
    assert told.value.code == "host.disk_full"
    refusal["on"] = False
    assert status(host, record.id) is Status(state)
    await end(host)


@pytest.mark.parametrize("call", ["Engine.launch", "Machine.restore", "Guest.renew"])
async def test_a_caller_that_goes_away(host: Host, call: str) -> None:
    """It is done all the same: half a restore is no state to leave a sandbox in."""
    record, snapshot = await with_snapshot(host)
    gate = host.world.gate[call] = Gate()
    restoring = asyncio.ensure_future(host.restores.restore("w", record.id, snapshot))
    await gate.reached.wait()
    assert status(host, record.id) is Status.RESTORING
    restoring.cancel()
    gate.open.set()
    await asyncio.wait({restoring})
    await settle(lambda: status(host, record.id) is not Status.RESTORING)
    assert status(host, record.id) is Status.RUNNING
    host.world.gate.clear()
    await host.lifecycle.set_metadata("w", record.id, {"after": "it"})
    await end(host)


async def test_a_call_in_between_waits(host: Host) -> None:
    record, snapshot = await with_snapshot(host)
    gate = host.world.gate["Machine.restore"] = Gate()
    restoring = asyncio.ensure_future(host.restores.restore("w", record.id, snapshot))
    await gate.reached.wait()
    calling = asyncio.ensure_future(host.access.serving("w", record.id))
    await asyncio.sleep(0)
    gate.open.set()
    entry, _ = await calling
    assert entry.record.status is Status.RUNNING
    await restoring
    await end(host)


async def test_deleted_meanwhile(host: Host) -> None:
    record, snapshot = await with_snapshot(host)
    gate = host.world.gate["Machine.restore"] = Gate()
    restoring = asyncio.ensure_future(host.restores.restore("w", record.id, snapshot))
    await gate.reached.wait()
    deleting = asyncio.ensure_future(host.lifecycle.delete("w", record.id))
    await host.snapshots.remove("w", snapshot)
    gate.open.set()
    await asyncio.gather(restoring, deleting, return_exceptions=True)
    assert await host.left() == []


@pytest.mark.parametrize(
    "call", ["Machine.kill", "Engine.launch", "Machine.restore", "Machine.restore.cont", "Guest.renew"]
)
@pytest.mark.parametrize("state", ["running", "hibernated"])
async def test_a_server_that_ends_in_it(host: Host, crew: Crew, state: str, call: str) -> None:
    """The next one finds a sandbox that has failed, with the disk of the snapshot, and no process of it."""
    record, snapshot = await with_snapshot(host, state)
    if state == "hibernated" and call == "Machine.kill":
        return  # it has no machine
    reached = host.world.block[call] = asyncio.Event()
    restoring = asyncio.ensure_future(host.restores.restore("w", record.id, snapshot))
    await reached.wait()
    stored = (await host.rows())[0]
    assert stored.status is Status.RESTORING
    host.world.block.clear()
    restoring.cancel()
    await host.supervisor.close()
    await asyncio.wait({restoring})
    after = (await host.rows())[0]
    assert after.status in {Status.RESTORING, Status.FAILED}
    assert after.layer_id == stored.layer_id != record.layer_id


async def test_a_server_that_ends_while_it_is_recorded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded names a disk that is there."""
    record, snapshot = await with_snapshot(host)
    update, reached, go_on = host.store.update, asyncio.Event(), asyncio.Event()

    async def slow(*what: Any) -> None:
        reached.set()
        await go_on.wait()
        await update(*what)

    monkeypatch.setattr(host.store, "update", slow)
    restoring = asyncio.ensure_future(host.restores.restore("w", record.id, snapshot))
    await reached.wait()
    ending = asyncio.ensure_future(host.supervisor.close())
    await asyncio.sleep(0)
    go_on.set()
    await ending
    restoring.cancel()
    after = (await host.rows())[0]
    assert after.status is Status.RESTORING
    assert missing_layers(host.machines.layers.path(after.layer_id)) == []


async def test_sandboxes_that_are_half_way_are_not_taken_back(host: Host) -> None:
    record = await sandbox_in(host, "running")
    made = await host.snapshots.take("w", record.id)
    gate = host.world.gate["Machine.capture"] = Gate()
    hibernating = asyncio.ensure_future(host.sleep.hibernate("w", record.id))
    await gate.reached.wait()
    restoring = asyncio.ensure_future(host.restores.restore("w", record.id, made.id))
    await asyncio.sleep(0)
    gate.open.set()
    await hibernating
    assert (await restoring).status is Status.RUNNING, "each in its turn"
    await end(host)
