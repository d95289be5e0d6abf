"""A new server over sandboxes that sleep, or were about to: killed at every call, its successor finds one truth."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from app_host import Host
from app_states import VERBS, sandbox_in, status

from cloche_server.app.fork import ForkRequest
from cloche_server.app.sleep import STATE, USED
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import Sandbox
from cloche_server.host import pages
from cloche_server.storage.layers import SUFFIX, make_overlay
from kit.fake_engine import FakeMachine, Gate, settle

pytestmark = pytest.mark.usefixtures("quick")


async def leave(host: Host) -> None:
    """The server ends in order; its machines run on."""
    await host.supervisor.close()


async def start(second: Host) -> None:
    """The next server starts, and all that it says is so."""
    await second.reconciler.run(same_boot=True)
    await settle(lambda: not any(entry.unsaved for entry in second.supervisor.entries()))
    assert await second.untrue() == []


async def end(host: Host) -> None:
    for snapshot in host.snapshots.list("w"):
        await host.snapshots.remove("w", snapshot.id)
        assert await host.untrue() == []
    for record in host.access.list("w"):
        await host.lifecycle.delete("w", record.id)
        assert await host.untrue() == []
    assert await host.left() == []


async def works(host: Host, sandbox_id: str) -> None:
    """It can be woken, resumed, saved and woken again."""
    state = status(host, sandbox_id)
    if state is Status.FAILED:
        return
    await VERBS["resume" if state is Status.PAUSED else "wake"](host, sandbox_id)
    assert await host.untrue() == []
    await host.sleep.hibernate("w", sandbox_id)
    await host.sleep.wake("w", sandbox_id)
    assert await host.untrue() == []


# ------------------------------------------------------------------ every state


@pytest.mark.parametrize("half_way", [Status.HIBERNATING, Status.WAKING])
@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("alive", [True, False])
async def test_half_way(host: Host, second: Host, half_way: Status, memory: bool, alive: bool) -> None:
    """While its memory is there no machine has gone on from it; without it a machine that lives is the sandbox."""
    record = await sandbox_in(host, "hibernated")
    await leave(host)
    directory = host.root / record.id
    if not memory:
        (directory / STATE).rename(directory / USED)
    ref = record.process
    if alive:
        machine = FakeMachine(host.world, record.id, directory, host.world.new_ref())
        machine.disk = host.machines.layers.path(record.layer_id)
        machine.release()
        host.world.frozen.add(record.id)
        host.world.slots.add(record.id)
        ref = machine.ref if half_way is Status.HIBERNATING else None
    await host.store.update(replace(record, status=half_way, process=ref, version=record.version + 1))
    await start(second)
    wanted = Status.HIBERNATED if memory else (Status.RUNNING if alive else Status.FAILED)
    assert status(second, record.id) is wanted
    await works(second, record.id)
    await end(second)


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("memory", [True, False])
async def test_half_way_back_to_a_snapshot(host: Host, second: Host, memory: bool, alive: bool) -> None:
    """It has failed: its old machine and its saved memory belong to another disk than the one it has now."""
    record = await sandbox_in(host, "hibernated" if memory else "running")
    made = await host.snapshots.take("w", (await host.create()).id)
    await leave(host)
    if not memory and not alive:
        host.world.alive[record.id].die()
    layers, template = host.machines.layers, host.creator._catalog.existing(record.template_id).template
    layers.create("of-the-snapshot", template, made.layer_id)
    changes = {"layer_id": "of-the-snapshot", "status": Status.RESTORING, "version": record.version + 1}
    await host.store.update(replace(record, **changes))
    await start(second)
    assert status(second, record.id) is Status.FAILED
    assert record.id not in second.world.alive
    done = await second.restores.restore("w", record.id, made.id)
    assert done.status is Status.RUNNING
    await works(second, record.id)
    await end(second)


@pytest.mark.parametrize("state", ["running", "paused"])
@pytest.mark.parametrize("runs", [True, False])
async def test_what_stands_still_and_what_runs(host: Host, second: Host, state: str, runs: bool) -> None:
    """The record decides, whatever the old server had just told the machine."""
    record = await sandbox_in(host, state)
    await leave(host)
    host.world.alive[record.id].runs = runs
    await start(second)
    assert status(second, record.id) is Status(state)
    await works(second, record.id)
    await end(second)


@pytest.mark.parametrize("state", ["running", "paused"])
async def test_a_machine_that_died_meanwhile(host: Host, second: Host, state: str) -> None:
    record = await sandbox_in(host, state)
    await leave(host)
    host.world.alive[record.id].die()
    await start(second)
    assert status(second, record.id) is Status.FAILED
    await end(second)


@pytest.mark.parametrize("resisting", [True, False])
async def test_what_is_hibernated_stays_so(host: Host, second: Host, resisting: bool) -> None:
    record = await sandbox_in(host, "hibernated", disk_mb=2048)
    await leave(host)
    if resisting:
        FakeMachine(host.world, record.id, host.root / record.id, host.world.new_ref())
    await start(second)
    assert status(second, record.id) is Status.HIBERNATED
    usage = second.capacity.usage()
    assert (usage.sandboxes, usage.memory_mb, usage.disk_mb) == (1, 0, 2048)
    assert second.supervisor.entries()[0].record.expires_at == record.expires_at
    await second.access.serving("w", record.id)
    await works(second, record.id)
    await end(second)


@pytest.mark.parametrize("state", ["paused", "hibernated"])
async def test_a_ttl_that_passed_meanwhile(host: Host, second: Host, state: str) -> None:
    record = await sandbox_in(host, state, ttl_seconds=10)
    await leave(host)
    second.clock.time += 11
    await second.reconciler.run(same_boot=True)
    await settle(lambda: second.supervisor.get(record.id) is None)
    assert await second.left() == []


@pytest.mark.parametrize("call", ["Machine.resume", "Machine.pause"])
async def test_a_machine_that_cannot_be_steered_has_failed(host: Host, second: Host, call: str) -> None:
    """And does not keep the others from being taken over."""
    record = await sandbox_in(host, "running" if call == "Machine.resume" else "paused")
    other = await sandbox_in(host, "paused" if call == "Machine.resume" else "running")
    await leave(host)
    host.world.fault[call] = ClocheError("sandbox.unreachable", "x")
    await second.reconciler.run(same_boot=True)
    host.world.fault.clear()
    assert status(second, record.id) is Status.FAILED
    assert status(second, other.id) is other.status
    assert await second.untrue() == []
    await end(second)


# ------------------------------------------------------------------ killed at every call


Kill = Callable[..., Awaitable[None]]


@pytest.fixture
async def kill_at(host: Host) -> AsyncIterator[Kill]:
    """Makes the server stand still in a call, as one that was killed does; what it held is free."""
    standing: list[tuple[Gate, asyncio.Future[Any]]] = []

    async def kill_at(call: str, work: Any, times: int = 1) -> None:
        world, before = host.world, host.world.calls.count(call)
        gate = world.gate[call] = Gate()
        standing.append((gate, asyncio.ensure_future(work)))
        await settle(lambda: world.calls.count(call) >= before + times)
        await gate.reached.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        del world.gate[call]
        world.open_guests.clear()
        world.held.clear()
        world.captured.clear()

    yield kill_at
    for gate, task in standing:  # whatever they do now, nobody looks
        gate.open.set()
        task.cancel()
        await asyncio.wait({task})


PAUSES = [("running", "pause", call) for call in ("Guest.freeze", "Machine.pause")]
RESUMES = [("paused", "resume", call) for call in ("Machine.resume", "Guest.renew")]
HIBERNATIONS = [
    (state, "hibernate", call)
    for state in ("running", "paused")
    for call in ("Machine.capture", "Machine.capture.stopped", "Machine.capture.cont", "Guest.aclosed", "Machine.kill")
]
WAKES = [
    ("hibernated", "wake", call)
    for call in (
        "Engine.launch",
        "Engine.launch.connect",
        "Machine.restore",
        "Machine.restore.cont",
        "Guest.connect",
        "Guest.renew",
    )
]


@pytest.mark.parametrize(("state", "verb", "call"), [*PAUSES, *RESUMES, *HIBERNATIONS, *WAKES])
async def test_killed_in_a_verb(host: Host, second: Host, kill_at: Kill, state: str, verb: str, call: str) -> None:
    record = await sandbox_in(host, state)
    await kill_at(call, VERBS[verb](host, record.id))
    host.world.frozen.clear()  # a guest thaws by itself
    if state == "paused" and verb == "resume":
        host.world.frozen.add(record.id)
    await start(second)
    assert status(second, record.id) in {Status.RUNNING, Status.PAUSED, Status.HIBERNATED}, "nothing is lost"
    await works(second, record.id)
    await end(second)


CAPTURES = ["Guest.freeze", "Machine.capture", "Machine.capture.sealed", "Machine.capture.cont", "Guest.thaw"]


@pytest.mark.parametrize("call", [*CAPTURES, "Engine.launch", "Machine.restore", "Guest.renew"])
async def test_killed_in_a_fork(host: Host, second: Host, kill_at: Kill, call: str) -> None:
    """The parent goes on over the layer it really writes to; nothing is left of children without a server."""
    parent = await host.create()
    await kill_at(call, host.forks.make("w", parent.id, ForkRequest(2)), 1 if call in CAPTURES else 2)
    host.world.frozen.clear()
    await start(second)
    assert [record.id for record in second.access.list("w")] == [parent.id]
    assert (second.access.list("w")[0].layer_id == parent.layer_id) == (call in {"Guest.freeze", "Machine.capture"})
    made = await second.forks.make("w", parent.id, ForkRequest(2))
    assert len(made.children) == 2
    await end(second)


@pytest.mark.parametrize("call", CAPTURES)
async def test_killed_while_a_snapshot_is_taken(host: Host, second: Host, kill_at: Kill, call: str) -> None:
    record = await host.create()
    await kill_at(call, host.snapshots.take("w", record.id))
    host.world.frozen.clear()
    await start(second)
    assert second.snapshots.list("w") == []
    await second.snapshots.take("w", record.id)
    await works(second, record.id)
    await end(second)


async def test_killed_while_the_memory_is_written(host: Host, second: Host) -> None:
    """Half of a memory is none."""
    record = await host.create()
    await leave(host)
    half = host.root / record.id / ".staging-4194304-1-abcd" / STATE
    half.mkdir(parents=True)
    (half / "pages").write_bytes(b"x" * 100_000)
    host.world.alive[record.id].runs = False
    await host.store.update(replace(record, status=Status.HIBERNATING, version=record.version + 1))
    await start(second)
    assert status(second, record.id) is Status.RUNNING
    assert not half.exists()
    await works(second, record.id)
    await end(second)


# ------------------------------------------------------------------ ended in order


async def test_ended_while_the_memory_is_written(host: Host, second: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be stopped is waited for; then the sandbox runs on, and nothing would continue from old memory."""
    record = await host.create()
    begun, go_on = threading.Event(), threading.Event()
    save = pages.Pages.save

    def slow(self: pages.Pages, path: Any) -> str:
        begun.set()
        go_on.wait(20)
        return save(self, path)

    monkeypatch.setattr(pages.Pages, "save", slow)
    task = asyncio.ensure_future(host.sleep.hibernate("w", record.id))
    await asyncio.to_thread(begun.wait, 20)
    closing = asyncio.ensure_future(leave(host))
    await asyncio.sleep(0.02)
    go_on.set()
    done, _ = await asyncio.wait({closing}, timeout=20)
    assert done, "the server never ended"
    task.cancel()
    await asyncio.wait({task})
    assert not (host.root / record.id / STATE).exists()
    assert host.world.alive[record.id].runs
    assert [one.status for one in await host.rows()] == [Status.RUNNING]
    host.world.frozen.clear()
    await start(second)
    await works(second, record.id)
    await end(second)


async def test_ended_while_a_snapshot_is_written(host: Host, second: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await host.create()
    begun, go_on = threading.Event(), threading.Event()
    save = pages.Pages.save

    def slow(self: pages.Pages, path: Any) -> str:
        begun.set()
        go_on.wait(20)
        return save(self, path)

    monkeypatch.setattr(pages.Pages, "save", slow)
    task = asyncio.ensure_future(host.snapshots.take("w", record.id))
    await asyncio.to_thread(begun.wait, 20)
    closing = asyncio.ensure_future(leave(host))
    await asyncio.sleep(0.02)
    go_on.set()
    done, _ = await asyncio.wait({closing}, timeout=20)
    assert done, "the server never ended"
    task.cancel()
    await asyncio.wait({task})
    await start(second)
    for snapshot in second.snapshots.list("w"):
        async with second.snapshots.source("w", snapshot.id):
            pass
    await works(second, record.id)
    await end(second)


# ------------------------------------------------------------------ layers and snapshots


async def family(host: Host) -> list[Sandbox]:
    """Parent, child and grandchild, and a snapshot of each but the first, whose origin is then deleted."""
    parent = await host.create()
    child = (await host.forks.make("w", parent.id, ForkRequest())).children[0]
    grandchild = (await host.forks.make("w", child.id, ForkRequest())).children[0]
    await host.snapshots.take("w", child.id)
    await host.snapshots.take("w", grandchild.id)
    await host.lifecycle.delete("w", child.id)
    await host.sleep.hibernate("w", grandchild.id)
    return [parent, grandchild]


async def test_layers_are_held_as_before(host: Host, second: Host) -> None:
    records = await family(host)
    assert await host.untrue() == []
    holds = dict(host.machines.layers._holds)
    await leave(host)
    await start(second)
    assert second.machines.layers._holds == holds
    assert len(second.snapshots.list("w")) == 2
    for record in records:
        await works(second, record.id)
    await end(second)


async def test_layers_of_nobody_go(host: Host, second: Host) -> None:
    await family(host)
    there = {path.name for path in host.machines.layers.root.iterdir()}
    await leave(host)
    layers, overlay = host.machines.layers, host.creator._catalog.meta.template.directory / "overlay.qcow2"  # type: ignore[attr-defined]
    make_overlay(overlay, layers.path("lonely"), sorted(there)[0], 1 << 30)
    layers.path("half").write_bytes(b"QFI")
    report = await second.reconciler.run(same_boot=True)
    assert report.orphans == 2
    assert {path.name for path in layers.root.iterdir()} == there
    assert await second.untrue() == []
    await end(second)


async def test_layers_of_a_snapshot_that_cannot_be_read_are_kept(host: Host, second: Host) -> None:
    """It may be a fault that passes; without its layers it would be lost for good."""
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    await host.lifecycle.delete("w", record.id)
    await leave(host)
    meta = host.catalog.root / made.id / "meta.json"
    whole = meta.read_bytes()
    meta.write_bytes(b"")
    await second.reconciler.run(same_boot=True)
    assert second.snapshots.list("w") == []
    assert host.machines.layers.path(made.layer_id).exists()
    meta.write_bytes(whole)
    await start(second)
    assert [one.id for one in second.snapshots.list("w")] == [made.id]
    await end(second)


async def test_a_layer_that_could_not_be_recorded(host: Host, second: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine says what it writes to, whatever the record says."""
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    entry = host.supervisor.get(record.id)
    assert entry is not None
    true_layer = entry.record.layer_id
    await leave(host)
    await host.store.update(replace(entry.record, layer_id=made.layer_id, version=entry.record.version + 1))
    await start(second)
    assert second.access.list("w")[0].layer_id == true_layer
    assert host.machines.layers.path(true_layer).name == true_layer + SUFFIX
    await second.snapshots.remove("w", made.id)
    assert await second.untrue() == []
    await works(second, record.id)
    await end(second)
