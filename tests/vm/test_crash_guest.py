"""What root inside a sandbox can do to its own machine. The state stays true, calls end, others go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kit import truth
from kit.client import Box
from kit.server import Server
from kit.until import Watch, until


@pytest.fixture(scope="module")
def plain(baked: Path) -> Iterator[Server]:
    server = Server.make(baked, pool_launched=0, pool_warm=0)
    try:
        server.start()
        yield server
        truth.check(server)
    finally:
        server.close()


@pytest.fixture(scope="module")
def bystander(plain: Server) -> Iterator[Box]:
    """Goes on whatever the others do to themselves."""
    box = plain.api.create()
    yield box
    truth.usable(box)
    box.delete()


@pytest.fixture
def box(plain: Server, bystander: Box) -> Iterator[Box]:
    made = plain.api.create()
    yield made
    made.delete()
    truth.check(plain)
    truth.usable(bystander)


def do(box: Box, cmd: str) -> None:
    """Runs what may well end the machine under it."""
    with contextlib.suppress(httpx.TransportError):
        box.api.request("POST", f"{box.path}/exec", json={"cmd": cmd, "timeout_seconds": 20}, timeout=60)


@pytest.mark.parametrize(
    "cmd",
    [
        "poweroff -f || echo o > /proc/sysrq-trigger",
        "reboot -f || echo b > /proc/sysrq-trigger",
        "echo o > /proc/sysrq-trigger; sleep 20",
        "echo b > /proc/sysrq-trigger; sleep 20",
        "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger",
    ],
)
def test_the_guest_ends_itself(plain: Server, box: Box, cmd: str) -> None:
    watch = Watch()
    do(box, cmd)
    until(lambda: box.refresh()["status"] == "failed", 60)
    assert watch.seconds < 60
    assert box.info["termination"]["reason"] == "guest_shutdown", "a shutdown is told from a crash of the VMM"
    assert "signal" not in box.info["termination"]
    error = box.refused("true")
    assert (error.status, error.code) == (409, "sandbox.failed")


def test_signals_to_the_agent_are_ignored(box: Box) -> None:
    box.exec("kill -9 1; kill -TERM 1; kill -INT 1; kill -STOP 1; kill -SEGV 1; true")
    truth.usable(box)
    # Everything else that runs is ended with it, and the agent lives on.
    do(box, "kill -9 -1")
    truth.usable(box)


def test_the_binaries_are_gone(box: Box) -> None:
    """The agent needs nothing of the root file system; commands say what is missing."""
    box.move("/usr/bin", "/usr/bin.away")
    box.move("/usr/lib", "/usr/lib.away")
    result = box.api.request("POST", f"{box.path}/exec", json={"argv": ["/bin/true"]}, timeout=60)
    assert result.status_code < 500 or result.json()["code"].startswith(("guest.", "exec."))
    assert box.names("/")
    box.put("/root/still", b"here")
    assert box.get("/root/still") == b"here"
    assert box.refresh()["status"] == "running"
    box.move("/usr/bin.away", "/usr/bin")
    box.move("/usr/lib.away", "/usr/lib")
    truth.usable(box)


def test_a_root_that_is_read_only(box: Box) -> None:
    done = box.exec("sync; echo u > /proc/sysrq-trigger; sleep 1; mount -o remount,ro / ; true")
    assert done.code == 0
    truth.usable(box)
    refused = box.fs_raw("PUT", "", "/root/x", b"x")
    assert refused.status_code in {403, 500, 507}
    assert refused.json()["code"].startswith(("file.", "guest."))


def test_the_disk_is_overwritten(box: Box) -> None:
    """Whatever then still works: the state is true, and every call ends."""
    do(box, "dd if=/dev/zero of=/dev/vda bs=1M count=512 conv=notrunc; sync; echo 3 > /proc/sys/vm/drop_caches")
    watch = Watch()
    for call in (
        lambda: box.api.request("POST", f"{box.path}/exec", json={"cmd": "ls -lR / | tail -3", "timeout_seconds": 10}),
        lambda: box.fs_raw("GET", "/dir", "/usr/share"),
        lambda: box.fs_raw("PUT", "", "/root/y", b"y" * 100_000),
    ):
        response = call()
        assert response.json()["code"] if not response.is_success else True
    assert watch.seconds < 120
    assert box.refresh()["status"] in {"running", "failed"}


@pytest.mark.slow
def test_the_link_is_cut(plain: Server, box: Box) -> None:
    """No agent port, no calls: that is told in bounded time, again and again, and delete works."""
    find = "basename $(dirname $(ls -d /sys/bus/virtio/drivers/virtio_console/virtio*/virtio-ports | head -1))"
    do(box, f"echo $({find}) > /sys/bus/virtio/drivers/virtio_console/unbind")
    for _ in range(2):
        watch = Watch()
        error = box.refused("true")
        assert (error.status, error.code) == (502, "sandbox.unreachable")
        assert watch.seconds < 45
    assert box.refresh()["status"] == "running", "the machine does run"


def test_a_guest_that_does_nothing_but_spin(box: Box, bystander: Box) -> None:
    """Interrupts off or a real-time loop: only this sandbox suffers."""
    box.start("chrt -f 99 sh -c 'while :; do :; done' || nice -n -20 sh -c 'while :; do :; done'")
    time.sleep(2)
    watch = Watch()
    truth.usable(bystander)
    assert watch.seconds < 30
    response = box.api.request("POST", f"{box.path}/exec", json={"cmd": "true", "timeout_seconds": 5}, timeout=90)
    assert response.status_code in {200, 502, 504}


@pytest.mark.slow
def test_a_storm_on_the_console_is_bounded(plain: Server, box: Box) -> None:
    box.start("while :; do head -c 65536 /dev/zero | tr '\\0' x > /dev/console; done")
    log = plain.data / "sandboxes" / box.id / "console.log"
    time.sleep(12)
    # It is cut every few seconds; what was written since then is all there may be above the limit.
    sizes = []
    for _ in range(10):
        sizes.append(log.stat().st_size)
        time.sleep(1)
    assert min(sizes) < 20 * 1024 * 1024
    assert box.refresh()["status"] == "running"
