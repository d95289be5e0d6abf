"""Pause and resume, hibernate and wake: what each does, alone and many at once, and its TTL and its room."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from app_host import Crew, Host
from app_states import VERBS, sandbox_in, status

from cloche_server.app.capacity import OVERHEAD_MB
from cloche_server.app.sleep import STATE
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import BootMode, Sandbox, TerminationReason
from cloche_server.host import machine as host_machine
from kit.fake_engine import Gate, settle

#: What is allowed in which state, and what comes of it.
ALLOWED = {
    ("running", "pause"): Status.PAUSED,
    ("running", "resume"): Status.RUNNING,
    ("running", "hibernate"): Status.HIBERNATED,
    ("running", "wake"): Status.RUNNING,
    ("paused", "pause"): Status.PAUSED,
    ("paused", "resume"): Status.RUNNING,
    ("paused", "hibernate"): Status.HIBERNATED,
    ("hibernated", "hibernate"): Status.HIBERNATED,
    ("hibernated", "wake"): Status.RUNNING,
}

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("state", ["running", "paused", "hibernated", "failed"])
@pytest.mark.parametrize("verb", list(VERBS))
async def test_each_verb_in_each_state(host: Host, state: str, verb: str) -> None:
    record = await sandbox_in(host, state)
    wanted = ALLOWED.get((state, verb))
    for _ in range(2):
        if wanted is None:
            with pytest.raises(ClocheError) as told:
                await VERBS[verb](host, record.id)
            assert told.value.code == "sandbox.invalid_state"
            assert told.value.details["status"] == state
        else:
            assert (await VERBS[verb](host, record.id)).status is wanted
        assert status(host, record.id) is (wanted or Status(state))
        assert await host.untrue() == []
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


@pytest.mark.parametrize("verb", list(VERBS))
async def test_what_is_not_there(host: Host, verb: str) -> None:
    record = await host.create()
    with pytest.raises(ClocheError) as told:
        await VERBS[verb](host, "0" * 20)
    assert told.value.code == "sandbox.not_found"
    await host.lifecycle.delete("w", record.id)
    with pytest.raises(ClocheError) as told:
        await VERBS[verb](host, record.id)
    assert told.value.code == "sandbox.not_found"


async def test_what_a_sleep_keeps_and_what_it_changes(host: Host) -> None:
    before = await host.create(ttl_seconds=100, metadata={"a": "b"}, disk_mb=2048)
    old = host.world.alive[before.id]
    asleep = await host.sleep.hibernate("w", before.id)
    assert asleep.status_reason == "asked"
    assert (host.root / before.id / STATE / "meta.json").is_file()
    assert host.world.alive == {}
    assert host.world.held == set()
    assert host.world.open_guests == set()
    awake = await host.sleep.wake("w", before.id)
    new = host.world.alive[before.id]
    assert new is not old
    assert new.ref == awake.process != before.process
    assert new.disk == old.disk
    assert (awake.boot_mode, awake.status_reason) == (BootMode.WAKE, None)
    assert (awake.metadata, awake.resources, awake.layer_id) == (before.metadata, before.resources, before.layer_id)
    assert not (host.root / before.id / STATE).exists()
    name, renewal = host.world.renewals[-1]
    assert name == before.id
    assert renewal.thaw
    assert renewal.entropy, "it has random numbers of its own"


async def test_many_rounds(host: Host) -> None:
    record = await host.create()
    for _ in range(5):
        await host.sleep.hibernate("w", record.id)
        await host.sleep.wake("w", record.id)
        await host.sleep.pause("w", record.id)
        await host.sleep.hibernate("w", record.id)
        await host.sleep.wake("w", record.id)
        assert await host.untrue() == []
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


# ------------------------------------------------------------------ many at once


async def test_pauses_and_resumes_at_once(host: Host) -> None:
    record = await host.create()
    verbs = [VERBS["pause" if n % 2 else "resume"](host, record.id) for n in range(40)]
    done = await asyncio.gather(*verbs)
    assert [one.status for one in done] == [Status.PAUSED if n % 2 else Status.RUNNING for n in range(40)]
    assert await host.untrue() == []
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


async def test_ten_wakes_at_once_wake_it_once(host: Host) -> None:
    record = await sandbox_in(host, "hibernated")
    before = host.world.calls.count("Engine.launch")
    calls = [host.access.serving("w", record.id) for _ in range(5)]
    await asyncio.gather(*(host.sleep.wake("w", record.id) for _ in range(5)), *calls)
    assert host.world.calls.count("Engine.launch") == before + 1
    assert await host.untrue() == []


async def test_all_verbs_at_once_end_in_some_true_state(host: Host, crew: Crew) -> None:
    for turn in range(6):
        record = await host.create()
        names = [list(VERBS)[(turn + n * (1 + turn % 3)) % 4] for n in range(24)]
        done = await asyncio.gather(*(VERBS[name](host, record.id) for name in names), return_exceptions=True)
        for one in done:
            if isinstance(one, BaseException):
                assert isinstance(one, ClocheError)
                assert one.code == "sandbox.invalid_state"
        assert await host.untrue() == []
        await host.lifecycle.delete("w", record.id)
        assert await host.left() == []
    assert crew.failed == []


async def test_a_call_wakes_and_a_look_does_not(host: Host) -> None:
    record = await sandbox_in(host, "hibernated")
    assert (await host.access.find("w", record.id)).record.status is Status.HIBERNATED
    assert [r.status for r in host.access.list("w")] == [Status.HIBERNATED]
    await host.lifecycle.set_metadata("w", record.id, {"a": "b"})
    await host.lifecycle.set_ttl("w", record.id, 500, None)
    assert status(host, record.id) is Status.HIBERNATED
    entry, _ = await host.access.serving("w", record.id)
    assert entry.record.status is Status.RUNNING


async def test_a_paused_one_takes_no_calls_and_is_not_woken(host: Host) -> None:
    record = await sandbox_in(host, "paused")
    with pytest.raises(ClocheError) as told:
        await host.access.serving("w", record.id)
    assert told.value.code == "sandbox.invalid_state"
    assert status(host, record.id) is Status.PAUSED


# ------------------------------------------------------------------ deleted meanwhile


@pytest.mark.parametrize("state", ["running", "paused", "hibernated", "failed"])
async def test_deleted_in_each_state(host: Host, state: str) -> None:
    record = await sandbox_in(host, state)
    await asyncio.gather(*(host.lifecycle.delete("w", record.id) for _ in range(3)))
    assert await host.left() == []


@pytest.mark.parametrize(
    ("state", "verb", "call"),
    [
        ("running", "pause", "Guest.freeze"),
        ("running", "pause", "Machine.pause"),
        ("paused", "resume", "Machine.resume"),
        ("paused", "resume", "Guest.renew"),
        ("running", "hibernate", "Machine.capture"),
        ("running", "hibernate", "Machine.kill"),
        ("paused", "hibernate", "Machine.capture"),
        ("hibernated", "wake", "Engine.launch"),
        ("hibernated", "wake", "Machine.restore"),
        ("hibernated", "wake", "Guest.renew"),
    ],
)
async def test_deleted_while_a_verb_is_under_way(host: Host, state: str, verb: str, call: str) -> None:
    """The verb comes to its end first; others that wait learn that there is nothing any more."""
    record = await sandbox_in(host, state)
    gate = host.world.gate[call] = Gate()
    first = asyncio.ensure_future(VERBS[verb](host, record.id))
    await gate.reached.wait()
    deleting = [asyncio.ensure_future(host.lifecycle.delete("w", record.id)) for _ in range(2)]
    await asyncio.sleep(0)
    behind = [asyncio.ensure_future(each(host, record.id)) for each in VERBS.values()]
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*deleting)
    assert (await first).id == record.id
    for one in await asyncio.gather(*behind, return_exceptions=True):
        assert isinstance(one, ClocheError)
        assert one.code in {"sandbox.not_found", "sandbox.invalid_state"}
    assert await host.left() == []


@pytest.mark.parametrize("verb", list(VERBS))
async def test_a_caller_that_goes_away_stops_nothing(host: Host, verb: str) -> None:
    state = {"pause": "running", "resume": "paused", "hibernate": "running", "wake": "hibernated"}[verb]
    for turns in range(0, 40, 3):
        record = await sandbox_in(host, state)
        task = asyncio.ensure_future(VERBS[verb](host, record.id))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await host.lifecycle.set_metadata("w", record.id, {"after": "it"})  # in its turn
        assert status(host, record.id) in {ALLOWED[state, verb], Status(state)}
        assert await host.untrue() == []
        await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


# ------------------------------------------------------------------ crashes


@pytest.mark.parametrize("state", ["running", "paused"])
async def test_a_machine_that_dies(host: Host, state: str) -> None:
    record = await sandbox_in(host, state)
    host.world.alive[record.id].die()
    await settle(lambda: status(host, record.id) is Status.FAILED)
    await settle(lambda: not host.world.held)
    assert await host.untrue() == []
    await host.lifecycle.delete("w", record.id)
    assert await host.left() == []


async def test_the_end_of_the_machine_before_is_not_taken_for_that_of_the_next(host: Host, crew: Crew) -> None:
    """It dies by itself while its memory is saved, and somebody waits already to wake it."""
    record = await host.create()
    gate = host.world.gate["Machine.capture.cont"] = Gate()
    hibernating = asyncio.ensure_future(host.sleep.hibernate("w", record.id))
    waking = asyncio.ensure_future(host.sleep.wake("w", record.id))
    await gate.reached.wait()
    host.world.alive[record.id].die()
    await asyncio.sleep(0.01)
    gate.open.set()
    await asyncio.gather(hibernating, waking)
    await asyncio.sleep(0.05)
    assert status(host, record.id) is Status.RUNNING
    assert await host.untrue() == []
    assert crew.failed == []


# ------------------------------------------------------------------ TTL


@pytest.mark.parametrize(("state", "verb"), [("paused", "resume"), ("hibernated", "wake")])
async def test_the_ttl_is_counted_anew(host: Host, state: str, verb: str) -> None:
    record = await sandbox_in(host, state, ttl_seconds=100)
    host.clock.time += 60
    assert (await host.access.find("w", record.id)).record.expires_at == record.expires_at
    awake = await VERBS[verb](host, record.id)
    assert awake.expires_at == host.clock.time + 100
    assert awake.ttl_seconds == 100


@pytest.mark.parametrize("verb", ["resume", "wake"])
async def test_a_repeated_verb_does_not_touch_the_ttl(host: Host, verb: str) -> None:
    record = await host.create(ttl_seconds=100)
    host.clock.time += 60
    assert (await VERBS[verb](host, record.id)).expires_at == record.expires_at


@pytest.mark.parametrize("state", ["paused", "hibernated"])
@pytest.mark.parametrize("options", [{"ttl_seconds": 0}, {"ttl_seconds": 50, "persistent": True}])
async def test_without_a_ttl_there_is_none_afterwards(host: Host, state: str, options: dict[str, Any]) -> None:
    record = await sandbox_in(host, state, **options)
    host.clock.time += 1e6
    await asyncio.sleep(0.05)
    awake = await VERBS["resume" if state == "paused" else "wake"](host, record.id)
    assert awake.expires_at is None


@pytest.mark.parametrize("state", ["paused", "hibernated"])
async def test_the_ttl_ends_what_sleeps(host: Host, state: str) -> None:
    record = await sandbox_in(host, state, ttl_seconds=10)
    host.clock.time += 9.9
    await asyncio.sleep(0.05)
    assert status(host, record.id) is Status(state)
    host.clock.time += 0.1
    await settle(lambda: host.supervisor.get(record.id) is None)
    past = await host.store.get(record.id)
    assert past is not None
    assert past.termination is not None
    assert past.termination.reason is TerminationReason.TTL
    assert await host.left() == []


async def test_a_wake_in_time_counts(host: Host) -> None:
    record = await sandbox_in(host, "hibernated", ttl_seconds=10)
    gate = host.world.gate["Machine.restore"] = Gate()
    waking = asyncio.ensure_future(host.sleep.wake("w", record.id))
    await gate.reached.wait()
    host.clock.time += 11
    gate.open.set()
    assert (await waking).status is Status.RUNNING
    await asyncio.sleep(0.05)
    assert status(host, record.id) is Status.RUNNING


# ------------------------------------------------------------------ room


async def test_what_hibernates_gives_its_memory_back_and_keeps_its_disk(host: Host) -> None:
    record = await host.create(disk_mb=2048)
    before = host.capacity.usage()
    assert (before.sandboxes, before.memory_mb, before.disk_mb) == (1, 256 + OVERHEAD_MB, 2048)
    await host.sleep.pause("w", record.id)
    assert host.capacity.usage().memory_mb == before.memory_mb, "a paused one keeps its memory"
    assert host.world.still == {record.id}, "and nobody takes its silence for an end"
    await host.sleep.resume("w", record.id)
    assert host.world.still == set()
    await host.sleep.pause("w", record.id)
    await host.sleep.hibernate("w", record.id)
    asleep = host.capacity.usage()
    assert (asleep.sandboxes, asleep.memory_mb, asleep.disk_mb) == (1, 0, 2048)
    await host.sleep.wake("w", record.id)
    assert host.capacity.usage().memory_mb == before.memory_mb


async def test_a_wake_without_room_is_refused_and_changes_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await sandbox_in(host, "hibernated")
    with monkeypatch.context() as full:
        full.setattr(host_machine, "memory", lambda: host_machine.Memory(1000, 0))
        for verb in (VERBS["wake"], lambda host, name: host.access.serving("w", name)):
            with pytest.raises(ClocheError) as told:
                await verb(host, record.id)
            assert told.value.code == "capacity.unavailable"
            assert told.value.retry_after
        assert status(host, record.id) is Status.HIBERNATED
        usage = host.capacity.usage()
        assert (usage.sandboxes, usage.memory_mb, usage.disk_mb) == (1, 0, 1024)
    assert await host.untrue() == []
    assert (await host.sleep.wake("w", record.id)).status is Status.RUNNING


async def test_a_ledger_that_cannot_look_loses_no_promise(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await sandbox_in(host, "hibernated")

    def no_descriptor() -> host_machine.Memory:
        raise OSError(24, "too many open files")

    with monkeypatch.context() as blind:
        blind.setattr(host_machine, "memory", no_descriptor)
        with pytest.raises(ClocheError):
            await host.sleep.wake("w", record.id)
    assert host.capacity.usage().sandboxes == 1
    assert await host.untrue() == []
    assert (await host.sleep.wake("w", record.id)).status is Status.RUNNING


async def test_there_is_room_for_as_many_as_are_awake(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.capacity, "limits", _with_memory(host, 2 * (256 + OVERHEAD_MB)))
    asleep = [await sandbox_in(host, "hibernated") for _ in range(5)]
    done = await asyncio.gather(*(host.sleep.wake("w", one.id) for one in asleep), return_exceptions=True)
    assert sum(isinstance(one, Sandbox) for one in done) == 2
    assert {one.code for one in done if isinstance(one, ClocheError)} == {"capacity.unavailable"}
    assert await host.untrue() == []


def _with_memory(host: Host, memory_mb: int) -> Any:
    from dataclasses import replace

    return replace(host.capacity.limits, memory_mb=memory_mb)
