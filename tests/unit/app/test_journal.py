"""The journal over a host in memory: it tells what is so, with each move, and once."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from app_host import FULL, Crew, Host, assemble, refuse_updates
from app_states import VERBS, sandbox_in, status
from journal_kit import happened, journal, replayed, types

from cloche_server.app.fork import ForkRequest
from cloche_server.app.stop import StopVerbs
from cloche_server.core.errors import ClocheError
from cloche_server.core.happenings import LASTING, Happening, matches, patterns
from cloche_server.core.lifecycle import Status
from cloche_server.core.ports import MachineExit
from cloche_server.core.records import ExecDefaults, IdleAction
from cloche_server.store.db import Conflict
from kit.fake_engine import settle


@pytest.fixture
def power(host: Host) -> StopVerbs:
    return host.power


# ------------------------------------------------------------------ what is told


async def test_back_to_a_snapshot(host: Host) -> None:
    record = await host.create()
    snapshot = await host.snapshots.take("w", record.id)
    await host.sleep.hibernate("w", record.id)
    await host.restores.restore("w", record.id, snapshot.id)
    told = await happened(host, record.id)
    assert [one.type for one in told][-2:] == ["sandbox.hibernated", "sandbox.restored"]
    assert told[-1].payload["snapshot_id"] == snapshot.id
    await host.sleep.pause("w", record.id)
    assert (await happened(host, record.id))[-1].type == "sandbox.paused"


async def test_a_life(host: Host, power: StopVerbs) -> None:
    record = await host.create(name="n", metadata={"team": "a"})
    for verb in ("pause", "resume", "hibernate", "wake"):
        await VERBS[verb](host, record.id)
        await VERBS[verb](host, record.id)  # what is so already is not told again
    await power.stop("w", record.id, 5)
    await power.start("w", record.id)
    host.world.alive[record.id].die(MachineExit(signal="SIGKILL"))
    await settle(lambda: status(host, record.id) is Status.FAILED)
    await host.lifecycle.delete("w", record.id)
    told = await happened(host, record.id)
    assert [one.type.removeprefix("sandbox.") for one in told] == [
        "created", "running", "paused", "resumed", "hibernated", "woken", "stopped", "started", "failed", "deleted",
    ]  # fmt: skip
    payloads = {one.type.removeprefix("sandbox."): one.payload for one in told}
    assert payloads["created"]["name"] == "n"
    assert payloads["created"]["metadata"] == {"team": "a"}
    assert payloads["paused"] == payloads["hibernated"] == {"reason": "asked"}
    assert payloads["woken"]["boot_mode"] == "wake"
    assert payloads["failed"]["signal"] == "SIGKILL"
    assert payloads["deleted"] == {"reason": "deleted"}, "not why it had failed before"
    for one in told:
        one.check()
        assert (one.workspace, one.at) == ("w", host.clock.time)


async def test_numbers_have_no_holes(host: Host) -> None:
    for _ in range(3):
        await sandbox_in(host, "paused")
    assert [told.seq for told in await journal(host)] == list(range(1, 10))


async def test_changes(host: Host) -> None:
    record = await host.create(ttl_seconds=100, metadata={"a": "1", "secret.s": "x", "gone": "1"})
    await host.lifecycle.set_ttl("w", record.id, 100, None)  # only counted anew
    await host.lifecycle.set_ttl("w", record.id, 200, None)
    await host.lifecycle.set_idle("w", record.id, 30, IdleAction.PAUSE)
    await host.lifecycle.set_metadata("w", record.id, {"a": "2", "b": "3", "gone": None})
    await host.lifecycle.set_metadata("w", record.id, {"secret.s": "y"})
    told = {one.type: one.payload for one in (await happened(host, record.id))[2:]}
    assert told == {
        "sandbox.ttl_changed": {"ttl_seconds": 200, "persistent": False, "expires_at": "1970-01-12T13:50:00.000Z"},
        "sandbox.idle_changed": {"idle_seconds": 30, "idle_action": "pause"},
        "sandbox.metadata_changed": {"changed": ["a", "b"], "removed": ["gone"]},
    }


async def test_no_secret_is_ever_told(host: Host) -> None:
    secret = "hunter2-hunter2"
    record = await host.create(
        metadata={"secret.key": secret, "k": "v"}, defaults=ExecDefaults({"PASSWORD": secret}, "/", "root")
    )
    await host.lifecycle.set_metadata("w", record.id, {"secret.key": secret * 2, "secret.other": secret, "k": "w"})
    await host.forks.make("w", record.id, ForkRequest(env={"OTHER": secret}, metadata={"secret.third": secret}))
    snapshot = await host.snapshots.take("w", record.id)
    await host.snapshots.remove("w", snapshot.id)
    await host.lifecycle.delete("w", record.id)
    stored = json.dumps([dict(row) for row in await host.database.run(_rows)])
    assert "sandbox.deleted" in stored
    assert secret not in stored
    assert "secret." not in stored


def _rows(connection: Any) -> list[Any]:
    return list(connection.execute("SELECT * FROM events").fetchall())


async def test_large_labels_are_left_out(host: Host) -> None:
    record = await host.create(metadata={"k": "x" * 4096})
    assert "metadata" not in (await happened(host, record.id))[0].payload


async def test_forks_and_snapshots(host: Host) -> None:
    parent = await host.create()
    made = await host.forks.make("w", parent.id, ForkRequest(count=2))
    first, second = (child.id for child in made.children)
    await host.forks.promote("w", first, None, True)
    snapshot = await host.snapshots.take("w", first, "s")
    await host.snapshots.remove("w", snapshot.id)
    assert (await happened(host, parent.id))[-1].payload == {
        "children": [first, second], "tree_id": made.tree_id, "pause_ms": 1.0,
    }  # fmt: skip
    told = await happened(host, first)
    assert [one.type for one in told] == [
        "sandbox.created", "sandbox.running", "sandbox.promoted", "snapshot.created", "snapshot.deleted",
    ]  # fmt: skip
    assert (told[0].payload["parent_id"], told[0].payload["fork_tree_id"]) == (parent.id, made.tree_id)
    assert told[2].payload == {"tree_id": made.tree_id, "deleted": [second]}
    assert told[3].payload["name"] == told[4].payload["name"] == "s"
    assert (await types(host, second))[-1] == "sandbox.deleted"


async def test_what_the_catalogue_does_not_know_is_not_told(host: Host) -> None:
    with pytest.raises(ValueError, match="catalogue"):
        await host.supervisor.journal.tell("sandbox.dreamt", "w", "s")
    with pytest.raises(ValueError, match="colour"):
        await host.supervisor.journal.tell("sandbox.forked", "w", "s", {"colour": "red"})
    assert await journal(host) == []


def test_patterns() -> None:
    assert matches((), "sandbox.paused")
    assert matches(("sandbox.*",), "sandbox.paused")
    assert matches(("snapshot.created", "sandbox.paused"), "sandbox.paused")
    assert not matches(("snapshot.*", "sandbox.resumed"), "sandbox.paused")
    assert {"sandbox.*", "snapshot.*", "sandbox.failed"} <= set(patterns())


async def test_telling_costs_a_create_no_transaction(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for its record and one for its start, as without a journal."""
    visits: list[Any] = []
    run = host.database.run

    async def counted(work: Any, **options: Any) -> Any:
        visits.append(work)
        return await run(work, **options)

    monkeypatch.setattr(host.database, "run", counted)
    record = await host.create()
    assert len(visits) == 2
    monkeypatch.undo()
    assert await types(host, record.id) == ["sandbox.created", "sandbox.running"]


# ------------------------------------------------------------------ creates that come to nothing


@pytest.mark.parametrize("call", ["Engine.launch", "Machine.restore", "Guest.renew"])
async def test_a_create_that_fails_is_not_told(host: Host, call: str) -> None:
    host.world.fault[call] = ClocheError("sandbox.boot_failed", "no")
    with pytest.raises(ClocheError):
        await host.create()
    assert await journal(host) == []


@pytest.mark.parametrize("turns", range(0, 40, 2))
async def test_a_caller_that_goes_away_at_the_end(host: Host, turns: int) -> None:
    """Whatever was told of the sandbox, the journal ends as it has ended."""
    task = asyncio.ensure_future(host.create())
    await settle(lambda: "Guest.renew" in host.world.calls)
    for _ in range(turns):
        await asyncio.sleep(0 if turns < 30 else 0.001)
    task.cancel()
    done = (await asyncio.gather(task, return_exceptions=True))[0]
    told = await types(host)
    living = [entry.record.id for entry in host.supervisor.entries()]
    if isinstance(done, BaseException):
        assert living == []
        assert told in ([], ["sandbox.created", "sandbox.running", "sandbox.deleted"])
    else:
        assert told == ["sandbox.created", "sandbox.running"]


# ------------------------------------------------------------------ with the move, or not at all


async def test_a_move_that_is_not_recorded_is_not_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await sandbox_in(host, "hibernated")
    before = await types(host, record.id)
    refuse_updates(host, monkeypatch, FULL)
    with pytest.raises(ClocheError):
        await host.sleep.wake("w", record.id)
    assert await types(host, record.id) == before


async def test_an_update_over_another_version_tells_nothing(host: Host) -> None:
    record = await host.create()
    stale = replace(record, version=record.version + 5)
    with pytest.raises(Conflict):
        await host.store.update(stale, [Happening("sandbox.paused", "w", record.id, 1.0)])
    assert await types(host, record.id) == ["sandbox.created", "sandbox.running"]


@pytest.mark.usefixtures("quick")
async def test_what_happened_on_a_full_disk_is_told_later(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await host.create()
    full = refuse_updates(host, monkeypatch, FULL)
    host.clock.time += 10
    died = host.clock.time
    host.world.alive[record.id].die(MachineExit(signal="SIGKILL"))
    await settle(lambda: status(host, record.id) is Status.FAILED)
    assert (await types(host, record.id))[-1] == "sandbox.running"
    host.clock.time += 10
    full["on"] = False
    entry = host.supervisor.get(record.id)
    assert entry is not None
    await settle(lambda: not entry.unsaved)
    last = (await happened(host, record.id))[-1]
    assert (last.type, last.at) == ("sandbox.failed", died), "as it was, not as it was recorded"
    await host.lifecycle.delete("w", record.id)
    assert [kind for kind in await types(host, record.id) if kind == "sandbox.failed"] == ["sandbox.failed"]


async def test_other_events_wait_for_room_in_their_order(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    tell, append = host.supervisor.journal.tell, host.store.events.append
    full = {"on": True}

    async def failing(happenings: Any) -> None:
        if full["on"]:
            raise FULL
        await append(happenings)

    monkeypatch.setattr(host.store.events, "append", failing)
    await tell("snapshot.created", "w", "s", {"snapshot_id": "1"})
    await tell("snapshot.deleted", "w", "s", {"snapshot_id": "1"})
    assert await journal(host) == []
    full["on"] = False
    await host.supervisor.journal.catch_up()
    await host.supervisor.journal.catch_up()
    assert await types(host) == ["snapshot.created", "snapshot.deleted"]


# ------------------------------------------------------------------ a server that starts


@pytest.mark.parametrize(
    ("half_way", "first", "last"),
    [
        (Status.HIBERNATING, "paused", "sandbox.hibernated"),
        (Status.HIBERNATING, "running", "sandbox.hibernated"),
        (Status.WAKING, "hibernated", "sandbox.hibernated"),
        (Status.STOPPING, "running", "sandbox.stopped"),
        (Status.STARTING, "failed", "sandbox.stopped"),
        (Status.DELETING, "paused", "sandbox.deleted"),
        (Status.RUNNING, "running", "sandbox.failed"),
    ],
)
async def test_moves_at_a_start_are_told(host: Host, second: Host, half_way: Status, first: str, last: str) -> None:
    """The machine is gone; where memory was saved, it is there."""
    record = await sandbox_in(host, first)
    if half_way is Status.HIBERNATING:
        (host.root / record.id / "state").mkdir()
    await host.supervisor.close()
    for machine in list(host.world.alive.values()):
        machine.die()
    entry = host.supervisor.get(record.id)
    assert entry is not None
    before = entry.record
    await host.store.update(replace(before, status=half_way, version=before.version + 1))
    await second.reconciler.run(same_boot=True)
    told = await types(second, record.id)
    assert told[-1] == last
    assert replayed(told) in {status_of(second, record.id), Status.DELETED}
    await second.supervisor.close()


def status_of(host: Host, sandbox_id: str) -> Status:
    entry = host.supervisor.get(sandbox_id)
    return Status.DELETED if entry is None else entry.record.status


# ------------------------------------------------------------------ any order of anything


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", range(12))
async def test_the_journal_replayed_gives_the_state(
    host: Host, second: Host, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Random moves, deaths, faults and full disks, and then another server: what was told leads to what is so."""
    dice = random.Random(number)
    made = [(await host.create(ttl_seconds=100_000)).id for _ in range(2)]
    power = host.power
    full = refuse_updates(host, monkeypatch, FULL)
    full["on"] = False

    async def move(verb: str, name: str) -> None:
        if verb == "die" and name in host.world.alive:
            host.world.alive[name].die(MachineExit(signal="SIGKILL"))
        elif verb in VERBS:
            await VERBS[verb](host, name)
        elif verb == "stop":
            await power.stop("w", name, 5)
        elif verb == "start":
            await power.start("w", name)
        elif verb == "fork":
            made.extend(child.id for child in (await host.forks.make("w", name, ForkRequest(count=2))).children)
        elif verb == "delete":
            await host.lifecycle.delete("w", name)

    faults = ["Machine.capture", "Machine.resume", "Engine.launch", "Machine.restore", "Guest.renew", "Engine.boot"]
    verbs = ["die", *VERBS, *VERBS, "stop", "start", "fork"]
    for _ in range(25):
        host.world.fault.clear()
        full["on"] = dice.random() < 0.15
        if dice.random() < 0.3:
            host.world.fault[dice.choice(faults)] = ClocheError("sandbox.boot_failed", "as the test wants")
        names = [dice.choice(made) for _ in range(3)]
        chosen = [dice.choice([*verbs, *(["delete"] if dice.random() < 0.1 else [])]) for _ in names]
        done = await asyncio.gather(*map(move, chosen, names), return_exceptions=True)
        assert all(one is None or isinstance(one, ClocheError) for one in done), done
    full["on"] = False
    host.world.fault.clear()
    await settle(lambda: all(_rests(host, name) for name in made))
    for name in made:
        assert replayed(await types(host, name)) is status_of(host, name)
    await host.supervisor.close()
    await second.reconciler.run(same_boot=True)
    for name in made:
        assert replayed(await types(second, name)) is status_of(second, name)
    seqs = [told.seq for told in await journal(second)]
    assert seqs == list(range(1, len(seqs) + 1))
    await second.supervisor.close()


def _rests(host: Host, sandbox_id: str) -> bool:
    entry = host.supervisor.get(sandbox_id)
    if entry is None:
        return True
    dead = entry.machine is not None and entry.machine.ended
    return entry.record.status in LASTING and not entry.unsaved and entry.mailbox.empty() and not dead


async def test_two_servers_go_on_counting(host: Host, tmp_path: Any, crew: Crew) -> None:
    """Also when retention has left nothing but the newest event."""
    await host.create()
    _, newest = await host.store.events.bounds()
    await host.store.events.prune(host.clock.time + 1e9, 1000)
    assert await host.store.events.bounds() == (newest, newest)
    other = assemble(tmp_path, host.database, host.world, crew)
    await other.create()
    assert (await other.store.events.bounds())[1] == newest + 2
