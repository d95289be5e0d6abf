"""The server, or a machine, is killed at every step of a fork, a snapshot, a hibernation, a wake and a pause.

The sandbox they are done to has a command that counts, a file and something in memory: afterwards all three are
there, or the sandbox is said to have failed; and nothing half-made is left of a child, a snapshot or a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from kit import faults, layers, truth
from kit.client import Api, ApiError, Box
from kit.lineage import skew
from kit.schedule import some
from kit.server import Server
from kit.until import until

pytestmark = pytest.mark.slow

#: Within this many seconds after its start the next server must have everything in order.
IN_ORDER = 20.0
#: A sandbox whose server died while its commands were frozen goes on by itself after this.
USABLE = 40.0

FORK = [
    "Layers.create:after",
    "qmp.stop:after",
    "qmp.blockdev-snapshot:after",
    "SandboxStore.update:after",
    "QemuEngine._spawn:after",
    "GuestClient.renew:after",
    "SandboxStore.update:after:2",
    "present.fork_tree:before",
]
#: From these on the child is there.
FORKED = {"SandboxStore.update:after:2", "present.fork_tree:before"}
SNAPSHOT = ["saved.write:before", "saved.write:after", "SnapshotCatalog.publish:after"]
HIBERNATE = [
    "SandboxStore.update:after",
    "qmp.xen-save-devices-state:after",
    "saved.write:after",
    "QemuMachine.kill:before",
    "SandboxStore.update:after:2",
]
WAKE = [
    "SandboxStore.update:after",
    "QemuEngine._spawn:after",
    "sleep._use_up:before",
    "sleep._use_up:after",
    "GuestClient.renew:after",
    "SandboxStore.update:after:2",
]
RESTORE = [
    "Layers.create:after",
    "SandboxStore.update:after",
    "QemuMachine.kill:before",
    "Machines.release_layer:after",
    "QemuEngine._spawn:after",
    "GuestClient.renew:after",
    "SandboxStore.update:after:2",
]
#: With the state that is told afterwards.
PAUSE = [
    ("pause", "QemuMachine.pause:after", "running"),
    ("pause", "SandboxStore.update:after", "paused"),
    ("resume", "SandboxStore.update:after", "running"),
]


@pytest.fixture(scope="module")
def killable(baked: Path) -> Iterator[Server]:
    """A server that dies at the moment it is told, with empty pools."""
    server = Server.make(baked, pool_launched=0, pool_warm=0)
    server.command = faults.COMMAND
    try:
        server.start()
        yield server
    finally:
        server.close()


class Subject:
    """A sandbox, and how to see that it is the one it was. It gets a new handle with each server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.box = server.api.create()
        self.box.sh("echo disk > /root/f; echo memory > /dev/shm/m; sync")
        self.counting = self.box.start("i=0; while :; do echo $((i=i+1)) > /dev/shm/count; sleep 0.1; done")
        until(lambda: self.count(self.box) > 0)

    @staticmethod
    def count(box: Box) -> int:
        return int(box.sh("cat /dev/shm/count 2>/dev/null || true") or 0)

    def dies(self, moment: str, call: Callable[[Box], object]) -> None:
        """`call` ends with a broken connection because the server dies at `moment`; the next server starts."""
        faults.arm(self.server, moment)
        with contextlib.suppress(httpx.TransportError):
            call(self.box)
        self.server._reap()
        self.server._close_api()
        self.server.start()
        truth.check(self.server, IN_ORDER)
        self.box = self.server.api.attach(self.box.id)

    def whole(self, box: Box | None = None) -> None:
        """In itself, or in a copy of it: disk, memory and processes go on."""
        box = box or self.box
        result = box.exec("cat /root/f /dev/shm/m", http_timeout=USABLE)
        assert (result.stdout, result.code) == ("disk\nmemory\n", 0)
        before = self.count(box)
        until(lambda: self.count(box) > before)
        assert box.exec_info(self.counting)["status"] == "running"
        box.sh("echo more >> /root/more; sync")

    def children(self) -> list[Box]:
        found = [one["id"] for one in self.server.api.list() if one.get("parent_id") == self.box.id]
        return [self.server.api.attach(one) for one in found]


@pytest.fixture(scope="module")
def subjects() -> list[Subject]:
    return []


@pytest.fixture
def subject(killable: Server, subjects: list[Subject], request: pytest.FixtureRequest) -> Iterator[Subject]:
    """One for all: it must survive all of this, and never lose a thing. After a failure there is another one."""
    if not subjects:
        if not killable.running:
            killable.start()
        for box in killable.api.list():
            killable.api.delete(box["id"])
        for one in killable.api.snapshots():
            killable.api.call("DELETE", f"/v1/snapshots/{one['id']}")
        subjects.append(Subject(killable))
    failed = request.session.testsfailed
    yield subjects[0]
    if request.session.testsfailed > failed:
        subjects.clear()


# ---------------------------------------------------------------- the server is killed


@pytest.mark.parametrize("moment", some(FORK))
def test_kill_in_a_fork(subject: Subject, moment: str) -> None:
    subject.dies(moment, lambda box: box.fork())
    assert subject.box.info["status"] == "running"
    subject.whole()
    children = subject.children()
    assert len(children) == (1 if moment in FORKED else 0)
    for child in children:
        subject.whole(child)
        child.delete()
    truth.check(subject.server)


@pytest.mark.parametrize("moment", some(SNAPSHOT))
def test_kill_in_a_snapshot(subject: Subject, moment: str) -> None:
    subject.dies(moment, lambda box: box.snapshot())
    subject.whole()
    snapshots = subject.server.api.snapshots()
    assert len(snapshots) == (1 if moment == "SnapshotCatalog.publish:after" else 0)
    for one in snapshots:
        copy = subject.server.api.create(from_snapshot=one["id"])
        subject.whole(copy)
        copy.delete()
        subject.server.api.call("DELETE", f"/v1/snapshots/{one['id']}")
    truth.check(subject.server)


@pytest.mark.parametrize("moment", ["SnapshotCatalog.remove:before", "SnapshotCatalog.remove:after"])
def test_kill_while_a_snapshot_is_deleted(subject: Subject, moment: str) -> None:
    """It is there, or nothing of it is."""
    snapshot = subject.box.snapshot()
    path = f"/v1/snapshots/{snapshot}"
    subject.dies(moment, lambda box: box.api.call("DELETE", path))
    api = subject.server.api
    assert len(api.snapshots()) == (1 if moment.endswith("before") else 0)
    if api.snapshots():
        api.call("DELETE", path)
    truth.check(subject.server)
    assert layers.snapshots(subject.server.data) == {}
    subject.whole()


@pytest.mark.parametrize("moment", some(HIBERNATE))
def test_kill_in_a_hibernation(subject: Subject, moment: str) -> None:
    subject.dies(moment, lambda box: box.hibernate())
    saved = moment.startswith("QemuMachine.kill") or moment.endswith("update:after:2")
    assert subject.box.status() == ("hibernated" if saved else "running")
    subject.whole()
    assert subject.box.status() == "running"
    truth.check(subject.server)


@pytest.mark.parametrize("moment", some(WAKE))
def test_kill_in_a_wake(subject: Subject, moment: str) -> None:
    """It is still asleep, or awake; never is a memory gone on from twice."""
    subject.box.hibernate()
    subject.dies(moment, lambda box: box.wake())
    woken = WAKE.index(moment) >= WAKE.index("sleep._use_up:after")
    assert subject.box.status() == ("running" if woken else "hibernated")
    subject.whole()
    assert skew(subject.box) < 1.0
    truth.check(subject.server)


@pytest.mark.parametrize("moment", some(RESTORE))
def test_kill_in_a_restore(subject: Subject, moment: str) -> None:
    """It was not begun, or is over, or the sandbox has failed and can be taken back once more."""
    snapshot = subject.box.snapshot()
    subject.box.sh("echo later > /root/f; sync")
    subject.dies(moment, lambda box: box.restore(snapshot))
    if moment == "Layers.create:after":
        assert subject.box.sh("cat /root/f") == "later\n"
    elif moment == "SandboxStore.update:after:2":
        subject.whole()
    else:
        assert subject.box.status() == "failed"
    subject.box.restore(snapshot)
    subject.whole()
    assert skew(subject.box) < 1.0
    subject.server.api.call("DELETE", f"/v1/snapshots/{snapshot}")
    truth.check(subject.server)


@pytest.mark.parametrize(("verb", "moment", "status"), some(PAUSE))
def test_kill_in_a_pause_and_in_a_resume(subject: Subject, verb: str, moment: str, status: str) -> None:
    """What is told is so: a paused one counts no further, and a running one does."""
    if verb == "resume":
        subject.box.pause()
    subject.dies(moment, lambda box: box.verb(verb))
    assert subject.box.status() == status
    if status == "paused":
        assert subject.box.refused("true").code == "sandbox.invalid_state"
        subject.box.resume()
    subject.whole()
    truth.check(subject.server)


def test_three_kills_in_a_row_while_one_is_captured(subject: Subject) -> None:
    """The next servers die as well, in the midst of taking over."""
    faults.arm(subject.server, "qmp.blockdev-snapshot:after")
    with contextlib.suppress(httpx.TransportError):
        subject.box.fork()
    subject.server._reap()
    subject.server._close_api()
    for moment in ("QemuMachine.connect:after", "qmp.cont:before"):
        faults.arm(subject.server, moment)
        subject.server.start(wait=False)
        subject.server._reap()
    subject.server.start()
    truth.check(subject.server, IN_ORDER)
    subject.box = subject.server.api.attach(subject.box.id)
    subject.whole()


# ---------------------------------------------------------------- a machine is killed


#: The newest machine dies at this moment of the verb; `parent`: that is the sandbox itself.
MACHINE = [
    ("fork", "qmp.stop:after", True),
    ("fork", "qmp.blockdev-snapshot:after", True),
    ("fork", "QemuEngine._spawn:after", False),
    ("fork", "GuestClient.renew:before", False),
    ("snapshots", "saved.write:before", True),
    ("hibernate", "qmp.xen-save-devices-state:after", True),
    ("hibernate", "QemuMachine.kill:before", True),
    ("wake", "sleep._use_up:before", True),
    ("wake", "GuestClient.renew:before", True),
]


@pytest.mark.parametrize(("verb", "moment", "parent"), some(MACHINE))
def test_a_machine_dies(killable: Server, verb: str, moment: str, parent: bool) -> None:
    """A reason for the caller, a true state, and nothing that is left."""
    if not killable.running:
        killable.start()
    api = killable.api
    known = {one["id"] for one in api.list()}
    one = Subject(killable)
    if verb == "wake":
        one.box.hibernate()
    faults.arm(killable, f"{moment}:1:qemu")
    status, code = one.box.verb(verb)
    faults.arm(killable, None)
    print(f"{verb} at {moment}: {status} {code}, then {one.box.status()}")
    assert killable.running
    assert status in {200, 201, 204, 409, 500, 502}
    assert code != "internal"
    _true_state(api, one, parent)
    for sandbox in api.list():
        if sandbox["id"] not in known:
            api.delete(sandbox["id"])
    for snapshot in api.snapshots():
        api.call("DELETE", f"/v1/snapshots/{snapshot['id']}")
    truth.check(killable)


def _true_state(api: Api, one: Subject, parent: bool) -> None:
    if not parent:
        assert one.children() == []
        one.whole()
        return
    until(lambda: one.box.status() in {"failed", "hibernated"} or _is_alive(one.box), 30)
    if one.box.status() == "failed":
        assert one.box.refused("true").code == "sandbox.failed"
    else:
        one.whole()
    for child in one.children():
        one.whole(child)
    for snapshot in api.snapshots():
        with contextlib.suppress(ApiError):
            one.whole(api.create(from_snapshot=snapshot["id"]))


def _is_alive(box: Box) -> bool:
    return bool(box.api.request("POST", f"{box.path}/exec", json={"cmd": "true"}).status_code == 200)
