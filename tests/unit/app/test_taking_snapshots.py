"""Snapshots taken, continued from and removed: faults at every call, and layers held for exactly as long as needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from app_host import FULL, Crew, Host, refuse_updates, settings
from app_states import sandbox_in, status

from cloche_server.app.create import CreateRequest
from cloche_server.app.fork import ForkRequest
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import BootMode, ExecDefaults, Sandbox
from cloche_server.host.pages import Pages
from cloche_server.storage import snapshots as snapshots_module
from cloche_server.storage.snapshots import Snapshot, SnapshotCatalog
from kit.fake_engine import Gate, settle

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


async def create_from(host: Host, snapshot_id: str, **options: Any) -> Sandbox:
    async with host.snapshots.source("w", snapshot_id) as (snapshot, source):
        return await host.creator.create(
            CreateRequest("w", template=snapshot.template, source=source, snapshot_id=snapshot.id, **options)
        )


async def end(host: Host) -> None:
    assert await host.untrue() == []
    for snapshot in host.snapshots.list("w"):
        await host.snapshots.remove("w", snapshot.id)
        assert await host.untrue() == []
    for record in host.access.list("w"):
        await host.lifecycle.delete("w", record.id)
        assert await host.untrue() == []
    assert await host.left() == []


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


# ------------------------------------------------------------------ lives of their own


@pytest.mark.parametrize("first", ["snapshot", "sandbox", "child"])
async def test_whichever_goes_first(host: Host, first: str) -> None:
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    child = await create_from(host, made.id)
    ends = {
        "snapshot": lambda: host.snapshots.remove("w", made.id),
        "sandbox": lambda: host.lifecycle.delete("w", record.id),
        "child": lambda: host.lifecycle.delete("w", child.id),
    }
    await ends.pop(first)()
    assert await host.untrue() == []
    if first != "snapshot":
        await host.lifecycle.delete("w", (await create_from(host, made.id)).id)
    for each in ends.values():
        await each()
        assert await host.untrue() == []
    assert await host.left() == []


@pytest.mark.parametrize("call", ["Engine.launch", "Machine.restore", "Guest.renew"])
async def test_removed_while_a_create_from_it_runs(host: Host, call: str) -> None:
    """The create succeeds, or says that it could not; the layer is there for as long as it is needed."""
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    await host.lifecycle.delete("w", record.id)
    gate = host.world.gate[call] = Gate()
    creating = asyncio.ensure_future(create_from(host, made.id))
    await gate.reached.wait()
    await host.snapshots.remove("w", made.id)
    gate.open.set()
    done = await asyncio.gather(creating, return_exceptions=True)
    if call == "Guest.renew":
        assert isinstance(done[0], Sandbox)
    else:
        assert isinstance(done[0], Sandbox) or done[0].code == "snapshot.not_found"  # type: ignore[union-attr]
    assert host.snapshots.list("w") == []
    await end(host)


async def test_many_removes_at_once_let_go_once(host: Host) -> None:
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    child = await create_from(host, made.id)
    await host.lifecycle.delete("w", record.id)
    done = await asyncio.gather(*(host.snapshots.remove("w", made.id) for _ in range(5)), return_exceptions=True)
    assert all(one is None or (isinstance(one, ClocheError) and one.code == "snapshot.not_found") for one in done)
    assert await host.untrue() == [], "the child still lies over its layer"
    await host.sleep.hibernate("w", child.id)
    await host.sleep.wake("w", child.id)
    await end(host)


async def test_a_remove_whose_caller_goes_away(host: Host) -> None:
    for turns in range(12):
        record = await host.create()
        made = await host.snapshots.take("w", record.id)
        removing = asyncio.ensure_future(host.snapshots.remove("w", made.id))
        for _ in range(turns):
            await asyncio.sleep(0)
        removing.cancel()
        await asyncio.wait({removing})
        assert await host.untrue() == []
        await end(host)


async def test_a_remove_that_fails_can_be_repeated(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await host.snapshots.take("w", (await host.create()).id)

    def refuse(*_: object) -> None:
        raise OSError(30, "read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        with pytest.raises(OSError):
            await host.snapshots.remove("w", made.id)
    assert host.snapshots.get("w", made.id) == made
    assert await host.untrue() == []
    await end(host)


async def test_of_another_workspace(host: Host) -> None:
    made = await host.snapshots.take("w", (await host.create()).id)
    with pytest.raises(ClocheError):
        await host.snapshots.remove("other", made.id)
    with pytest.raises(ClocheError):
        async with host.snapshots.source("other", made.id):
            pass
    with pytest.raises(ClocheError) as told:
        host.snapshots.get("other", made.id)
    assert told.value.code == "snapshot.not_found"
    await end(host)


async def test_all_at_once(host: Host, crew: Crew) -> None:
    """Snapshots, creates from them, forks and sleep of one sandbox and its descendants."""
    record = await host.create()
    first = await host.snapshots.take("w", record.id)
    work: list[Any] = [
        *(host.snapshots.take("w", record.id) for _ in range(3)),
        *(create_from(host, first.id) for _ in range(4)),
        *(host.forks.make("w", record.id, ForkRequest(2)) for _ in range(2)),
        host.sleep.hibernate("w", record.id),
        host.snapshots.take("w", record.id),
        host.sleep.pause("w", record.id),
    ]
    done = await asyncio.gather(*work, return_exceptions=True)
    for one in done:
        assert not isinstance(one, BaseException) or isinstance(one, ClocheError), repr(one)
    assert sum(isinstance(one, Snapshot) for one in done) >= 3
    await end(host)
    assert crew.failed == []


async def test_one_that_is_removed_as_soon_as_it_is_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layer is let go of once: the sandbox lies over it."""
    record = await host.create()
    publish, loop = host.catalog.publish, asyncio.get_running_loop()

    def published(*parts: Any) -> Snapshot:
        made = publish(*parts)
        asyncio.run_coroutine_threadsafe(host.snapshots.remove("w", made.id), loop).result()
        return made

    monkeypatch.setattr(host.catalog, "publish", published)
    with contextlib.suppress(ClocheError):
        await host.snapshots.take("w", record.id)
    await end(host)


async def test_one_whose_last_step_fails_is_not_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await host.create()
    staging = snapshots_module.files.staging

    @contextlib.contextmanager
    def failing(parent: Path) -> Iterator[Path]:
        with staging(parent) as staged:
            yield staged
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots_module.files, "staging", failing)
        with pytest.raises(ClocheError):
            await host.snapshots.take("w", record.id)
    assert host.snapshots.list("w") == []
    await end(host)


async def test_no_disk_is_larger_than_the_host_allows(host: Host) -> None:
    made = await host.snapshots.take("w", (await host.create()).id)
    with pytest.raises(ClocheError) as told:
        await create_from(host, made.id, disk_mb=settings(host.root).max_disk_mb + 1)
    assert (told.value.code, told.value.details) == ("request.invalid", {"field": "disk_mb"})
    await end(host)


async def test_a_list_while_one_is_published(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """That happens on a thread, at any moment."""
    record = await host.create()
    made = [await host.snapshots.take("w", record.id) for _ in range(2)]
    found = host.catalog._all

    class Slow(Snapshot):
        def __getattribute__(self, name: str) -> Any:
            if name in {"workspace", "template_id"}:
                found.setdefault("another", made[1])
            return super().__getattribute__(name)

    slow = Slow(**{name: getattr(made[0], name) for name in made[0].__dataclass_fields__})
    for look in (lambda: host.snapshots.list("w"), host.catalog.ids_of_templates):
        found[made[0].id] = slow
        found.pop("another", None)
        assert look()
    found.pop("another")
    found[made[0].id] = made[0]
    await end(host)
