"""The server is killed without warning at every step of its work; the next one puts all in order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from kit import faults, procs, truth
from kit.client import Api, ApiError, Box
from kit.schedule import some
from kit.server import Server
from kit.until import Watch, until

#: Within this many seconds after its start the next server must have everything in order.
IN_ORDER = 20.0

CREATE_EMPTY = [
    "Creator._reserve:after",
    "SandboxStore.insert:before",
    "SandboxStore.insert:after",
    "QemuEngine.launch:before",
    "QemuEngine._spawn:after",
    "QemuMachine.connect:after",
    "QemuMachine.command:before",
    "QemuMachine.command:after:2",
    "QemuMachine.restore:after",
    "GuestClient.connect:after",
    "GuestClient.renew:after",
    "SandboxStore.update:before",
    "SandboxStore.update:after",
    "present.sandbox:before",
]
CREATE_POOLED = [
    "Creator._reserve:after",
    "SandboxStore.insert:after",
    "GuestClient.renew:before",
    "GuestClient.renew:after",
    "SandboxStore.update:before",
    "present.sandbox:before",
]
DELETE = [
    "SandboxStore.update:before",
    "SandboxStore.update:after",
    "QemuMachine.kill:before",
    "QemuMachine.kill:after",
    "Machines.remove_directory:before",
    "Machines.remove_directory:after",
    "SandboxStore.update:before:2",
    "SandboxStore.update:after:2",
]
REFILL = [
    "QemuEngine._spawn:after",
    "QemuMachine.restore:before",
    "QemuMachine.command:after:3",
    "GuestClient.connect:after",
    "GuestClient.renew:after",
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


@pytest.fixture(scope="module")
def pooled(baked: Path) -> Iterator[Server]:
    server = Server.make(baked)
    server.command = faults.COMMAND
    try:
        server.start()
        yield server
    finally:
        server.close()


def _full(server: Server) -> bool:
    values = server.api.metrics()
    return sum(v for k, v in values.items() if k.startswith("cloche_pool_machines{")) >= 2


def _dies(server: Server, moment: str, call: Callable[[], object]) -> None:
    """`call` ends with a broken connection, because the server dies at `moment`."""
    faults.arm(server, moment)
    with contextlib.suppress(httpx.TransportError):
        call()
    server._reap()
    server._close_api()


def _in_order(server: Server) -> None:
    watch = Watch()
    server.start()
    truth.check(server, IN_ORDER)
    assert watch.seconds < 60


# ---------------------------------------------------------------- create


@pytest.mark.parametrize("moment", some(CREATE_EMPTY))
def test_kill_in_a_create_with_empty_pools(killable: Server, moment: str) -> None:
    before = {item["id"] for item in killable.api.list()}
    _dies(killable, moment, lambda: killable.api.create(metadata={"moment": moment}))
    _in_order(killable)
    _made_or_not(killable, before, moment, made_from="SandboxStore.update:after")


@pytest.mark.parametrize("moment", some(CREATE_POOLED))
def test_kill_in_a_create_from_a_pool(pooled: Server, moment: str) -> None:
    until(lambda: _full(pooled), 60)
    before = {item["id"] for item in pooled.api.list()}
    _dies(pooled, moment, lambda: pooled.api.create(metadata={"moment": moment}))
    _in_order(pooled)
    _made_or_not(pooled, before, moment, made_from="present.sandbox:before")


def _made_or_not(server: Server, before: set[str], moment: str, made_from: str) -> None:
    """Nothing of the create is there; or all of it, when it had been recorded as running."""
    new = [item for item in server.api.list() if item["id"] not in before]
    if moment in {made_from, "present.sandbox:before"}:
        assert [item["metadata"] for item in new] == [{"moment": moment}]
        box = server.api.attach(new[0]["id"])
        truth.usable(box)
        box.delete()
    else:
        assert new == []


def test_a_key_whose_create_was_killed_after_it_ran_makes_no_second_sandbox(killable: Server) -> None:
    headers = {"Idempotency-Key": "killed-late"}

    def create(api: Api) -> str:
        return str(api.call("POST", "/v1/sandboxes", json={}, headers=headers)["id"])

    _dies(killable, "present.sandbox:before", lambda: create(killable.api))
    _in_order(killable)
    first = [item["id"] for item in killable.api.list()]
    assert len(first) == 1
    assert create(killable.api) == first[0]
    _dies(killable, "SandboxStore.update:before:1", lambda: killable.api.delete(first[0]))
    _in_order(killable)
    killable.api.delete(first[0])
    gone = killable.api.request("POST", "/v1/sandboxes", json={}, headers=headers)
    assert (gone.status_code, gone.json()["code"]) == (404, "sandbox.not_found")
    for moment in ("SandboxStore.update:after", "SandboxStore.update:before", "GuestClient.renew:after"):
        key = {"Idempotency-Key": f"killed at {moment}"}
        _dies(killable, moment, lambda key=key: killable.api.call("POST", "/v1/sandboxes", json={}, headers=key))
        _in_order(killable)
        once = killable.api.call("POST", "/v1/sandboxes", json={}, headers=key)
        assert [item["id"] for item in killable.api.list()] == [once["id"]]
        killable.api.delete(once["id"])


# ---------------------------------------------------------------- delete and change


@pytest.mark.parametrize("moment", some(DELETE))
def test_kill_in_a_delete(killable: Server, moment: str) -> None:
    box = killable.api.create()
    _dies(killable, moment, box.delete)
    _in_order(killable)
    if moment == "SandboxStore.update:before":
        truth.usable(killable.api.attach(box.id))
        killable.api.delete(box.id)
    assert killable.api.request("GET", box.path).status_code == 404


@pytest.mark.parametrize("moment", ["SandboxStore.update:before", "SandboxStore.update:after"])
def test_kill_in_a_change_of_the_ttl(killable: Server, moment: str) -> None:
    box = killable.api.create(ttl_seconds=1000)
    _dies(killable, moment, lambda: killable.api.call("PATCH", box.path, json={"ttl_seconds": 2000}))
    _in_order(killable)
    again = killable.api.attach(box.id)
    assert again.info["ttl_seconds"] == (1000 if moment.endswith("before") else 2000)
    truth.usable(again)
    again.delete()
    truth.check(killable)


# ---------------------------------------------------------------- pools and bakes


@pytest.mark.parametrize("moment", some(REFILL))
def test_kill_in_a_refill(pooled: Server, moment: str) -> None:
    pooled.terminate()
    faults.arm(pooled, moment)
    pooled.start(wait=False)
    pooled._reap()
    _in_order(pooled)
    until(lambda: _full(pooled), 60)


@pytest.mark.slow
def test_kill_in_a_bake_of_another_size(killable: Server) -> None:
    """Nothing of it is left, not even for a while; and the size can be baked afterwards."""
    size = {"memory_mb": 192}
    for moment in ("QemuMachine.connect:after", "Baker._prove:before"):
        _dies(killable, moment, lambda: killable.api.create(**size))
        _in_order(killable)
        assert killable.api.list() == []
    box = killable.api.create(**size)
    assert box.info["memory_mb"] == 192
    assert 100_000 < int(box.sh("awk '/MemTotal/ {print $2}' /proc/meminfo")) < 192 * 1024
    box.delete()
    truth.check(killable)


# ---------------------------------------------------------------- what goes on meanwhile


def test_running_sandboxes_are_adopted_whole(new_server: Callable[..., Server]) -> None:
    server = new_server()
    box = server.api.create(ttl_seconds=3600, metadata={"who": "me"}, env={"KEEP": "it"})
    short = server.api.create(ttl_seconds=4)
    box.put("/root/before", b"kept")
    box.sh("nohup sh -c 'while :; do date +%s%N > /tmp/tick; sleep 0.1; done' >/dev/null 2>&1 &")
    ticking = box.start("i=0; while [ $i -lt 600 ]; do echo line $i; i=$((i+1)); sleep 0.1; done")
    until(lambda: box.exec_info(ticking)["output_bytes"] > 0)
    token = server.token
    server.kill()
    told = procs.below(server.data / "sandboxes")
    assert len(told) >= 2, "machines outlive their server"
    time.sleep(4.5)  # the TTL of `short` passes while nobody looks
    server.start()
    again = Api(server.url, token).attach(box.id)
    truth.usable(again)
    for name in ("metadata", "ttl_seconds", "expires_at", "created_at", "started_at", "boot_mode", "env_keys"):
        assert again.info[name] == box.info[name]
    assert again.get("/root/before") == b"kept"
    assert again.sh("echo $KEEP") == "it\n"
    first = until(lambda: int(again.sh("cat /tmp/tick") or 0))  # empty for a moment, at each tick
    assert until(lambda: int(again.sh("cat /tmp/tick") or 0) > first)
    seen = again.exec_info(ticking)
    assert seen["status"] == "running"
    with again.follow(ticking, 0) as events:
        head = [e for _, e in zip(range(60), (e for e in events if e.is_output), strict=False)]
    text = b"".join(e.raw for e in head).decode().split("\n")[:-1]
    assert text == [f"line {i}" for i in range(len(text))], "no line is lost or doubled"
    assert until(lambda: again.exec_info(ticking)["output_bytes"] > seen["output_bytes"])
    again.kill(ticking)
    ended = until(lambda: server.api.request("GET", short.path).status_code == 404, 10)
    assert ended
    told_end = server.api.request("GET", short.path).json()["details"]["termination"]
    assert told_end["reason"] == "ttl"
    truth.check(server)
    again.delete()
    truth.whole(server)


def test_a_machine_that_dies_while_no_server_runs(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_launched=0, pool_warm=0)
    dead, off, alive = (server.api.create() for _ in range(3))
    off.sh("(sleep 1; echo o > /proc/sysrq-trigger) >/dev/null 2>&1 &")
    victim = server.qemu(dead.id)
    server.kill()
    victim.kill()
    until(lambda: len(server.machines()) == 1, 60)
    server.start()
    for box in (dead, off):
        info = server.api.get(box.id)
        assert (info["status"], info["termination"]["reason"]) == ("failed", "vmm_died")
        assert server.api.attach(box.id).refused("true").code == "sandbox.failed"
        server.api.delete(box.id)
    truth.usable(server.api.attach(alive.id))
    truth.check(server)


def test_a_reboot_of_the_host_is_told_as_such(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_launched=0, pool_warm=0)
    box = server.api.create()
    victim = server.qemu(box.id)
    server.kill()
    victim.kill()
    (server.data / "run/boot_id").write_text("another\n")
    until(lambda: not server.machines())
    server.start()
    assert server.api.get(box.id)["termination"]["reason"] == "host_restart"
    server.api.delete(box.id)
    truth.whole(server)


def test_a_reused_pid_is_not_taken_for_the_machine(new_server: Callable[..., Server]) -> None:
    """A process that has the recorded pid, and is somebody else, is left alone."""
    import sqlite3

    server = new_server(pool_launched=0, pool_warm=0)
    box = server.api.create()
    victim = server.qemu(box.id)
    server.kill()
    victim.kill()
    until(lambda: not server.machines())
    with contextlib.closing(sqlite3.connect(server.data / "cloche.db")) as db:
        import os

        db.execute(
            "UPDATE sandboxes SET process = ? WHERE id = ?", (f'{{"pid": {os.getpid()}, "start_time": 1}}', box.id)
        )
        db.commit()
    server.start()
    assert server.api.get(box.id)["status"] == "failed"
    server.api.delete(box.id)
    truth.check(server)


def test_three_kills_in_a_row_with_sandboxes(new_server: Callable[..., Server]) -> None:
    """Also while the next server has only just begun to adopt."""
    server = new_server()
    boxes = [server.api.create(ttl_seconds=900) for _ in range(3)]
    server.kill()
    for pause in (0.3, 0.8, 1.2):
        server.start(wait=False)
        time.sleep(pause)
        server.kill()
    server.start()
    truth.usable(*(server.api.attach(box.id) for box in boxes))
    truth.check(server)


def test_a_data_directory_behind_a_link(new_server: Callable[..., Server]) -> None:
    server = new_server(start=False, pool_launched=0, pool_warm=1)
    real, link = server.data, server.data.with_name(server.data.name + "-link")
    link.symlink_to(real)
    try:
        server.data = link
        server.start()
        box = server.api.create()
        server.kill()
        server.start()
        truth.usable(server.api.attach(box.id))
        assert set(server.directories()) >= {box.id}
        assert box.id in {Path(p.cwd).name for p in procs.below(real) if p.is_qemu}
        server.stop(sandboxes=True)
        assert not [p for p in procs.below(real) if p.is_qemu]
    finally:
        server.data = real
        link.unlink()


# ---------------------------------------------------------------- SIGTERM


def _whatever(work: Callable[[], object]) -> None:
    with contextlib.suppress(httpx.TransportError, Exception):
        work()


def _slow_upload(box: Box) -> object:
    def parts() -> Iterator[bytes]:
        while True:
            yield b"x" * 65536
            time.sleep(0.02)

    return box.put("/root/big", parts())


def test_sigterm_under_load(new_server: Callable[..., Server]) -> None:
    """Ends within its grace; streams get their last event; sandboxes run on, and are adopted."""
    server = new_server(shutdown_grace=3)
    boxes = [server.api.create() for _ in range(3)]
    api = server.api
    ends: list[str] = []
    errors: list[BaseException] = []

    def stream(box: Box) -> None:
        try:
            with box.stream("while :; do echo x; sleep 0.05; done") as events:
                last = None
                for event in events:
                    last = event
            ends.append(f"{last.name} {last.data.get('code')}" if last else "nothing")
        except ApiError as error:  # its command had not begun yet
            ends.append(f"error {error.code}")
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=stream, args=(box,)) for box in boxes for _ in range(2)]
    threads += [
        threading.Thread(target=_whatever, args=(lambda box=box: box.exec("sleep 100"),))
        for box in boxes
        for _ in range(3)
    ]
    threads += [threading.Thread(target=_whatever, args=(lambda box=box: _slow_upload(box),)) for box in boxes[:2]]
    threads += [threading.Thread(target=_whatever, args=(lambda: api.create(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    watch = Watch()
    server.terminate()
    assert watch.seconds < 3 + 10
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert errors == []
    assert len(ends) == 6
    assert set(ends) <= {"error server.shutting_down", "error exec.cancelled"}
    assert "error server.shutting_down" in ends
    assert set(server.machines()) >= {box.id for box in boxes}
    assert "Traceback" not in server.log.read_text(), server.log_tail()
    server.start()
    for box in boxes:
        again = server.api.attach(box.id)
        truth.usable(again)
        # What was attached has ended with its connection; what was uploaded half is not there.
        assert until(lambda again=again: "sleep 100" not in again.sh("ps -eo args | grep -v grep || true"), 40)
        assert again.exec("ls /root/big").code != 0
    truth.check(server)


def test_stop_with_sandboxes_leaves_nothing(new_server: Callable[..., Server]) -> None:
    from kit import leaks

    server = new_server()
    boxes = [server.api.create() for _ in range(2)]
    boxes[0].start("sleep 1000")
    told = server.stop(sandboxes=True)
    assert "ended 2 sandboxes" in told
    assert leaks.left_after_end(server.data) == []
    server.start()
    truth.check(server)
    assert server.api.list() == []
    assert server.directories() == set(server.machines()), "only pools"
    for box in boxes:
        assert server.api.request("GET", box.path).json()["details"]["termination"]["reason"] == "deleted"
