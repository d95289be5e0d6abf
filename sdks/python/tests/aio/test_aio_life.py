"""Names, states, forks and snapshots."""

from __future__ import annotations

import time

import pytest
from cloche_fake import FakeCloche, faults

from cloche import (
    AsyncClient,
    AsyncSandbox,
    AsyncSnapshot,
    CapacityError,
    CaptureFailed,
    ClocheError,
    ConnectionLost,
    InvalidRequestError,
    InvalidStateError,
    NameTaken,
    ProtocolError,
    SandboxGone,
    SnapshotCorrupt,
    SnapshotIncompatible,
    SnapshotNotFound,
    WaitTimeout,
)

FULL = faults.error(503, "capacity.unavailable", "the host has no room", retryable=True, retry_after=0.1)
DISK_FULL = faults.error(507, "host.disk_full", "the disk of the host is full", retryable=True)


# --- names and idle actions


async def test_create_with_a_name(fake: FakeCloche) -> None:
    first = await AsyncSandbox.create(name="worker", if_exists="error", idle_seconds=60, idle_action="pause")
    assert fake.bodies[0] == {
        "template": "base", "name": "worker", "if_exists": "error", "idle_seconds": 60, "idle_action": "pause",
    }  # fmt: skip
    assert (first.name, first.info.idle_seconds, first.info.idle_action) == ("worker", 60, "pause")
    with pytest.raises(NameTaken) as caught:
        await AsyncSandbox.create(name="worker")
    assert caught.value.sandbox_id == first.id
    assert (await AsyncSandbox.create(name="worker", if_exists="connect")).id == first.id
    second = await AsyncSandbox.create(name="worker", if_exists="replace")
    await AsyncSandbox.create()
    assert [found.id for found in await AsyncSandbox.list(name="worker")] == [second.id]
    assert second.id != first.id


async def test_idle_later(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    assert (sandbox.name, sandbox.info.idle_seconds, sandbox.info.status_reason) == (None, 0, None)
    await sandbox.set_idle(90, "delete")
    assert (sandbox.info.idle_seconds, sandbox.info.idle_action) == (90, "delete")
    await sandbox.set_idle(0)
    assert (sandbox.info.idle_seconds, sandbox.info.idle_action) == (0, "delete")


# --- states


async def test_pause_resume_hibernate_wake(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    assert (await sandbox.pause()).status == "paused"
    assert sandbox.info.status_reason == "asked"
    assert (await sandbox.resume()).status == "running"
    assert (await sandbox.hibernate()).status == "hibernated"
    assert (await sandbox.wake()).status == "running"


@pytest.mark.parametrize("verb", ["pause", "resume", "hibernate", "wake", "promote"])
async def test_what_may_be_said_twice_is_repeated_once(fake: FakeCloche, verb: str) -> None:
    parent = await AsyncSandbox.create()
    (sandbox,) = await parent.fork()
    fake.on("POST", f"/{verb}", faults.abort)
    await getattr(sandbox, verb)()
    assert fake.count("POST", f"/{verb}") == 2
    fake.on("POST", f"/{verb}", faults.abort, times=2)
    with pytest.raises(ConnectionLost):
        await getattr(sandbox, verb)()
    assert fake.count("POST", f"/{verb}") == 4


async def test_wait(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    assert await sandbox.wait() is sandbox
    fake.sandboxes[sandbox.id]["status"] = "paused"
    assert (await sandbox.wait(["hibernated", "paused"], timeout=5)).status == "paused"
    assert fake.requests[-1].query["status"] == "hibernated,paused"
    before = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"is paused after 0\.2 s, not running"):
        await sandbox.wait("running", timeout=0.2)
    assert 0.2 <= time.monotonic() - before < 2
    assert sandbox.status == "paused"


async def test_a_long_wait_asks_again(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    paused = faults.answer(200, b'{"id": "%s", "status": "paused"}' % sandbox.id.encode())
    fake.on("GET", "/wait", paused, times=3)
    await sandbox.wait(timeout=1000)
    assert [request.query["timeout"] for request in fake.requests[-4:]] == ["20.0"] * 4
    fake.on("GET", "/wait", paused)
    await sandbox.wait()
    assert fake.count("GET", "/wait") == 6


async def test_a_wait_ends_when_the_sandbox_fails(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.sandboxes[sandbox.id] |= {"status": "failed", "termination": {"reason": "vmm_died"}}
    with pytest.raises(SandboxGone, match="vmm_died"):
        await sandbox.wait("running", timeout=5)
    assert (await sandbox.wait("failed")).status == "failed"


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [("sandbox.invalid_state", 409, InvalidStateError), ("sandbox.capture_failed", 500, CaptureFailed)],
)
async def test_refusals_by_state(fake: FakeCloche, code: str, status: int, kind: type[ClocheError]) -> None:
    sandbox = await AsyncSandbox.create()
    for verb in ("hibernate", "fork-tree", "snapshots"):
        fake.on("POST", f"/{verb}", faults.error(status, code))
    for call in (sandbox.hibernate, sandbox.fork, sandbox.snapshot):
        with pytest.raises(kind) as caught:
            await call()
        assert caught.value.code == code


# --- forks


async def test_fork(fake: FakeCloche) -> None:
    parent = await AsyncSandbox.create(metadata={"a": "1"})
    (only,) = await parent.fork()
    assert fake.bodies[-1] == {"count": 1}
    assert (only.info.parent_id, only.info.boot_mode) == (parent.id, "fork")
    children = await parent.fork(3, ttl_seconds=60, persistent=False, metadata={"b": "2"}, env={"X": "y"})
    assert fake.bodies[-1] == {
        "count": 3, "ttl_seconds": 60, "persistent": False, "metadata": {"b": "2"}, "env": {"X": "y"},
    }  # fmt: skip
    assert len(children) == 3
    assert {child.info.fork_tree_id for child in children} == {children.tree_id}
    assert (children.parent_id, children.pause_ms, children.errors) == (parent.id, 7.5, {})
    assert [child.id for child in children[1:]] == [children[1].id, children[-1].id]
    assert type(children[0]) is AsyncSandbox
    assert children[0].metadata == {"a": "1", "b": "2"}
    assert (await children[0].exec("echo hi")).stdout == "hi\n"


async def test_children_that_do_not_come_to_life(fake: FakeCloche) -> None:
    parent = await AsyncSandbox.create()
    fake.lineage.failing = {0, 2}
    result = await parent.fork(3)
    assert len(result) == 1
    assert sorted(result.errors) == [0, 2]
    assert all(isinstance(error, CapacityError) for error in result.errors.values())
    assert result.errors[2].message == "no room"
    fake.on("POST", "/fork-tree", faults.answer(201, b'{"tree_id": "t", "children": []}'))
    with pytest.raises(ProtocolError):
        await parent.fork()


async def test_fork_waits_for_room(fake: FakeCloche) -> None:
    parent = await AsyncSandbox.create()
    fake.on("POST", "/fork-tree", FULL, times=2)
    assert len(await parent.fork(2)) == 2
    assert fake.count("POST", "/fork-tree") == 3
    async with AsyncClient(max_retry_seconds=0) as client:
        fake.on("POST", "/fork-tree", FULL)
        with pytest.raises(CapacityError):
            await (await AsyncSandbox.connect(parent.id, client=client)).fork()
    fake.on("POST", "/fork-tree", DISK_FULL)
    with pytest.raises(CapacityError):
        await parent.fork()
    assert fake.count("POST", "/fork-tree") == 5


async def test_what_may_have_been_made_is_not_made_again(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    unwell = faults.error(500, "internal", retryable=False)
    for handler, kind in ((faults.abort, ConnectionLost), (unwell, ClocheError)):
        fake.on("POST", "/fork-tree", handler)
        with pytest.raises(kind):
            await sandbox.fork()
    for handler, kind in ((faults.abort, ConnectionLost), (FULL, CapacityError), (DISK_FULL, CapacityError)):
        fake.on("POST", "/snapshots", handler)
        with pytest.raises(kind):
            await sandbox.snapshot()
    assert fake.count("POST", "/fork-tree") == 2
    assert fake.count("POST", "/snapshots") == 3


async def test_promote(fake: FakeCloche) -> None:
    parent = await AsyncSandbox.create()
    winner, *others = await parent.fork(3)
    kept = await winner.promote()
    assert (kept.winner, kept.deleted, len(fake.sandboxes)) == (winner.id, (), 4)
    done = await winner.promote(cleanup_siblings=True)
    assert (done.tree_id, done.failures) == (winner.info.fork_tree_id, {})
    assert set(done.deleted) == {other.id for other in others}
    assert set(fake.sandboxes) == {parent.id, winner.id}
    with pytest.raises(InvalidRequestError):
        await parent.promote()


# --- snapshots


async def test_snapshots(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create(metadata={"a": "1"})
    first = await sandbox.snapshot()
    assert (fake.bodies[-1], first.name) == ({}, None)
    second = await sandbox.snapshot("ready")
    assert (second.name, second.sandbox_id, second.info.memory) == ("ready", sandbox.id, True)
    assert (second.info.metadata, second.info.size_bytes, second.info.memory_mb) == ({"a": "1"}, 1000, 256)
    assert second.info.created_at is not None
    assert [one.id for one in await AsyncSnapshot.list()] == [second.id, first.id]
    assert await AsyncSnapshot.list(sandbox_id="another") == []
    assert (await AsyncSnapshot.get(second.id)).info == second.info
    await first.delete()
    await first.delete()
    with pytest.raises(SnapshotNotFound):
        await AsyncSnapshot.get(first.id)


async def test_checkpoints(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    first, second = await sandbox.snapshot(), await sandbox.snapshot(memory=False)
    assert (second.info.memory, second.info.disk_bytes) == (False, 2000)
    await sandbox.restore(first)
    assert (fake.bodies[-1], sandbox.info.raw["checkpoint_id"]) == ({"snapshot_id": first.id}, first.id)
    await sandbox.restore()
    assert (fake.bodies[-1], sandbox.info.raw["checkpoint_id"]) == ({}, second.id)
    assert await first.verify() == ["its file dev has changed"]
    lineage = await first.lineage()
    assert ([one.id for one in lineage.ancestors], lineage.children) == ([second.id], [])
    assert (lineage.sandboxes, lineage.missing_ancestor_id) == (["a"], "gone")


async def test_create_from_a_snapshot(fake: FakeCloche) -> None:
    snapshot = await (await AsyncSandbox.create()).snapshot()
    made = await AsyncSandbox.create(from_snapshot=snapshot, env={"A": "1"})
    assert fake.bodies[-1] == {"from_snapshot": snapshot.id, "env": {"A": "1"}}
    assert made.info.from_snapshot == snapshot.id
    assert (await AsyncSandbox.create(from_snapshot=snapshot.id)).info.from_snapshot == snapshot.id
    with pytest.raises(SnapshotNotFound):
        await AsyncSandbox.create(from_snapshot="none")
    for code, status, kind in (
        ("snapshot.corrupt", 500, SnapshotCorrupt),
        ("snapshot.incompatible", 409, SnapshotIncompatible),
    ):
        fake.on("POST", "/v1/sandboxes", faults.error(status, code))
        with pytest.raises(kind):
            await AsyncSandbox.create(from_snapshot=snapshot)
