"""Starts that cannot succeed end with one sentence; sandboxes are never lost by them."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import subprocess
from collections.abc import Callable

import pytest

from kit import truth
from kit.schedule import some
from kit.server import COMMAND, Server, environment

pytestmark = pytest.mark.slow


def serve(server: Server, *flags: str) -> str:
    """What a `serve` that must fail says: one sentence, exit code 1, soon."""
    # No port that servers of other tests may have: what is told shall be what is wrong here.
    usual = ("--port", "0", "--preview-port", "0", "--pool-warm", "0", "--pool-launched", "0")
    done = subprocess.run(
        [COMMAND, "serve", "--data", server.data, *usual, *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        env=environment(),
        check=False,
    )
    assert done.returncode == 1, f"{done.returncode}: {done.stderr}{done.stdout}"
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("cloche-server: ")]
    assert len(said) == 1, done.stderr
    return said[0]


@pytest.fixture
def with_box(new_server: Callable[..., Server]) -> Server:
    """A server that was killed, with one sandbox that runs on."""
    server = new_server(pool_launched=0, pool_warm=0)
    server.api.create()
    server.kill()
    return server


def goes_on(server: Server) -> None:
    server.start()
    items = server.api.list()
    assert len(items) == 1
    box = server.api.attach(items[0]["id"])
    truth.usable(box)
    truth.check(server)


def test_a_second_server_on_the_same_data(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_launched=0, pool_warm=0)
    box = server.api.create()
    said = serve(server)
    assert str(server.pid) in said
    assert "stop" in said
    truth.usable(box)
    truth.check(server)


def test_a_port_that_is_taken(with_box: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = serve(with_box, "--port", str(taken.getsockname()[1]))
    assert "--port" in said
    assert "in use" in said.lower()
    goes_on(with_box)


def _damage_header(server: Server) -> None:
    with (server.data / "cloche.db").open("r+b") as file:
        file.write(b"garbage " * 16)


def _damage_pages(server: Server) -> None:
    size = (server.data / "cloche.db").stat().st_size
    with (server.data / "cloche.db").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))


def _truncate(server: Server) -> None:
    with (server.data / "cloche.db").open("r+b") as file:
        file.truncate(6000)


def _empty(server: Server) -> None:
    with (server.data / "cloche.db").open("r+b") as file:
        file.truncate(0)


def _remove(server: Server) -> None:
    (server.data / "cloche.db").unlink()


@pytest.mark.parametrize("damage", some([_damage_header, _damage_pages, _truncate, _empty, _remove]))
def test_a_damaged_database(with_box: Server, damage: Callable[[Server], None]) -> None:
    """No sandbox is taken for an orphan because its record cannot be read."""
    database = with_box.data / "cloche.db"
    # A clean file, so that the log beside it does not heal what is damaged here.
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    for name in ("cloche.db-wal", "cloche.db-shm"):
        (with_box.data / name).unlink(missing_ok=True)
    shutil.copy(database, with_box.data / "copy")
    machines = with_box.machines()
    damage(with_box)
    said = serve(with_box)
    assert "cloche.db" in said
    assert with_box.machines() == machines, "what runs, runs on"
    for name in ("cloche.db", "cloche.db-wal", "cloche.db-shm"):
        (with_box.data / name).unlink(missing_ok=True)
    shutil.copy(with_box.data / "copy", database)
    goes_on(with_box)


def test_a_newer_database(with_box: Server) -> None:
    connection = sqlite3.connect(with_box.data / "cloche.db")
    (current,) = connection.execute("PRAGMA user_version").fetchone()
    connection.execute("PRAGMA user_version = 999")
    connection.commit()
    said = serve(with_box)
    assert "999" in said
    assert "newer" in said
    assert len(with_box.machines()) == 1
    connection.execute(f"PRAGMA user_version = {current}")
    connection.commit()
    connection.close()
    goes_on(with_box)


def test_a_read_only_data_directory(with_box: Server) -> None:
    data = with_box.data
    done = subprocess.run(["mount", "--bind", data, data], check=False, capture_output=True)
    if done.returncode:
        pytest.skip("MOUNT IS NOT ALLOWED: nothing proves what happens on a read-only disk")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", data], check=True)
        said = serve(with_box)
        assert "read-only" in said.lower()
    finally:
        subprocess.run(["umount", "-l", data], check=True)
    goes_on(with_box)


def test_no_qemu(with_box: Server) -> None:
    assert "qemu" in serve(with_box, "--qemu", "/nowhere/qemu-system-x86_64")
    goes_on(with_box)


def test_a_data_path_that_is_a_file(with_box: Server) -> None:
    (with_box.data / "run" / "file").write_text("")
    done = subprocess.run(
        [COMMAND, "serve", "--data", with_box.data / "run" / "file", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    goes_on(with_box)
