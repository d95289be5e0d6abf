"""Meters over a host in memory: every state at its own rate, over processes, crashes and servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from app_host import Host
from app_states import sandbox_in, status

from cloche_server.app.exec import Execs
from cloche_server.app.files import Files, WriteOptions
from cloche_server.app.fork import ForkRequest
from cloche_server.app.meter import Sum
from cloche_server.core.budgets import Budget
from cloche_server.core.command import Command
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.meters import Usage
from cloche_server.core.ports import MachineExit
from cloche_server.guest.frames import STDERR, STDOUT, Exit, Output
from kit.fake_engine import FakeMachine, Gate, settle

MIB = 2**20


async def usage(host: Host, sandbox_id: str, workspace: str = "w") -> Usage:
    return (await host.meters.usage(workspace, sandbox_id))[1]


def machine(host: Host, sandbox_id: str) -> FakeMachine:
    return host.world.alive[sandbox_id]


async def test_each_state_counts_at_its_own_rate(host: Host) -> None:
    record = await host.create()
    born = host.clock.time
    machine(host, record.id).memory_bytes = 100 * MIB
    await host.meters.sample()
    host.clock.time += 10
    machine(host, record.id).cpu_seconds = 4
    await host.sleep.pause("w", record.id)
    host.clock.time += 20
    await host.sleep.resume("w", record.id)
    await host.sleep.hibernate("w", record.id)
    host.clock.time += 1000
    asleep = await usage(host, record.id)
    assert asleep.wall_seconds == {"creating": 0, "running": 10, "paused": 20, "hibernating": 0, "hibernated": 1000}
    assert asleep.cpu_seconds == 4
    assert asleep.memory_provisioned_mib_seconds == 256 * 30
    assert asleep.memory_used_mib_seconds == 100 * 30
    assert (asleep.starts, asleep.first_started_at) == (1, born)
    await host.sleep.wake("w", record.id)
    machine(host, record.id).cpu_seconds = 1.5
    host.clock.time += 5
    awake = await usage(host, record.id)
    assert awake.cpu_seconds == 5.5
    assert awake.memory_provisioned_mib_seconds == 256 * 35
    assert (awake.starts, awake.last_started_at) == (2, host.clock.time - 5)
    assert sum(awake.wall_seconds.values()) == host.clock.time - record.created_at


async def test_going_back_to_a_snapshot_takes_nothing_back(host: Host) -> None:
    """What was used before it was used, although nothing of it is left."""
    record = await host.create()
    await host.snapshots.take("w", record.id)
    machine(host, record.id).cpu_seconds = 4
    host.clock.time += 10
    await host.restores.restore("w", record.id, None)
    machine(host, record.id).cpu_seconds = 1
    host.clock.time += 5
    found = await usage(host, record.id)
    assert (found.cpu_seconds, found.starts) == (5, 2)
    assert found.wall_seconds["running"] == 15
    assert found.memory_provisioned_mib_seconds == 256 * 15


async def test_what_a_machine_did_in_the_pool_is_nobodys(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = FakeMachine.__init__

    def warmed(self: FakeMachine, *args: Any) -> None:
        begin(self, *args)
        self.cpu_seconds = 7.0

    monkeypatch.setattr(FakeMachine, "__init__", warmed)
    record = await host.create()
    assert (await usage(host, record.id)).cpu_seconds == 0
    machine(host, record.id).cpu_seconds = 8.0
    assert (await usage(host, record.id)).cpu_seconds == 1
    await host.sleep.hibernate("w", record.id)
    await host.sleep.wake("w", record.id)
    assert (await usage(host, record.id)).cpu_seconds == 1 + 7, "a wake is work for this sandbox alone"


async def test_a_crash_keeps_what_was_read_last(host: Host) -> None:
    record = await host.create()
    machine(host, record.id).cpu_seconds = 3
    machine(host, record.id).die(MachineExit(signal="SIGKILL"))
    await settle(lambda: status(host, record.id) is Status.FAILED)
    host.clock.time += 100
    found = await usage(host, record.id)
    assert (found.cpu_seconds, found.wall_seconds["failed"]) == (3, 100)
    assert found.memory_provisioned_mib_seconds == 0, "a failed sandbox holds no memory"


async def test_disk_and_snapshots(host: Host) -> None:
    record = await host.create()
    layer = host.machines.layers.path(record.layer_id)
    with layer.open("ab") as file:
        file.write(b"x" * 3 * MIB)
    await host.meters.sample()
    taken = (await usage(host, record.id)).disk_bytes
    assert 3 * MIB <= taken < 4 * MIB
    host.clock.time += 10
    assert (await usage(host, record.id)).disk_mib_seconds == pytest.approx(taken / MIB * 10)
    snapshot = await host.snapshots.take("w", record.id)
    await host.meters.sample()
    assert (await usage(host, record.id)).disk_bytes < MIB, "the layer is the snapshot's now"
    assert (await usage(host, record.id)).snapshot_bytes >= taken + snapshot.size_bytes
    await host.sleep.hibernate("w", record.id)
    empty = (await usage(host, record.id)).disk_bytes
    await host.meters.sample()
    assert (await usage(host, record.id)).disk_bytes > empty, "its memory lies on the disk now"
    await host.lifecycle.delete("w", record.id)
    ended = await usage(host, record.id)
    assert (ended.disk_bytes, ended.snapshot_bytes) == (0, taken + snapshot.size_bytes)
    await host.snapshots.remove("w", snapshot.id)
    assert (await usage(host, record.id)).snapshot_bytes == 0


async def test_after_its_end_it_is_told_until_it_is_forgotten(host: Host) -> None:
    record = await host.create(metadata={"team": "a", "secret.key": "hidden"})
    machine(host, record.id).cpu_seconds = 2
    host.clock.time += 30
    await host.lifecycle.delete("w", record.id)
    host.clock.time += 1000
    for _ in range(2):
        metered, found = await host.meters.usage("w", record.id)
        assert (found.cpu_seconds, found.wall_seconds["running"]) == (2, 30)
        assert sum(found.wall_seconds.values()) == 30
        assert metered.ended_at == record.created_at + 30
        assert metered.metadata == {"team": "a"}
        await host.meters.flush()
    with pytest.raises(ClocheError, match="not found"):
        await usage(host, record.id, "another")
    await host.meters.prune()
    assert (await usage(host, record.id)).cpu_seconds == 2
    host.clock.time += 91 * 86400
    await host.meters.prune()
    for unknown in (record.id, "z" * 20, "../etc"):
        with pytest.raises(ClocheError, match="not found"):
            await usage(host, unknown)


async def test_sums_by_label(host: Host) -> None:
    made = [await host.create(metadata=labels) for labels in ({"team": "a"}, {"team": "b"}, {"team": "a"}, {})]
    for number, record in enumerate(made):
        machine(host, record.id).cpu_seconds = 10.0**number
    await host.lifecycle.delete("w", made[0].id)
    await host.meters.flush()
    await host.lifecycle.delete("w", made[1].id)
    await host.lifecycle.set_metadata("w", made[3].id, {"other": "x", "secret.team": "hidden"})
    found = await host.meters.sum("w", group_by="team")
    assert (found.count, found.usage.cpu_seconds, found.usage.starts) == (4, 1111, 4)
    assert [(g.value, g.count, g.usage.cpu_seconds) for g in found.groups] == [
        ("a", 2, 101),
        ("b", 1, 10),
        (None, 1, 1000),
    ]
    assert (await host.meters.sum("w", sandbox_id=made[2].id)).usage.cpu_seconds == 100
    assert [g.value for g in (await host.meters.sum("w", group_by="secret.team")).groups] == [None]
    assert (await host.meters.sum("another")).count == 0


async def test_a_span_chooses_by_life(host: Host) -> None:
    first = await host.create()
    host.clock.time += 100
    await host.lifecycle.delete("w", first.id)
    await host.meters.flush()
    host.clock.time += 100
    second = await host.create()
    born = first.created_at
    for since, until, count in (
        (None, None, 2), (born + 50, None, 2), (born + 150, None, 1), (None, born + 150, 1), (None, born, 0),
        (born + 120, born + 180, 0), (born + 250, None, 1),
    ):  # fmt: skip
        assert (await host.meters.sum("w", since=since, until=until)).count == count, (since, until)
    assert second.created_at == born + 200


# ---------------------------------------------------------------- another server


async def test_the_next_server_goes_on_where_this_one_stood(host: Host, second: Host) -> None:
    """In order: nothing is missing."""
    record = await host.create()
    await sandbox_in(host, "hibernated")
    one = machine(host, record.id)
    one.cpu_seconds, one.memory_bytes = 5, 64 * MIB
    entry = host.supervisor.get(record.id)
    assert entry is not None
    entry.traffic.execs, entry.traffic.bytes_in, entry.traffic.bytes_out = 3, 10, 20
    host.clock.time += 10
    await host.meters.close()
    before = await usage(host, record.id)
    await host.supervisor.close()
    second.clock.time = host.clock.time + 50
    one.cpu_seconds = 6
    await second.take_over()
    after = await usage(second, record.id)
    assert (after.cpu_seconds, after.exec_count, after.bytes_in, after.bytes_out) == (6, 3, 10, 20)
    assert after.wall_seconds["running"] == before.wall_seconds["running"] + 50 == 60
    assert after.memory_used_mib_seconds == before.memory_used_mib_seconds + 64 * 50
    entry = second.supervisor.get(record.id)
    assert entry is not None
    entry.traffic.execs += 1
    assert (await usage(second, record.id)).exec_count == 4
    assert (await second.meters.sum("w")).count == 2


async def test_a_server_that_is_killed_loses_no_time_and_no_cpu_of_what_goes_on(host: Host, second: Host) -> None:
    """Nothing was written but the records."""
    record = await host.create()
    other = await host.create()
    machine(host, record.id).cpu_seconds = 5
    host.clock.time += 10
    await host.sleep.pause("w", record.id)
    host.clock.time += 10
    await host.sleep.pause("w", other.id)
    await host.sleep.resume("w", other.id)
    await host.supervisor.close()
    second.clock.time = host.clock.time + 100
    machine(host, other.id).die()
    await second.take_over()
    found = await usage(second, record.id)
    assert (found.cpu_seconds, found.starts) == (5, 1)
    assert found.wall_seconds == {"creating": 0, "running": 10, "paused": 110}
    crashed = await usage(second, other.id)
    assert sum(crashed.wall_seconds.values()) == 120
    assert crashed.wall_seconds["running"] == 120, "as its record says until somebody has looked"


async def test_what_ended_while_no_meter_was_written(host: Host, second: Host) -> None:
    record = await host.create()
    machine(host, record.id).cpu_seconds = 5
    await host.meters.sample()
    await host.meters.flush()
    kept = await host.create()
    host.clock.time += 7
    await host.lifecycle.delete("w", record.id)
    await host.supervisor.close()  # before the end was written
    second.clock.time = host.clock.time + 1000
    await second.take_over()
    metered, found = await second.meters.usage("w", record.id)
    assert (found.cpu_seconds, found.wall_seconds["running"], metered.status) == (5, 7, Status.DELETED)
    assert metered.ended_at == host.clock.time
    assert await second.meters.settle() == [], "once"
    assert (await second.meters.sum("w")).count == 2
    assert (await usage(second, kept.id)).wall_seconds["running"] == 1007


async def test_a_full_disk_loses_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await host.create()
    machine(host, record.id).cpu_seconds = 5
    write = host.meters._store.write

    async def full(*_: object) -> None:
        raise ClocheError("host.disk_full", "full")

    monkeypatch.setattr(host.meters._store, "write", full)
    await host.lifecycle.delete("w", record.id)
    with pytest.raises(ClocheError):
        await host.meters.flush()
    assert (await usage(host, record.id)).cpu_seconds == 5
    monkeypatch.setattr(host.meters._store, "write", write)
    await host.meters.flush()
    assert host.meters._ended == {}
    assert (await usage(host, record.id)).cpu_seconds == 5


async def test_what_sleeps_is_not_written_again_and_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    await sandbox_in(host, "hibernated")
    written: list[int] = []
    write = host.meters._store.write

    async def counted(meters: Any, *rest: Any) -> None:
        written.append(len(meters))
        await write(meters, *rest)

    monkeypatch.setattr(host.meters._store, "write", counted)
    for _ in range(3):
        await host.meters.sample()
        await host.meters.flush()
        host.clock.time += 10
    assert written == [1, 0, 0]


async def test_the_background_task_writes_after_an_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche_server.app.meter.GATHER", 0.0)
    running = asyncio.ensure_future(host.meters.run())
    record = await host.create()
    await host.lifecycle.delete("w", record.id)
    await settle(lambda: host.meters._ended == {})
    assert not running.done()
    running.cancel()
    assert (await usage(host, record.id)).starts == 1


async def test_neither_a_create_nor_a_command_writes_more_than_before(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create writes its record twice, with a budget as well; a command nothing."""
    turns: list[int] = []
    run = host.database.run

    async def counted(*args: Any, **options: Any) -> Any:
        turns.append(1)
        return await run(*args, **options)

    monkeypatch.setattr(host.database, "run", counted)
    for budget in (None, Budget(exec_count=10)):
        record = await host.create(budget=budget)
        assert len(turns) == 2
        turns.clear()
        entry, _ = await host.access.serving("w", record.id)
        host.access.count_exec(entry)
        entry.traffic.out(100)
        assert turns == []


# ---------------------------------------------------------------- what goes in and out


class Call:
    """A command that says something and ends."""

    async def __aenter__(self) -> AsyncIterator[object]:
        async def frames() -> AsyncIterator[object]:
            yield Output(STDOUT, 0, b"12345")
            yield Output(STDERR, 5, b"67")
            yield Exit(0, "exited", None, None, 1.0, 0.0, 0.0, 0, None, 5, 2, 0, 0)

        return frames()

    async def __aexit__(self, *_: object) -> None:
        return None


async def test_commands_and_bytes_are_counted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await host.create()
    entry = host.supervisor.get(record.id)
    assert entry is not None
    guest: Any = entry.guest
    monkeypatch.setattr(type(guest), "exec", lambda *_: Call())

    async def write_file(path: str, body: AsyncIterator[bytes], **_: object) -> Any:
        async for _ in body:
            pass
        raise ClocheError("file.no_space", "the disk of the sandbox is full")

    guest.write_file = write_file
    await Execs(host.access).run("w", record.id, Command("a", shell="x", stdin=b"1234"))

    async def body() -> AsyncIterator[bytes]:
        for part in (b"abc", b"defg"):
            yield part

    with pytest.raises(ClocheError):
        await Files(host.access).write("w", record.id, "/f", body(), WriteOptions(), None)
    found = await usage(host, record.id)
    assert (found.exec_count, found.bytes_in, found.bytes_out) == (1, 4 + 7, 7)


async def test_a_create_that_came_to_nothing_is_in_no_sum(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller goes away at the moment at which it is recorded as running, and meters are written while it is
    undone."""
    update = host.store.update

    async def cancelling(record: Any, happenings: Any = ()) -> None:
        await update(record, happenings)
        if record.status is Status.RUNNING:
            creating.cancel()

    monkeypatch.setattr(host.store, "update", cancelling)
    gate = host.world.gate["Machine.kill"] = Gate()
    creating = asyncio.ensure_future(host.create())
    await gate.reached.wait()
    await host.meters.sample()
    await host.meters.flush()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await host.meters.sample()
    await host.meters.flush()
    assert host.supervisor.entries() == []
    host.clock.time += 1000
    assert await host.meters.sum("w") == Sum(0, Usage())
    assert host.meters._running == {}


async def test_what_is_forgotten_is_not_met_again(host: Host, second: Host) -> None:
    """Usage that is kept for a shorter time than the records of what has ended."""
    parent = await host.create(budget=Budget(wall_seconds=1000), persistent=True)
    (child,) = (await host.forks.make("w", parent.id, ForkRequest())).children
    host.clock.time += 100
    await host.lifecycle.delete("w", child.id)
    await host.sleep.pause("w", parent.id)
    host.clock.time += 91 * 86400
    await host.meters.close()
    await host.meters.prune()
    await host.supervisor.close()
    second.clock.time = host.clock.time
    await second.take_over()
    assert (await second.spending.get("w", parent.id)).used.wall_seconds == 200
    with pytest.raises(ClocheError, match="not found"):
        await usage(second, child.id)
