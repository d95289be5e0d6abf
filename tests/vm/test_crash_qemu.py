"""QEMU is killed from outside: the sandbox has failed within a second, and everybody is told."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kit import faults, truth
from kit.client import ApiError, Box
from kit.server import Server
from kit.until import Watch, until

#: The promise is one second; the rest is what this busy machine adds.
SOON = 5.0


@pytest.fixture(scope="module")
def plain(baked: Path) -> Iterator[Server]:
    """Without pools, so that what exists is what was made."""
    server = Server.make(baked, pool_launched=0, pool_warm=0)
    try:
        server.start()
        yield server
        truth.check(server)
    finally:
        server.close()


def has_failed(box: Box, within: float = SOON) -> None:
    watch = Watch()
    until(lambda: box.refresh()["status"] == "failed", within, every=0.02)
    print(f"failed after {watch.seconds:.2f} s")
    assert box.info["termination"]["reason"] == "vmm_died"
    assert box.info["termination"]["signal"] == "SIGKILL"
    error = box.refused("true")
    assert (error.status, error.code) == (409, "sandbox.failed")
    for method, route in (("GET", "?path=/etc/hostname"), ("PUT", "?path=/x"), ("GET", "/dir?path=/")):
        response = box.api.request(method, f"{box.path}/fs{route}", content=b"" if method == "PUT" else None)
        assert (response.status_code, response.json()["code"]) == (409, "sandbox.failed")


def gone(box: Box) -> None:
    box.delete()
    assert box.api.request("GET", box.path).status_code == 404
    truth.check(_server_of(box))


_SERVERS: dict[str, Server] = {}


def _server_of(box: Box) -> Server:
    return _SERVERS[box.api.url]


@pytest.fixture(autouse=True)
def known(plain: Server) -> None:
    _SERVERS[plain.url] = plain


def test_while_idle(plain: Server) -> None:
    other, box = plain.api.create(), plain.api.create()
    plain.qemu(box.id).kill()
    has_failed(box)
    truth.usable(other)
    assert plain.api.metrics()['cloche_sandboxes{status="failed"}'] == 1
    assert "console" not in box.info
    assert plain.api.request("GET", f"{box.path}/logs").status_code == 200, "what it said last can be read"
    gone(box)
    other.delete()


def test_during_a_blocking_exec(plain: Server) -> None:
    box = plain.api.create()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(box.exec, "echo begun; sleep 100")
        until(lambda: box.execs())
        time.sleep(1)
        plain.qemu(box.id).kill()
        watch = Watch()
        with pytest.raises(ApiError) as told:
            running.result(30)
    assert watch.seconds < SOON
    assert (told.value.status, told.value.code) == (502, "exec.sandbox_gone")
    assert told.value.details["stdout"] == "begun\n", "what it had written is not lost"
    assert told.value.details["termination"]["reason"] == "sandbox_gone"
    has_failed(box)
    gone(box)


def test_during_a_stream(plain: Server) -> None:
    box = plain.api.create()
    with box.stream("echo begun; sleep 100") as events:
        first = next(e for e in events if e.name == "stdout")
        assert first.raw == b"begun\n"
        plain.qemu(box.id).kill()
        watch = Watch()
        rest = [e for e in events if e.name]
    assert watch.seconds < SOON
    assert [e.name for e in rest] == ["error"]
    assert rest[0].data["code"] == "exec.sandbox_gone"
    has_failed(box)
    gone(box)


def test_during_an_upload(plain: Server) -> None:
    box = plain.api.create()
    sent, enough = threading.Event(), threading.Event()

    def parts() -> Iterator[bytes]:
        number = 0
        while not enough.is_set():  # this client looks at the answer only when it has sent all
            yield b"x" * 65536
            if (number := number + 1) == 20:
                sent.set()
            time.sleep(0.01)

    with ThreadPoolExecutor() as pool:
        running = pool.submit(box.fs_raw, "PUT", "", "/root/big", parts())
        assert sent.wait(30)
        plain.qemu(box.id).kill()
        has_failed(box)
        enough.set()
        watch = Watch()
        try:
            response = running.result(60)
        except httpx.TransportError:
            pass  # cut off in mid-body, which nobody takes for a success
        else:
            assert response.status_code in {409, 502}
            assert response.json()["code"] in {"sandbox.failed", "sandbox.unreachable", "exec.sandbox_gone"}
    assert watch.seconds < 2 * SOON
    has_failed(box)
    gone(box)


def test_during_a_download(plain: Server) -> None:
    """A body that breaks off is never a whole answer."""
    box = plain.api.create()
    box.sh("head -c 200000000 /dev/zero > /root/big")
    with pytest.raises(httpx.TransportError):
        with box.api.http.stream("GET", f"{box.path}/fs", params={"path": "/root/big"}) as response:
            assert response.status_code == 200
            for number, _ in enumerate(response.iter_raw(65536)):
                if number == 5:
                    plain.qemu(box.id).kill()
    has_failed(box)
    gone(box)


@pytest.mark.parametrize(
    "point",
    ["QemuEngine._spawn", "QemuMachine.connect", "QemuMachine.command", "QemuMachine.restore", "GuestClient.renew"],
)
def test_during_a_create(new_server: Callable[..., Server], point: str) -> None:
    """A sentence within seconds, and nothing is left. Not the server but its newest QEMU dies at the point."""
    server = new_server(start=False, pool_launched=0, pool_warm=0)
    server.command = faults.COMMAND
    server.start()
    for when in ("after", "before"):
        faults.arm(server, f"{point}:{when}:1:qemu")
        watch = Watch()
        response = server.api.request("POST", "/v1/sandboxes", json={})
        if not (server.data / faults.ARMED).exists() and response.status_code != 201:
            assert response.status_code == 500
            assert response.json()["code"] == "sandbox.boot_failed"
            assert response.json()["error"]
        elif response.status_code == 201:
            # Nothing was running before the first point, and after the last all was done.
            box = server.api.attach(response.json()["id"])
            if (point, when) != ("QemuEngine._spawn", "before"):
                until(lambda box=box: box.refresh()["status"] == "failed", SOON)
            box.delete()
        assert watch.seconds < 15
        truth.check(server)
        assert server.api.list() == []
    truth.whole(server)


def test_in_both_pools(new_server: Callable[..., Server]) -> None:
    """They are replaced, never given out, and capacity does not drift."""
    server = new_server(pool_launched=2, pool_warm=2)
    full = lambda: sum(v for k, v in server.api.metrics().items() if k.startswith("cloche_pool_machines{")) == 4  # noqa: E731
    until(full, 90)
    for _ in range(2):
        for machine in server.machines().values():
            machine.kill()
        box = server.api.create()
        truth.usable(box)
        box.delete()
    until(full, 120)
    truth.check(server)
    assert len(server.machines()) == 4


def test_one_that_hangs_is_ended_by_delete(plain: Server) -> None:
    """SIGSTOP: alive, deaf to everything. Calls end in bounded time, and delete works."""
    box = plain.api.create()
    machine = plain.qemu(box.id)
    os.kill(machine.pid, signal.SIGSTOP)
    with pytest.raises(httpx.ReadTimeout):
        box.exec("true", http_timeout=3)
    watch = Watch()
    gone(box)
    assert watch.seconds < 30
    assert not machine.alive()


def test_many_at_once(plain: Server) -> None:
    boxes = [plain.api.create() for _ in range(6)]
    for box in boxes[:5]:
        plain.qemu(box.id).kill()
    for box in boxes[:5]:
        has_failed(box)
    truth.usable(boxes[5])
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda box: box.delete(), boxes))
    truth.check(plain)


def test_killed_and_deleted_at_the_same_moment(plain: Server) -> None:
    for _ in range(8):
        box = plain.api.create()
        machine = plain.qemu(box.id)
        with ThreadPoolExecutor() as pool:
            patches = [
                pool.submit(box.api.request, "PATCH", box.path, json={"metadata": {"n": str(n)}}) for n in range(4)
            ]
            deleting = pool.submit(box.api.request, "DELETE", box.path)
            machine.kill()
            assert deleting.result(30).status_code == 204
            assert {p.result(30).status_code for p in patches} <= {200, 404}
        assert plain.running
    truth.check(plain)
