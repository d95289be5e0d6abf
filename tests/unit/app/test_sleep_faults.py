"""Every call of a pause, resume, hibernation and wake fails in turn, and what is told afterwards is so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from app_host import FULL, Crew, Host, refuse_updates
from app_states import VERBS, sandbox_in, status

from cloche_server.app import sleep as sleep_module
from cloche_server.app.sleep import STATE, USED
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.host import files, pages
from cloche_server.storage import saved
from kit.fake_engine import settle

pytestmark = pytest.mark.usefixtures("quick")

ERRORS = [ClocheError("sandbox.unreachable", "x"), OSError(5, "input/output error"), RuntimeError("unforeseen")]

#: State before, verb, call that fails, and the state afterwards: as before, or as was asked for.
FAULTS = [
    ("running", "pause", "Machine.pause", Status.RUNNING),
    ("paused", "resume", "Machine.resume", Status.PAUSED),
    ("running", "hibernate", "Guest.freeze", Status.RUNNING),
    ("running", "hibernate", "Machine.capture", Status.RUNNING),
    ("running", "hibernate", "Machine.capture.stopped", Status.RUNNING),
    ("running", "hibernate", "Machine.capture.cont", Status.RUNNING),
    ("running", "hibernate", "Guest.aclosed", Status.HIBERNATED),
    ("running", "hibernate", "Machine.kill", Status.HIBERNATED),
    ("paused", "hibernate", "Machine.capture", Status.RUNNING),
    ("paused", "hibernate", "Machine.capture.stopped", Status.RUNNING),
    ("paused", "hibernate", "Machine.kill", Status.HIBERNATED),
    ("hibernated", "wake", "Engine.launch", Status.HIBERNATED),
    ("hibernated", "wake", "Engine.launch.connect", Status.HIBERNATED),
    ("hibernated", "wake", "Machine.restore", Status.HIBERNATED),
    ("hibernated", "wake", "Machine.restore.cont", Status.FAILED),
    ("hibernated", "wake", "Guest.connect", Status.FAILED),
    ("hibernated", "wake", "Guest.renew", Status.FAILED),
]


@pytest.mark.parametrize(("state", "verb", "call", "after"), FAULTS)
@pytest.mark.parametrize("error", ERRORS)
async def test_a_call_that_fails(
    host: Host, crew: Crew, state: str, verb: str, call: str, after: Status, error: Exception
) -> None:
    record = await sandbox_in(host, state)
    host.world.fault[call] = error
    done = await asyncio.gather(VERBS[verb](host, record.id), return_exceptions=True)
    assert isinstance(done[0], ClocheError) == (after is not Status.HIBERNATED or verb == "wake")
    assert status(host, record.id) is after
    host.world.fault.clear()
    if call != "Machine.kill":
        await settle(lambda: after is not Status.FAILED or not host.world.held)
        assert await host.untrue() == []
    await _goes_on(host, record.id, after)
    assert crew.failed == []
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


async def _goes_on(host: Host, sandbox_id: str, after: Status) -> None:
    """Whatever has failed before, all verbs work as if it had not."""
    if after is Status.FAILED:
        return
    if after is Status.HIBERNATED:
        await host.sleep.wake("w", sandbox_id)
    elif after is Status.PAUSED:
        await host.sleep.resume("w", sandbox_id)
    assert await host.untrue() == []
    await host.sleep.pause("w", sandbox_id)
    await host.sleep.hibernate("w", sandbox_id)
    await host.sleep.wake("w", sandbox_id)
    assert await host.untrue() == []


@pytest.mark.parametrize("call", ["Guest.freeze", "Guest.renew", "Guest.thaw"])
async def test_a_guest_that_does_not_answer_is_paused_and_resumed_all_the_same(host: Host, call: str) -> None:
    record = await host.create()
    host.world.fault[call] = ClocheError("sandbox.unreachable", "x")
    await host.sleep.pause("w", record.id)
    assert not host.world.alive[record.id].runs
    await host.sleep.resume("w", record.id)
    assert host.world.alive[record.id].runs
    assert status(host, record.id) is Status.RUNNING


async def test_a_guest_that_does_not_thaw_after_a_hibernation_that_failed(host: Host) -> None:
    """It thaws by itself; what was asked for has failed for another reason, and that is told."""
    record = await host.create()
    host.world.fault["Machine.capture"] = ClocheError("sandbox.capture_failed", "why")
    host.world.fault["Guest.thaw"] = ClocheError("sandbox.unreachable", "x")
    with pytest.raises(ClocheError, match="why"):
        await host.sleep.hibernate("w", record.id)
    assert status(host, record.id) is Status.RUNNING
    assert host.world.alive[record.id].runs


async def test_a_machine_that_cannot_be_started_again_is_told_as_paused(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await host.create()

    def full(*_: object) -> str:
        host.world.fault["Machine.resume"] = ClocheError("sandbox.unreachable", "x")
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(pages.Pages, "save", full)
    with pytest.raises(ClocheError):
        await host.sleep.hibernate("w", record.id)
    assert not host.world.alive[record.id].runs
    assert status(host, record.id) is Status.PAUSED
    host.world.fault.clear()
    await host.sleep.resume("w", record.id)
    assert await host.untrue() == []


async def test_a_process_that_resists_its_end_is_ended_before_the_wake(host: Host) -> None:
    """Two machines on one disk would be the end of the disk."""
    record = await host.create()
    first = host.world.alive[record.id]
    host.world.fault["Machine.kill"] = ClocheError("internal", "it did not end")
    await host.sleep.hibernate("w", record.id)
    assert status(host, record.id) is Status.HIBERNATED
    assert not first.runs
    assert host.capacity.usage().memory_mb, "its memory is not free yet"
    with pytest.raises(ClocheError, match="did not end"):
        await host.sleep.wake("w", record.id)
    assert status(host, record.id) is Status.HIBERNATED
    assert (host.root / record.id / STATE).is_dir()
    host.world.fault.clear()
    await host.sleep.wake("w", record.id)
    assert first.ended
    assert await host.untrue() == []


@pytest.mark.parametrize("call", ["Machine.restore", "Guest.renew"])
async def test_a_woken_process_that_resists_its_end_goes_with_the_sandbox(host: Host, crew: Crew, call: str) -> None:
    record = await sandbox_in(host, "hibernated")
    host.world.fault[call] = ClocheError("sandbox.boot_failed", "x")
    host.world.fault["Machine.kill"] = ClocheError("internal", "it did not end")
    with pytest.raises(ClocheError):
        await host.sleep.wake("w", record.id)
    assert status(host, record.id) is (Status.HIBERNATED if call == "Machine.restore" else Status.FAILED)
    deleting = asyncio.ensure_future(host.lifecycle.delete("w", record.id))
    await asyncio.wait({deleting})
    assert deleting.exception() is not None, "it is tried until it succeeds, and said so"
    host.world.fault.clear()
    await settle(lambda: host.supervisor.get(record.id) is None)
    assert await host.left() == []
    assert crew.failed == []


# ------------------------------------------------------------------ the disk


@pytest.mark.parametrize("state", ["running", "paused"])
@pytest.mark.parametrize("place", ["pages", "publish", "after publish"])
async def test_a_full_disk_while_the_memory_is_saved(
    host: Host, monkeypatch: pytest.MonkeyPatch, state: str, place: str
) -> None:
    record = await sandbox_in(host, state)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        if place == "pages":
            patched.setattr(pages.Pages, "save", full)
        elif place == "publish":
            patched.setattr(saved, "write", full)
        else:
            patched.setattr(sleep_module.files, "publish", _then(files.publish, full))
        with pytest.raises(ClocheError) as told:
            await host.sleep.hibernate("w", record.id)
    assert told.value.code == "host.disk_full"
    assert status(host, record.id) is Status.RUNNING
    assert await host.untrue() == []
    await _goes_on(host, record.id, Status.RUNNING)
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


def _then(first: Any, second: Any) -> Any:
    def both(*arguments: Any) -> Any:
        first(*arguments)
        return second(*arguments)

    return both


@pytest.mark.parametrize("name", ["pages", "dev", "meta.json"])
@pytest.mark.parametrize("damage", ["changed", "shorter", "gone"])
async def test_saved_memory_that_is_damaged(host: Host, name: str, damage: str) -> None:
    """It is told, nothing goes on from it, and when it is put right again the sandbox wakes."""
    record = await sandbox_in(host, "hibernated")
    path = host.root / record.id / STATE / name
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-5] if damage == "shorter" else whole[:-3] + b"xxx")
    with pytest.raises(ClocheError) as told:
        await host.sleep.wake("w", record.id)
    assert told.value.code == "snapshot.corrupt"
    assert await host.untrue() == []
    path.write_bytes(whole)
    await _goes_on(host, record.id, Status.HIBERNATED)


async def test_memory_of_another_engine_is_not_continued(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await sandbox_in(host, "hibernated")
    monkeypatch.setattr(type(host.machines.engine), "fingerprint", "another")
    with pytest.raises(ClocheError) as told:
        await host.sleep.wake("w", record.id)
    assert told.value.code == "snapshot.incompatible"
    assert status(host, record.id) is Status.HIBERNATED


async def test_a_template_that_is_gone(host: Host) -> None:
    asleep, awake = await sandbox_in(host, "hibernated"), await host.create()
    host.creator._catalog.get = lambda _: None  # type: ignore[method-assign]
    for verb, record in (("wake", asleep), ("hibernate", awake)):
        with pytest.raises(ClocheError) as told:
            await VERBS[verb](host, record.id)
        assert told.value.code == "template.corrupt"
    assert await host.untrue() == []


async def test_used_memory_that_cannot_be_removed_does_not_fail_the_wake(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await sandbox_in(host, "hibernated")
    remove = files.remove_tree

    def refusing(path: Any) -> None:
        if path.name == USED and path.exists():
            raise OSError(5, "input/output error")
        remove(path)

    with monkeypatch.context() as patched:
        patched.setattr(files, "remove_tree", refusing)
        assert (await host.sleep.wake("w", record.id)).status is Status.RUNNING
    assert (host.root / record.id / USED).is_dir()
    await host.sleep.hibernate("w", record.id)
    await host.sleep.wake("w", record.id)
    await _goes_on(host, record.id, Status.RUNNING)


async def test_a_sandbox_without_layers_is_not_saved(host: Host) -> None:
    record = await host.create()
    entry = host.supervisor.get(record.id)
    assert entry is not None
    from dataclasses import replace

    entry.record = replace(entry.record, layer_id="")
    with pytest.raises(ClocheError) as told:
        await host.sleep.hibernate("w", record.id)
    assert told.value.code == "sandbox.capture_failed"
    entry.record = record
    assert await host.untrue() == []


# ------------------------------------------------------------------ a database that refuses


@pytest.mark.parametrize(
    ("state", "verb", "after", "wanted"),
    [
        ("running", "pause", 0, Status.PAUSED),
        ("paused", "resume", 0, Status.RUNNING),
        ("running", "hibernate", 0, Status.RUNNING),
        ("running", "hibernate", 1, Status.HIBERNATED),
        ("paused", "hibernate", 0, Status.PAUSED),
        ("paused", "hibernate", 1, Status.HIBERNATED),
        ("hibernated", "wake", 0, Status.HIBERNATED),
        ("hibernated", "wake", 1, Status.RUNNING),
    ],
)
async def test_a_move_that_cannot_be_recorded(
    host: Host, crew: Crew, monkeypatch: pytest.MonkeyPatch, state: str, verb: str, after: int, wanted: Status
) -> None:
    """The first of two moves is refused, and nothing has happened; what has happened is told, and recorded later."""
    record = await sandbox_in(host, state)
    refusal = refuse_updates(host, monkeypatch, FULL, after)
    done = await asyncio.gather(VERBS[verb](host, record.id), return_exceptions=True)
    assert status(host, record.id) is wanted
    assert isinstance(done[0], ClocheError) == (wanted is Status(state))
    assert await host.untrue() == []
    refusal["on"] = False
    entry = host.supervisor.get(record.id)
    assert entry is not None
    await settle(lambda: not entry.unsaved)
    assert await host.untrue() == []
    await _goes_on(host, record.id, wanted)
    assert crew.failed == []


@pytest.mark.parametrize("call", ["Machine.capture", "Machine.restore", "Guest.renew"])
async def test_a_failure_that_cannot_be_recorded_either(host: Host, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    verb, state = ("hibernate", "running") if call == "Machine.capture" else ("wake", "hibernated")
    record = await sandbox_in(host, state)
    host.world.fault[call] = ClocheError("sandbox.capture_failed", "x")
    refusal = refuse_updates(host, monkeypatch, FULL, 1)
    with pytest.raises(ClocheError):
        await VERBS[verb](host, record.id)
    wanted = Status.FAILED if call == "Guest.renew" else Status(state)
    assert status(host, record.id) is wanted
    refusal["on"] = False
    host.world.fault.clear()
    entry = host.supervisor.get(record.id)
    assert entry is not None
    await settle(lambda: not entry.unsaved)
    assert await host.untrue() == []
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []
