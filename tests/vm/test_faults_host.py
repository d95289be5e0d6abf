"""Faults of the host under a running server: no descriptors, no QEMU, damaged templates."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kit import data as test_data
from kit import truth
from kit.schedule import some
from kit.server import Server
from kit.until import Watch, until

# ---------------------------------------------------------------- descriptors


def test_no_descriptors_left(new_server: Callable[..., Server]) -> None:
    """Calls are refused with a sentence, nothing leaks, and all is well as soon as there are some again."""
    server = new_server(pool_launched=1, pool_warm=1)
    box = server.api.create()
    pid = server.pid
    usual = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    for spare in (1, 3, 6, 9):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (usual + spare, hard))
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda _: _create(server), range(4)))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        for status, text in answers:
            assert status in {0, 201, 500, 503}, text
            assert "Errno" not in text
        assert server.running, server.log_tail()
        for item in server.api.list():
            if item["id"] != box.id:
                server.api.delete(item["id"])
        truth.check(server, 60)
        truth.usable(box)
    until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= usual + 12, 30)  # noqa: PTH208 - connections of this test
    truth.whole(server)


def _create(server: Server) -> tuple[int, str]:
    import httpx

    try:
        response = httpx.post(
            f"{server.url}/v1/sandboxes",
            json={},
            headers={"Authorization": f"Bearer {server.token}"},
            timeout=60,
            trust_env=False,
        )
    except httpx.TransportError as error:
        return 0, repr(error)[:0]
    return response.status_code, response.text


# ---------------------------------------------------------------- QEMU


@pytest.fixture
def wrapped(new_server: Callable[..., Server]) -> Iterator[Callable[[str], Server]]:
    """A server whose QEMU is a script that the test writes."""

    def make(script: str) -> Server:
        server = new_server(start=False, pool_launched=0, pool_warm=0)
        path = server.data / "qemu"
        real = shutil.which("qemu-system-x86_64")
        path.write_text(f'#!/bin/sh\nREAL={real}\ncase "$*" in *--version*) exec $REAL --version;; esac\n{script}\n')
        path.chmod(0o755)
        server.settings["qemu"] = path
        server.settings["jail"] = "off"  # there is no shell in it for the script
        server.start()
        return server

    return make


@pytest.mark.parametrize(
    ("script", "seconds"),
    [
        ("exit 1", 15),
        ("echo cannot allocate >&2; exit 1", 15),
        ("kill -SEGV $$", 15),
        ("exec sleep 1000", 60),
        ("exec $REAL -machine none -nodefaults -display none", 60),
    ],
)
@pytest.mark.slow
def test_a_qemu_that_does_not_work(wrapped: Callable[[str], Server], script: str, seconds: float) -> None:
    server = wrapped(script)
    watch = Watch()
    response = server.api.request("POST", "/v1/sandboxes", json={})
    assert watch.seconds < seconds
    assert (response.status_code, response.json()["code"]) == (500, "sandbox.boot_failed"), response.text
    if "allocate" in script:
        assert "cannot allocate" in str(response.json()["details"])
    truth.check(server)
    assert server.directories() == set()
    (server.data / "qemu").write_text('#!/bin/sh\nexec qemu-system-x86_64 "$@"\n')
    truth.whole(server)


def test_a_qemu_that_goes_away(wrapped: Callable[[str], Server]) -> None:
    """Uninstalled while the server runs: creates say so, what runs goes on."""
    server = wrapped('exec $REAL "$@"')
    box = server.api.create()
    (server.data / "qemu").rename(server.data / "qemu.away")
    response = server.api.request("POST", "/v1/sandboxes", json={})
    assert response.status_code == 500
    assert "not installed" in response.json()["error"]
    truth.usable(box)
    (server.data / "qemu.away").rename(server.data / "qemu")
    truth.whole(server)
    truth.usable(box)


# ---------------------------------------------------------------- templates


def _base(server: Server) -> Path:
    return max(server.data.glob("templates/base-1c256m-*"), key=lambda path: (path / "meta.json").stat().st_mtime)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))


@pytest.fixture(scope="module")
def damaged(baked: Path) -> Iterator[Server]:
    server = Server.make(baked, pool_launched=1, pool_warm=1)
    try:
        for name in ("mem", "dev", "disk.qcow2", "overlay.qcow2", "meta.json"):
            test_data.unshare(_base(server) / name)
        server.start()
        yield server
        truth.check(server)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("name", "damage"),
    some(
        [
            ("mem", _truncate),
            ("mem", _flip),
            ("mem", Path.unlink),
            ("dev", _truncate),
            ("dev", _flip),
            ("dev", Path.unlink),
            ("disk.qcow2", Path.unlink),
            ("disk.qcow2", _flip),
            ("overlay.qcow2", _truncate),
            ("overlay.qcow2", _flip),
            ("overlay.qcow2", Path.unlink),
        ]
    ),
)
def test_a_damaged_template(damaged: Server, name: str, damage: Callable[[Path], None]) -> None:
    """Found before anything is made of it; told; healed by the right file. What runs goes on."""
    # Whoever runs keeps the file as it was: the damaged one takes its name.
    box = damaged.api.create()
    path = _base(damaged) / name
    good = path.with_name(name + ".good")
    path.rename(good)
    subprocess.run(["cp", "-p", "--sparse=always", good, path], check=True)
    path.chmod(0o600)
    os.utime(path, (1, 1))
    damage(path)
    watch = Watch()
    for _ in range(2):
        response = damaged.api.request("POST", "/v1/sandboxes", json={})
        assert (response.status_code, response.json()["code"]) == (500, "template.corrupt"), response.text
        assert "damaged" in response.json()["error"]
        assert "template bake base" in response.json()["error"]
    assert watch.seconds < 60
    truth.usable(box)
    until(lambda: set(damaged.machines()) == {box.id}, 60)  # the pools hold nothing of a damaged template
    truth.check(damaged)
    path.unlink(missing_ok=True)
    good.rename(path)
    new = damaged.api.create()
    truth.usable(box, new)
    for each in (box, new):
        each.delete()


@pytest.mark.slow
def test_baking_again_heals(damaged: Server) -> None:
    """While the server runs: no restart, and the pools come back."""
    box = damaged.api.create()
    path = _base(damaged) / "dev"
    path.unlink()
    path.write_bytes(b"no device state")
    assert damaged.api.request("POST", "/v1/sandboxes", json={}).json()["code"] == "template.corrupt"
    done = damaged.cli_raw("template", "bake", "base")
    assert done.returncode == 0, done.stderr
    assert "has another size" in done.stderr or "damaged" in done.stderr
    new = damaged.api.create()
    truth.usable(box, new)
    until(lambda: len(damaged.machines()) == 4, 90)
    for each in (box, new):
        each.delete()
    truth.check(damaged)


def test_no_kernel(new_server: Callable[..., Server]) -> None:
    """Sandboxes need none; a new size does, and says so. Nothing of the bake stays."""
    server = new_server(pool_launched=0, pool_warm=0)
    test_data_kernels = server.data / "kernels"
    test_data_kernels.rename(server.data / "kernels.away")
    truth.whole(server)
    response = server.api.request("POST", "/v1/sandboxes", json={"memory_mb": 320}, timeout=120)
    assert response.status_code == 500
    assert response.json()["code"] == "template.bake_failed", response.text
    assert response.json()["error"]
    time.sleep(0.5)
    truth.check(server)
    assert server.api.list() == []
    (server.data / "kernels.away").rename(test_data_kernels)
