"""A server on a disk of its own that a test can fill."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import data as test_data
from kit.server import DEFAULTS, Server

MIB = 1024 * 1024


@contextlib.contextmanager
def small_server(baked: Path) -> Iterator[Server]:
    """A server whose data directory is on an ext4 file system of its own, with 300 MiB to spare."""
    work = Path(tempfile.mkdtemp(prefix="cl-disk-", dir="/var/tmp"))
    data = test_data.make(baked)
    used = int(subprocess.check_output(["du", "-sm", data]).split()[0])
    image, mount = work / "disk", work / "m"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate((used + 400) * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1", image], check=True)
    done = subprocess.run(["mount", "-o", "loop", image, mount], check=False, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(work)
        test_data.remove(data)
        pytest.skip(f"NO LOOP DEVICE: nothing proves what happens on a full disk ({done.stderr.strip()})")
    server = None
    try:
        subprocess.run(["cp", "-a", "--sparse=always", f"{data}/.", mount], check=True)
        (mount / "lost+found").rmdir()
        room = {"pool_launched": 0, "pool_warm": 0, "disk_reserve_mb": 0, "disk_overcommit": 1000}
        server = Server(data, {**DEFAULTS, **room})
        server.data, server.log = mount, work / "server.log"
        server.start()
        yield server
    finally:
        if server is not None:
            if server.running:
                truth_at_end = server.stop(sandboxes=True)
                print(truth_at_end)
            server._close_api()
        subprocess.run(["umount", "-l", mount], check=False)
        test_data.remove(data)
        shutil.rmtree(work, ignore_errors=True)


class Filler:
    """A file that takes what is left of a disk."""

    def __init__(self, data: Path) -> None:
        self.path = data / "filler"

    def fill(self, leave: int = 0) -> None:
        with self.path.open("ab") as file:
            free = shutil.disk_usage(self.path.parent).free - leave
            if free > 0:
                subprocess.run(["fallocate", "-l", str(self.path.stat().st_size + free), self.path], check=False)
            file.seek(0, 2)
            size = MIB
            while size >= 1024 and shutil.disk_usage(self.path.parent).free > leave:
                try:
                    file.write(b"x" * size)
                    file.flush()
                except OSError:
                    size //= 2
                    file = self.path.open("ab")

    def free(self) -> None:
        self.path.unlink(missing_ok=True)
