"""The disk of the host is full: a sentence for each, nothing left, the others go on, and delete makes room."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import truth
from kit.client import Box
from kit.server import Server
from kit.small_disk import MIB, Filler, small_server
from kit.until import Watch, until


@pytest.fixture(scope="module")
def small(baked: Path) -> Iterator[Server]:
    with small_server(baked) as made:
        yield made


@pytest.fixture
def filler(small: Server) -> Iterator[Filler]:
    made = Filler(small.data)
    yield made
    made.free()


def test_create_is_refused_with_a_sentence(small: Server, filler: Filler) -> None:
    before = small.api.create()
    filler.fill()
    for _ in range(3):
        response = small.api.request("POST", "/v1/sandboxes", json={})
        assert response.status_code in {503, 507}, response.text
        body = response.json()
        assert body["code"] in {"host.disk_full", "capacity.unavailable"}
        assert "disk" in body["error"]
        assert body["retryable"] is True
    assert small.directories() == {before.id}
    assert set(small.machines()) == {before.id}
    truth.usable(before)
    filler.free()
    truth.check(small)
    before.delete()
    truth.whole(small)


def test_delete_works_when_full(small: Server, filler: Filler) -> None:
    boxes = [small.api.create() for _ in range(3)]
    for box in boxes:
        box.sh("head -c 3000000 /dev/urandom > /root/data; sync")
    filler.fill()
    small.qemu(boxes[1].id).kill()
    until(lambda: boxes[1].refresh()["status"] == "failed", 10)
    for box in boxes:
        box.delete()
        assert box.api.request("GET", box.path).status_code == 404
        filler.fill()
    assert small.directories() == set()
    assert small.running
    filler.free()
    truth.check(small)
    truth.whole(small)


def test_the_ttl_works_when_full(small: Server, filler: Filler) -> None:
    box = small.api.create(ttl_seconds=8)
    filler.fill()
    until(lambda: small.api.request("GET", box.path).status_code == 404, 30)
    until(lambda: not small.directories(), 10)
    filler.free()
    truth.check(small)


def _write_until_stopped(box: Box) -> str:
    """Writes without end in the background; its exec id."""
    return box.start("i=0; while :; do head -c 4000000 /dev/urandom > /root/f$((i % 60)); sync; i=$((i+1)); done")


def test_a_guest_that_fills_the_disk_stops_and_goes_on(small: Server, filler: Filler) -> None:
    """It is told so; others go on; with room it goes on by itself, and its file system is whole."""
    writer, other = small.api.create(), small.api.create()
    other.sh("echo quiet > /root/q; sync")
    writing = _write_until_stopped(writer)
    time.sleep(2)
    filler.fill(leave=6 * MIB)

    def stopped() -> bool:
        response = small.api.request("POST", f"{writer.path}/exec", json={"cmd": "true", "timeout_seconds": 10})
        return response.status_code == 507 and response.json()["code"] == "host.disk_full"

    until(stopped, 120, every=1)
    answer = writer.refused("true")
    assert "goes on when there is room" in answer.message
    assert int(answer.headers["retry-after"]) >= 1
    assert writer.refresh()["status"] == "running"
    watch = Watch()
    assert other.sh("cat /root/q") == "quiet\n", "a guest that writes nothing goes on"
    assert watch.seconds < 20
    filler.free()
    until(lambda: writer.api.request("POST", f"{writer.path}/exec", json={"cmd": "true"}).status_code == 200, 60)
    assert writer.exec_info(writing)["status"] == "running", "what ran before goes on"
    writer.kill(writing)
    assert "error" not in writer.sh("dmesg | grep -iE 'ext4.*error|I/O error' | head -3 || true").lower()
    writer.sh("rm -f /root/f*; sync; echo whole > /root/w; cat /root/w")
    truth.check(small)
    writer.delete()
    other.delete()


def test_a_stopped_guest_is_known_to_the_next_server(small: Server, filler: Filler) -> None:
    writer = small.api.create()
    _write_until_stopped(writer)
    time.sleep(2)
    filler.fill(leave=6 * MIB)

    def stopped() -> bool:
        response = small.api.request("POST", f"{writer.path}/exec", json={"cmd": "true", "timeout_seconds": 10})
        return response.status_code == 507

    until(stopped, 120, every=1)
    small.kill()
    filler.fill()
    started = small.cli_raw("token", "list")
    assert started.returncode in {0, 1}
    filler.free()
    small.start()
    until(lambda: small.api.request("POST", f"{writer.path}/exec", json={"cmd": "true"}).status_code == 200, 60)
    small.api.delete(writer.id)
    truth.check(small)


@pytest.mark.slow
def test_a_start_on_a_full_disk(small: Server, filler: Filler) -> None:
    """It starts, or says why it cannot; sandboxes are not lost either way."""
    box = small.api.create()
    small.kill()
    filler.fill()
    done = _serve_for(small, 20)
    if done is not None:
        assert done.returncode == 1
        assert "Traceback" not in done.stderr, done.stderr
        assert "full" in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 3
    filler.free()
    if not small.running:
        small.start()
    # Its guest may have written as well, and stands still until somebody has seen that there is room.
    until(lambda: small.api.request("POST", f"{box.path}/exec", json={"cmd": "true"}).status_code == 200, 60)
    truth.usable(small.api.attach(box.id))
    small.api.delete(box.id)
    truth.check(small)


def _serve_for(server: Server, seconds: float) -> subprocess.CompletedProcess[str] | None:
    """Starts the server; None when it became ready, else what it said."""
    server.start(wait=False)
    assert server._process is not None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server._process.poll() is not None:
            said = server.log.read_text().splitlines()[-4:]
            lines = [line for line in said if "[info" not in line]
            return subprocess.CompletedProcess([], server._process.returncode, "", "\n".join(lines))
        if server._find_url() and server._is_ready():
            return None
        time.sleep(0.1)
    raise AssertionError("neither ready nor ended")


def test_changes_that_cannot_be_recorded_are_refused(small: Server, filler: Filler) -> None:
    box = small.api.create(ttl_seconds=3000)
    filler.fill()
    refused = 0
    for number in range(200):
        response = small.api.request("PATCH", box.path, json={"metadata": {"n": str(number) * 500}})
        if response.status_code != 200:
            assert (response.status_code, response.json()["code"]) == (507, "host.disk_full")
            refused += 1
            if refused == 3:
                break
    print(f"{refused} refused after {number} changes")
    assert small.running
    assert refused, "the database never noticed that the disk is full"
    filler.free()
    small.api.call("PATCH", box.path, json={"ttl_seconds": 77})
    assert box.refresh()["ttl_seconds"] == 77
    box.delete()
    truth.check(small)
