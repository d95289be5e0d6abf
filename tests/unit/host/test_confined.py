"""A program over files of strangers: really jailed, bounded, and nothing of it left."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.engine.qemu.wall import find_tool_root
from cloche_server.host import cgroups
from cloche_server.host.cgroups import Groups
from cloche_server.host.confined import Bounds, Cell, Confined
from cloche_server.host.jail import Launcher
from cloche_server.host.uids import UidBlock, used_uids
from cloche_server.storage import flatten
from cloche_server.storage.flatten import check_disk, flatten_disk
from cloche_server.storage.qcow2 import read_front

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(os.geteuid() != 0, reason="builds jails")]

MIB = 1024 * 1024
BOUNDS = Bounds(20, 10, 256, 1)
#: Of no server: far below what one gives out by default.
FIRST = 1_000_000_000


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[Cell]:
    run = tmp_path / "run"
    run.mkdir()
    launcher, groups = Launcher(), Groups(cgroups.probe(), f"test-{os.getpid()}")
    block = UidBlock(FIRST, FIRST, run)
    yield Cell(launcher, await find_tool_root("/usr/bin/bash"), block, groups, tmp_path / "root")
    launcher.close()
    assert not used_uids(block)
    assert groups.machines() == set()
    groups.remove_all()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data/layers").mkdir(parents=True)
    (tmp_path / "data/layers/mine").write_text("mine")
    (tmp_path / "data/layers/other").write_text("other")
    (tmp_path / "data").chmod(0o700)
    return tmp_path / "data"


async def sh(cell: Cell, data: Path, script: str, bounds: Bounds = BOUNDS, writes: Path | None = None) -> str:
    tool = Confined("bash", data, cell)
    done = await tool.run(["-c", script], reads=[data / "layers/mine"], writes=writes, bounds=bounds)
    assert not done.stdout
    return f"{done.returncode} {done.stderr.decode()}"


async def test_it_sees_its_files_and_nothing_else(cell: Cell, data: Path) -> None:
    out = data / "layers/out"
    out.touch()
    told = await sh(
        cell,
        data,
        "read -r x < /data/layers/mine; echo $x; cd /; echo * data/layers/*; echo $UID $$; echo done > data/layers/out;"
        "echo no > data/layers/mine; echo no > /x; read -r y < /etc/passwd; exec 3<>/dev/tcp/127.0.0.1/1",
        writes=out,
    )
    lines = told.splitlines()
    assert lines[0] == "1 mine"
    assert {"data/layers/mine", "data/layers/out"} <= set(lines[1].split())
    assert not {"proc", "sys", "etc", "data/layers/other"} & set(lines[1].split())
    assert lines[2] == f"{FIRST + 1} 1"
    for number, why in enumerate(("Read-only|denied", "Read-only|denied", "No such file", "not supported|denied")):
        assert any(word in lines[3 + number] for word in why.split("|")), lines[3 + number]
    assert out.read_text() == "done\n"
    status = out.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (0, 0, 0o600)
    assert (data / "layers/mine").read_text() == "mine"
    assert (data / "layers/mine").stat().st_uid == 0


async def test_processor_memory_files_and_processes_have_bounds(cell: Cell, data: Path) -> None:
    assert (await sh(cell, data, "while :; do :; done", replace(BOUNDS, cpu_seconds=1))).startswith("-9")
    double = "x=0123456789abcdef; while :; do x=$x$x; done"
    assert not (await sh(cell, data, f"{double}; echo all of it", replace(BOUNDS, memory_mb=32))).startswith("0")
    out = data / "layers/out"
    out.touch()
    await sh(cell, data, "printf '%2000000d' 1 > /data/layers/out", writes=out)
    assert out.stat().st_size <= BOUNDS.file_mb * MIB
    flood = "for i in {1..60000}; do echo $i $i $i; done; exit 4"
    told = await sh(cell, data, flood)
    assert told.startswith("4 ")
    assert told.endswith("60000 60000 60000\n")
    assert len(told) < 70_000


async def test_it_ends_in_time_and_when_nobody_waits(cell: Cell, data: Path) -> None:
    with pytest.raises(TimeoutError):
        await sh(cell, data, "while :; do :; done", replace(BOUNDS, seconds=0.3))
    assert not used_uids(cell.uids)
    out = data / "layers/out"
    out.touch()
    task = asyncio.ensure_future(sh(cell, data, "while :; do :; done", writes=out))
    while not used_uids(cell.uids):
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert not used_uids(cell.uids)
    assert out.stat().st_uid == 0


async def test_what_is_missing_is_told_and_leaves_nothing(cell: Cell, data: Path) -> None:
    (data / "layers/mine").unlink()
    with pytest.raises(FileNotFoundError):
        await sh(cell, data, "true", writes=data / "layers/other")
    assert (data / "layers/other").stat().st_uid == 0
    with pytest.raises(ClocheError, match="not installed"):
        await Confined("no-such-program", data, cell).run([], reads=[], bounds=BOUNDS)


async def test_disks_are_read_in_there(cell: Cell, data: Path) -> None:
    """What a snapshot stands on becomes one disk, and a disk that names a file of the host gets nothing of it."""

    def make(path: Path, below: str, kind: str, *commands: str) -> Path:
        qemu = ["qemu-img", "create", "-q", "-f", "qcow2", "-u", "-b", below, "-F", kind, path, str(8 * MIB)]
        subprocess.run(qemu, check=True)
        for command in commands:
            subprocess.run(["qemu-io", "-f", "qcow2", "-c", command, path], check=True, capture_output=True)
        return path

    cell = replace(cell, root=await find_tool_root("/usr/bin/qemu-img"))
    tool = Confined("qemu-img", data, cell)
    for part in ("images/i", "templates/t", "templates/.staging"):
        (data / part).mkdir(parents=True)
    image = data / "images/i/rootfs.raw"
    image.write_bytes(os.urandom(MIB) + bytes(7 * MIB))
    make(data / "templates/t/disk.qcow2", "../../images/i/rootfs.raw", "raw", "write -P 1 2M 1M")
    make(data / "layers/a.qcow2", "../templates/t/disk.qcow2", "qcow2", "write -P 2 3M 64k")
    top = make(data / "layers/b.qcow2", "a.qcow2", "qcow2", "write -P 3 2M 64k")
    target = data / "templates/.staging/disk.qcow2"
    await flatten_disk(tool, top, image, target, 8 * MIB)
    for file in (data / "layers/a.qcow2", top):
        file.unlink()
    wanted = ["read -P 3 2M 64k", "read -P 1 2112k 64k", "read -P 2 3M 64k", "read -P 0 7M 64k"]
    words = [word for one in wanted for word in ("-c", one)]
    read = subprocess.run(["qemu-io", "-r", "-f", "qcow2", *words, target], check=True, capture_output=True, text=True)
    assert "Pattern verification failed" not in read.stdout
    assert await check_disk(tool, target) is None
    with target.open("r+b") as file:
        file.seek(40)
        at = int.from_bytes(file.read(8), "big")
        file.seek(at)
        file.write(((1 << 63) | 0x123456789000).to_bytes(8, "big"))
    assert await check_disk(tool, target) == "has damaged tables"


async def test_a_disk_that_takes_too_long_to_check_is_given_up(
    cell: Cell, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 9 MiB: every entry of a large first table leads to one and the same second table."""
    path, size, cluster = data / "layers/hostile.qcow2", 32 << 30, 512
    words = ["qemu-img", "create", "-q", "-f", "qcow2", "-u", "-o", "cluster_size=512", "-b", "x", "-F", "qcow2"]
    subprocess.run([*words, path, str(size)], check=True)
    entries = size // (cluster * cluster // 8)
    end = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(40)
        at = int.from_bytes(file.read(8), "big")
        file.seek(at)
        file.write(((1 << 63) | end).to_bytes(8, "big") * entries)
        file.seek(end)
        file.write(((1 << 63) | end).to_bytes(8, "big") * (cluster // 8))
    assert read_front(path).size == size
    monkeypatch.setattr(flatten, "_CHECK_CPU", 1)
    cell = replace(cell, root=await find_tool_root("/usr/bin/qemu-img"))
    wrong = await check_disk(Confined("qemu-img", data, cell), path)
    assert wrong is not None
    assert "takes more time" in wrong
