"""Snapshots taken, continued from and removed: faults at every call, and layers held for exactly as long as needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from app_host import FULL, Crew, Host, refuse_updates
from app_states import sandbox_in, status
from snapshot_kit import create_from, end

from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import BootMode, ExecDefaults
from cloche_server.host.pages import Pages
from cloche_server.storage.snapshots import SnapshotCatalog
from kit.fake_engine import settle

pytestmark = pytest.mark.usefixtures("quick")

ERRORS = [ClocheError("sandbox.unreachable", "x"), OSError(5, "input/output error"), RuntimeError("unforeseen")]
OF_SANDBOX = [
    "Guest.freeze",
    "Machine.capture",
    "Machine.capture.stopped",
    "Machine.capture.sealed",
    "Machine.capture.cont",
]
OF_CREATE = [
    "Engine.launch",
    "Engine.launch.connect",
    "Machine.restore",
    "Machine.restore.cont",
    "Guest.connect",
    "Machine.grow_disk",
    "Guest.renew",
]


async def test_what_a_snapshot_keeps(host: Host) -> None:
    defaults = ExecDefaults({"A": "1"}, "/srv", "user")
    record = await host.create(metadata={"k": "v"}, disk_mb=2048, defaults=defaults)
    made = await host.snapshots.take("w", record.id, "first")
    assert (made.sandbox_id, made.name, made.created_at) == (record.id, "first", host.clock.time)
    assert (made.layer_id, made.disk_mb, made.shape) == (record.layer_id, 2048, record.resources.shape)
    assert (made.metadata, made.defaults) == ({"k": "v"}, defaults)
    assert host.snapshots.get("w", made.id) == made
    assert host.snapshots.list("w") == host.snapshots.list("w", record.id) == [made]
    assert host.snapshots.list("w", "other") == host.snapshots.list("other") == []
    child = await create_from(host, made.id)
    assert (child.snapshot_id, child.boot_mode) == (made.id, BootMode.SNAPSHOT)
    assert child.resources == record.resources
    assert (await host.snapshots.take("w", child.id)).parent_snapshot_id == made.id
    await end(host)


@pytest.mark.parametrize("state", ["running", "paused", "hibernated"])
async def test_the_sandbox_is_afterwards_as_it_was(host: Host, state: str) -> None:
    record = await sandbox_in(host, state)
    for _ in range(3):
        await host.snapshots.take("w", record.id)
    assert status(host, record.id) is (Status.RUNNING if state == "hibernated" else Status(state))
    await end(host)


@pytest.mark.parametrize("state", ["running", "paused", "hibernated", "stopped", "failed"])
async def test_without_memory(host: Host, state: str) -> None:
    """Of a sandbox at rest that is all there is; of the others it is what was asked for."""
    record = await sandbox_in(host, state)
    at_rest = state in {"stopped", "failed"}
    made = await host.snapshots.take("w", record.id, memory=None if at_rest else False)
    assert (made.memory, made.cold) == (False, True)
    assert {path.name for path in (host.catalog.root / made.id).iterdir()} == {"meta.json"}
    assert status(host, record.id) is (Status.RUNNING if state == "hibernated" else Status(state))
    assert await host.untrue() == []
    child = await create_from(host, made.id, cold=made.cold)
    assert (child.boot_mode, child.cold) == (BootMode.COLD, True)
    again = await host.snapshots.take("w", child.id)
    assert again.memory
    assert (await create_from(host, again.id, cold=again.cold)).boot_mode is BootMode.SNAPSHOT
    await end(host)


@pytest.mark.parametrize("state", ["stopped", "failed"])
async def test_memory_of_one_that_has_none(host: Host, state: str) -> None:
    record = await sandbox_in(host, state)
    with pytest.raises(ClocheError) as told:
        await host.snapshots.take("w", record.id, memory=True)
    assert told.value.code == "sandbox.invalid_state"
    await end(host)


@pytest.mark.parametrize("state", ["running", "paused"])
@pytest.mark.parametrize("call", ["Guest.quiesce", *OF_SANDBOX, "Machine.resume", "Machine.pause"])
async def test_a_disk_that_cannot_be_taken(host: Host, state: str, call: str) -> None:
    record = await sandbox_in(host, state)
    host.world.fault[call] = ClocheError("sandbox.unreachable", "x")
    host.world.calls.clear()
    done = await asyncio.gather(host.snapshots.take("w", record.id, memory=False), return_exceptions=True)
    if isinstance(done[0], BaseException):
        assert isinstance(done[0], ClocheError)
        assert done[0].code in {"sandbox.capture_failed", "sandbox.unreachable"}
        assert host.snapshots.list("w") == []
    else:
        assert call not in host.world.calls
    host.world.fault.clear()
    if call == "Machine.pause" and state == "paused":
        await host.sleep.pause("w", record.id)
        host.world.alive[record.id].runs = False  # it could not be told to stand still
    assert await host.untrue() == []
    await end(host)


async def test_a_larger_disk(host: Host) -> None:
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    child = await create_from(host, made.id, disk_mb=4096)
    assert child.resources.disk_mb == 4096
    with pytest.raises(ClocheError) as told:
        await create_from(host, made.id, disk_mb=512)
    assert told.value.code == "request.invalid"
    await end(host)


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize("call", OF_SANDBOX)
@pytest.mark.parametrize("error", ERRORS)
async def test_a_capture_that_fails(host: Host, crew: Crew, call: str, error: Exception) -> None:
    record = await host.create()
    host.world.fault[call] = error
    with pytest.raises(ClocheError):
        await host.snapshots.take("w", record.id)
    host.world.fault.clear()
    assert host.snapshots.list("w") == []
    assert status(host, record.id) is Status.RUNNING
    assert await host.untrue() == []
    await host.snapshots.take("w", record.id)
    await end(host)
    assert crew.failed == []


@pytest.mark.parametrize("error", [*ERRORS, OSError(28, "no space left on device")])
@pytest.mark.parametrize("place", [(Pages, "save"), (SnapshotCatalog, "publish")])
async def test_a_snapshot_that_cannot_be_written(
    host: Host, monkeypatch: pytest.MonkeyPatch, error: Exception, place: tuple[Any, str]
) -> None:
    record = await host.create()

    def failing(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(*place, failing)
        with pytest.raises(ClocheError) as told:
            await host.snapshots.take("w", record.id)
    full = isinstance(error, OSError) and error.errno == 28
    assert (told.value.code == "host.disk_full") == full
    assert not isinstance(error, OSError) or full or told.value.code == "sandbox.capture_failed"
    assert host.snapshots.list("w") == []
    assert await host.untrue() == []
    await host.snapshots.take("w", record.id)
    await end(host)


async def test_a_database_that_refuses(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fresh layer is true whether or not it can be recorded."""
    record = await host.create()
    refusal = refuse_updates(host, monkeypatch, FULL)
    await host.snapshots.take("w", record.id)
    assert await host.untrue() == []
    refusal["on"] = False
    entry = host.supervisor.get(record.id)
    assert entry is not None
    await settle(lambda: not entry.unsaved)
    await end(host)


@pytest.mark.parametrize("call", OF_CREATE)
@pytest.mark.parametrize("error", ERRORS)
async def test_a_create_from_a_snapshot_that_fails(host: Host, call: str, error: Exception) -> None:
    made = await host.snapshots.take("w", (await host.create()).id)
    host.world.fault[call] = error
    with pytest.raises((ClocheError, RuntimeError)):
        await create_from(host, made.id, disk_mb=2048)
    host.world.fault.clear()
    assert len(host.access.list("w")) == 1
    assert await host.untrue() == []
    await create_from(host, made.id, disk_mb=2048)
    await end(host)


@pytest.mark.parametrize("call", OF_CREATE)
async def test_a_caller_of_a_create_that_goes_away(host: Host, call: str) -> None:
    made = await host.snapshots.take("w", (await host.create()).id)
    reached = host.world.block[call] = asyncio.Event()
    creating = asyncio.ensure_future(create_from(host, made.id, disk_mb=2048))
    await reached.wait()
    creating.cancel()
    await asyncio.wait({creating})
    host.world.block.clear()
    assert creating.cancelled()
    await end(host)


async def test_a_caller_that_goes_away_while_it_is_taken(host: Host) -> None:
    """It is taken all the same, once, or not at all."""
    record = await host.create()
    for turns in range(0, 60, 2):
        taking = asyncio.ensure_future(host.snapshots.take("w", record.id))
        for _ in range(turns):
            await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait({taking})
        await host.lifecycle.set_metadata("w", record.id, {"after": "it"})  # in its turn
        assert await host.untrue() == []
    await end(host)


@pytest.mark.parametrize("name", ["pages", "dev", "meta.json"])
async def test_a_damaged_snapshot_makes_nothing(host: Host, name: str) -> None:
    made = await host.snapshots.take("w", (await host.create()).id)
    path = host.catalog.root / made.id / name
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ClocheError) as told:
        await create_from(host, made.id)
    assert told.value.code == "snapshot.corrupt"
    await end(host)


async def test_another_engine_and_another_template(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await host.snapshots.take("w", (await host.create()).id)
    with monkeypatch.context() as patched:
        patched.setattr(type(host.machines.engine), "fingerprint", "another")
        with pytest.raises(ClocheError) as told:
            await create_from(host, made.id)
        assert told.value.code == "snapshot.incompatible"
    with monkeypatch.context() as patched:
        patched.setattr(type(host.creator._catalog), "get", lambda *_: None)
        with pytest.raises(ClocheError) as told:
            await create_from(host, made.id)
        assert told.value.code == "template.corrupt"
    await end(host)


async def test_a_layer_that_is_gone(host: Host) -> None:
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    path = host.machines.layers.path(made.layer_id)
    raw = path.read_bytes()
    path.unlink()
    with pytest.raises(ClocheError) as told:
        await create_from(host, made.id)
    assert told.value.code == "snapshot.corrupt"
    assert await host.snapshots.verify("w", made.id) == (f"its disk layer {made.layer_id} has changed or is missing",)
    path.write_bytes(raw)
    await create_from(host, made.id)
    await end(host)
