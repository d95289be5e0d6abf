"""Forks: children of one moment, partial success, faults at every call, families in any order of death, promotion."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from app_host import FULL, Crew, Host, refuse_updates
from app_states import sandbox_in, status

from cloche_server.app.fork import Forked, ForkRequest
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import BootMode, ExecDefaults, Sandbox
from cloche_server.guest.types import RenewResult
from cloche_server.storage.layers import Layers
from kit.fake_engine import FakeGuest, FakeMachine, Gate, settle

pytestmark = pytest.mark.usefixtures("quick")

ERRORS = [ClocheError("sandbox.unreachable", "x"), OSError(5, "input/output error"), RuntimeError("unforeseen")]
#: What a fork calls on the parent, and then on each child.
OF_PARENT = [
    "Guest.freeze",
    "Machine.capture",
    "Machine.capture.stopped",
    "Machine.capture.sealed",
    "Machine.capture.cont",
]
OF_CHILD = [
    "Engine.launch",
    "Engine.launch.connect",
    "Machine.restore",
    "Machine.restore.cont",
    "Guest.connect",
    "Guest.renew",
]


async def fork(host: Host, parent: Sandbox | str, count: int = 1, **options: Any) -> Forked:
    name = parent if isinstance(parent, str) else parent.id
    return await host.forks.make("w", name, ForkRequest(count, **options))


async def end(host: Host) -> None:
    """Deletes all, and nothing is left."""
    assert await host.untrue() == []
    for record in host.access.list("w"):
        await host.lifecycle.delete("w", record.id)
        assert await host.untrue() == []
    assert await host.left() == []


async def test_what_children_get(host: Host) -> None:
    defaults = ExecDefaults({"A": "1", "B": "2"}, "/srv", "user")
    parent = await host.create(ttl_seconds=100, metadata={"k": "v", "l": "w"}, disk_mb=2048, defaults=defaults)
    host.clock.time += 50
    made = await fork(host, parent, 3, metadata={"k": "mine"}, env={"B": "3"})
    assert len({parent.id, *(child.id for child in made.children)}) == 4
    assert made.errors == {}
    assert made.pause_ms > 0
    for child in made.children:
        assert child.status is Status.RUNNING
        assert (child.parent_id, child.fork_tree_id) == (parent.id, made.tree_id)
        assert child.boot_mode is BootMode.FORK
        assert child.metadata == {"k": "mine", "l": "w", "fork_parent_id": parent.id, "fork_tree_id": made.tree_id}
        assert child.defaults == ExecDefaults({"A": "1", "B": "3"}, "/srv", "user")
        assert child.resources == parent.resources
        assert (child.ttl_seconds, child.expires_at) == (100, host.clock.time + 100)
    renewed = [name for name, request in host.world.renewals if request.thaw]
    assert sorted(renewed) == sorted(child.id for child in made.children)
    assert len({request.entropy for _, request in host.world.renewals if request.thaw}) == 3
    now = host.access.list("w")[0]
    assert (now.id, now.expires_at) == (parent.id, parent.expires_at), "a fork does not touch the TTL of the parent"
    assert now.layer_id != parent.layer_id
    await end(host)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        ({}, (100, False)),
        ({"ttl_seconds": 7}, (7, False)),
        ({"ttl_seconds": 0}, (0, False)),
        ({"persistent": True}, (100, True)),
    ],
)
async def test_the_ttl_of_a_child(host: Host, request_: dict[str, Any], wanted: tuple[int, bool]) -> None:
    parent = await host.create(ttl_seconds=100)
    child = (await fork(host, parent, **request_)).children[0]
    assert (child.ttl_seconds, child.persistent) == wanted
    assert (child.expires_at is None) == (wanted[0] == 0 or wanted[1])


@pytest.mark.parametrize("state", ["running", "paused", "hibernated"])
async def test_the_parent_is_afterwards_as_it_was(host: Host, state: str) -> None:
    """Only a hibernated one is woken for it."""
    parent = await sandbox_in(host, state)
    await fork(host, parent, 2)
    assert status(host, parent.id) is (Status.RUNNING if state == "hibernated" else Status(state))
    await end(host)


async def test_a_failed_one_has_no_children(host: Host) -> None:
    parent = await sandbox_in(host, "failed")
    with pytest.raises(ClocheError) as told:
        await fork(host, parent)
    assert told.value.code == "sandbox.invalid_state"
    assert "fork" in told.value.message
    await end(host)


async def test_nothing_runs_in_a_copy_before_it_is_renewed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands are frozen when it is captured, and when it starts."""
    frozen_at_capture, frozen_at_renewal = [], []
    capture, renew = FakeMachine.capture, FakeGuest.renew

    async def captured(machine: FakeMachine, **options: Any) -> Any:
        frozen_at_capture.append(machine.id in host.world.frozen)
        return await capture(machine, **options)

    async def renewed(guest: FakeGuest, request: Any, *, timeout: float = 30.0) -> RenewResult:
        if request.thaw:
            frozen_at_renewal.append(guest._name in host.world.frozen)
        return await renew(guest, request, timeout=timeout)

    monkeypatch.setattr(FakeMachine, "capture", captured)
    monkeypatch.setattr(FakeGuest, "renew", renewed)
    for state in ("running", "paused"):
        await fork(host, await sandbox_in(host, state), 2)
    assert frozen_at_capture == [True, True]
    assert frozen_at_renewal == [True] * 4


async def test_a_copy_that_went_on_before_it_was_renewed_is_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs have drawn the random numbers that all copies have."""
    parent = await sandbox_in(host, "running")
    alive = set(host.world.alive)
    renew = FakeGuest.renew

    async def renewed(guest: FakeGuest, request: Any, *, timeout: float = 30.0) -> RenewResult:
        if guest._name not in alive:
            host.world.thawed_early.add(guest._name)
        return await renew(guest, request, timeout=timeout)

    monkeypatch.setattr(FakeGuest, "renew", renewed)
    with pytest.raises(ClocheError, match="random numbers") as told:
        await fork(host, parent)
    assert (told.value.code, told.value.retry_after) == ("sandbox.boot_failed", 5.0)
    assert set(host.world.alive) == alive
    await end(host)


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("state", "call"),
    [*(("running", call) for call in OF_PARENT), *(("paused", call) for call in OF_PARENT if call != "Guest.freeze")],
)
@pytest.mark.parametrize("error", ERRORS)
async def test_a_capture_that_fails(host: Host, crew: Crew, state: str, call: str, error: Exception) -> None:
    parent = await sandbox_in(host, state)
    host.world.fault[call] = error
    with pytest.raises(ClocheError):
        await fork(host, parent, 2)
    host.world.fault.clear()
    assert status(host, parent.id) is Status(state)
    assert await host.untrue() == []
    assert len((await fork(host, parent, 2)).children) == 2
    await end(host)
    assert crew.failed == []


@pytest.mark.parametrize("error", ERRORS)
async def test_a_parent_that_does_not_thaw_at_once(host: Host, error: Exception) -> None:
    """It thaws by itself after a while, so that is no reason to have no children."""
    parent = await host.create()
    host.world.fault["Guest.thaw"] = error
    assert len((await fork(host, parent, 2)).children) == 2
    host.world.fault.clear()
    host.world.frozen.clear()
    await end(host)


@pytest.mark.parametrize("call", OF_CHILD)
@pytest.mark.parametrize("error", ERRORS)
async def test_children_that_fail(host: Host, crew: Crew, call: str, error: Exception) -> None:
    parent = await host.create()
    host.world.fault[call] = error
    with pytest.raises((ClocheError, RuntimeError)):
        await fork(host, parent, 3)
    host.world.fault.clear()
    assert [record.id for record in host.access.list("w")] == [parent.id]
    assert await host.untrue() == []
    assert len((await fork(host, parent, 3)).children) == 3
    await end(host)
    assert crew.failed == []


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("bad", [{0}, {1, 3}, {0, 1, 2}])
async def test_some_children_fail(host: Host, monkeypatch: pytest.MonkeyPatch, error: Exception, bad: set[int]) -> None:
    parent = await host.create()
    renew, times = host.machines.renew, iter(range(100))

    async def failing(*arguments: Any, **options: Any) -> None:
        if next(times) in bad:
            raise error
        await renew(*arguments, **options)

    monkeypatch.setattr(host.machines, "renew", failing)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError):
            await fork(host, parent, 4)
        assert [record.id for record in host.access.list("w")] == [parent.id], "what nobody learns of does not stay"
    else:
        made = await fork(host, parent, 4)
        assert len(made.children) == 4 - len(bad)
        assert len(made.errors) == len(bad)
        assert len(host.access.list("w")) == 5 - len(bad)
    await end(host)


async def test_no_room_for_one_is_told_before_the_parent_stands_still(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    parent = await host.create()
    monkeypatch.setattr(host.capacity, "limits", replace(host.capacity.limits, max_sandboxes=1))
    with pytest.raises(ClocheError) as told:
        await fork(host, parent, 2)
    assert told.value.code == "capacity.unavailable"
    assert "Machine.capture" not in host.world.calls
    monkeypatch.setattr(host.capacity, "limits", replace(host.capacity.limits, max_sandboxes=3))
    made = await fork(host, parent, 4)
    assert len(made.children) == 2
    assert {error.code for error in made.errors.values()} == {"capacity.unavailable"}
    await end(host)


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_database_that_refuses(host: Host, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The fresh layer of the parent is true whether or not it can be recorded; children that cannot be recorded go."""
    parent = await host.create()
    refusal = refuse_updates(host, monkeypatch, FULL, after)
    done = await asyncio.gather(fork(host, parent, 2), return_exceptions=True)
    assert isinstance(done[0], Forked) == (after == 2)
    assert await host.untrue() == []
    refusal["on"] = False
    entry = host.supervisor.get(parent.id)
    assert entry is not None
    await settle(lambda: not entry.unsaved)
    await end(host)


async def test_no_room_for_the_device_state(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    parent = await host.create()

    def full(path: Path, _: bytes) -> None:
        path.touch()
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(ClocheError):
            await fork(host, parent)
    await end(host)


async def test_no_room_for_a_layer(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = await host.create()

    def full(*_: object) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Layers, "create", full)
        with pytest.raises(ClocheError):
            await fork(host, parent)
    assert "Machine.capture" not in host.world.calls
    await end(host)


async def test_a_template_that_is_gone(host: Host) -> None:
    parent = await host.create()
    host.creator._catalog.get = lambda _: None  # type: ignore[method-assign]
    with pytest.raises(ClocheError) as told:
        await fork(host, parent)
    assert told.value.code == "template.corrupt"
    await end(host)


async def test_a_parent_that_dies_while_it_is_captured(host: Host) -> None:
    parent = await host.create()
    gate = host.world.gate["Machine.capture"] = Gate()
    forking = asyncio.ensure_future(fork(host, parent, 2))
    await gate.reached.wait()
    host.world.alive[parent.id].die()
    gate.open.set()
    with pytest.raises(ClocheError):
        await forking
    await settle(lambda: status(host, parent.id) is Status.FAILED)
    await settle(lambda: not host.world.held)
    await end(host)


# ------------------------------------------------------------------ callers that go away


@pytest.mark.parametrize("call", [*OF_PARENT, "Guest.thaw", *OF_CHILD])
@pytest.mark.parametrize("again", [0, 3])
async def test_a_caller_that_goes_away(host: Host, crew: Crew, call: str, again: int) -> None:
    parent = await host.create()
    gate = host.world.gate[call] = Gate()
    forking = asyncio.ensure_future(fork(host, parent, 3))
    await gate.reached.wait()
    forking.cancel()
    for _ in range(again):
        await asyncio.sleep(0)
        forking.cancel()
    gate.open.set()
    await asyncio.wait({forking})
    assert forking.cancelled()
    del host.world.gate[call]
    await host.lifecycle.set_metadata("w", parent.id, {"after": "it"})  # in its turn
    await _quiet(host)
    assert [record.id for record in host.access.list("w")] == [parent.id]
    await end(host)
    assert crew.failed == []


async def _quiet(host: Host) -> None:
    """What a caller has left behind is undone by tasks of the server."""
    for _ in range(500):
        if not await host.untrue():
            return
        await asyncio.sleep(0.002)


async def test_a_caller_that_goes_away_at_each_turn_of_the_loop(host: Host) -> None:
    parent = await host.create()
    for turns in range(400):
        forking = asyncio.ensure_future(fork(host, parent, 2))
        for _ in range(turns if turns < 100 else (turns - 95) * 4):
            await asyncio.sleep(0 if turns < 100 else 0.001)
        forking.cancel()
        await asyncio.wait({forking})
        await host.lifecycle.set_metadata("w", parent.id, {"after": str(turns)})
        await _quiet(host)
        if not forking.cancelled():
            for child in forking.result().children:
                await host.lifecycle.delete("w", child.id)
        assert [record.id for record in host.access.list("w")] == [parent.id], f"cancelled after {turns} turns"
        assert await host.untrue() == [], f"cancelled after {turns} turns"
        if not forking.cancelled():
            break
    else:
        raise AssertionError("a fork never came to its end")
    await end(host)


async def test_a_server_that_ends_undoes_the_children_under_way(host: Host) -> None:
    parent = await host.create()
    blocked = host.world.block["Guest.renew"] = asyncio.Event()
    forking = asyncio.ensure_future(fork(host, parent, 3))
    await blocked.wait()
    await settle(lambda: host.world.calls.count("Machine.restore") == 4)
    await host.creator.close()
    await asyncio.wait({forking})
    assert [record.id for record in host.access.list("w")] == [parent.id]
    host.world.block.clear()
    await end(host)
