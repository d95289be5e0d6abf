"""Disks from strangers: the plain overlays that Cloche writes are let through, and nothing that names another file."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from cloche_server.host.confined import Confined
from cloche_server.storage.flatten import check_disk
from cloche_server.storage.layers import make_overlay
from cloche_server.storage.layers import read_header as read_layer
from cloche_server.storage.qcow2 import read_front, rename_backing

MIB = 1024 * 1024


def qemu_img(*words: object) -> None:
    subprocess.run(["qemu-img", *map(str, words)], check=True, capture_output=True)


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    path = tmp_path / "disk.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", "below.qcow2", "-F", "qcow2", path, 64 * MIB)
    return path


def tool_of(path: Path) -> Confined:
    return Confined("qemu-img", path.parent, None)


def patch(path: Path, at: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(raw)


def test_what_qemu_and_we_write_is_read(overlay: Path, tmp_path: Path) -> None:
    front = read_front(overlay)
    assert (front.backing, front.backing_format, front.size) == ("below.qcow2", "qcow2", 64 * MIB)
    make_overlay(overlay, tmp_path / "ours", "x" * 20 + ".qcow2", 32 * MIB)
    front = read_front(tmp_path / "ours")
    assert (front.backing, front.size) == ("x" * 20 + ".qcow2", 32 * MIB)


@pytest.mark.parametrize("name", ["a.qcow2", "../templates/import-" + "z" * 20 + "/disk.qcow2", "n" * 400])
async def test_the_name_below_is_written_anew(overlay: Path, name: str) -> None:
    qemu_before = read_front(overlay)
    rename_backing(overlay, name)
    after = read_front(overlay)
    assert after.backing == read_layer(overlay).backing == name
    assert (after.size, after.backing_format) == (qemu_before.size, "qcow2")
    info = subprocess.run(["qemu-img", "info", "-f", "qcow2", overlay], check=True, capture_output=True, text=True)
    assert f"backing file: {name}" in info.stdout
    assert await check_disk(tool_of(overlay), overlay) is None


def test_a_name_that_does_not_fit(overlay: Path) -> None:
    with pytest.raises(ValueError, match="too long"):
        rename_backing(overlay, "n" * 1100)


@pytest.mark.parametrize(
    "options",
    [
        ["-o", "data_file=DIR/data,data_file_raw=off"],
        ["-o", "compat=0.10"],
        ["-o", "extended_l2=on"],
        ["-o", "compression_type=zstd"],
        ["-o", "lazy_refcounts=on"],
        ["--object", "secret,id=s,data=abc", "-o", "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"],
    ],
)
def test_features_that_we_do_not_use(tmp_path: Path, options: list[str]) -> None:
    path = tmp_path / "disk.qcow2"
    words = [word.replace("DIR", str(tmp_path)) for word in options]
    over = ["-u", "-b", "below.qcow2", "-F", "qcow2"] if "data_file" not in words[1] else []
    qemu_img("create", "-q", "-f", "qcow2", *words, *over, path, 64 * MIB)
    with pytest.raises(ValueError):
        read_front(path)


def test_snapshots_and_bitmaps_inside(overlay: Path, tmp_path: Path) -> None:
    flat, marked = tmp_path / "flat.qcow2", tmp_path / "marked.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", tmp_path / "below.qcow2", 64 * MIB)
    marked.write_bytes(overlay.read_bytes())
    qemu_img("bitmap", "--add", "-f", "qcow2", marked, "b0")
    with pytest.raises(ValueError):
        read_front(marked)
    qemu_img("snapshot", "-c", "one", overlay)
    with pytest.raises(ValueError, match="internal snapshots"):
        read_front(overlay)
    qemu_img("create", "-q", "-f", "qcow2", flat, 64 * MIB)
    with pytest.raises(ValueError):
        read_front(flat)


@pytest.mark.parametrize(
    ("at", "raw"),
    [
        (0, b"\0"),
        (4, struct.pack(">I", 4)),
        (8, struct.pack(">Q", 0)),
        (8, struct.pack(">Q", 1 << 40)),
        (8, struct.pack(">Q", 40)),
        (16, struct.pack(">I", 2000)),
        (20, struct.pack(">I", 8)),
        (20, struct.pack(">I", 30)),
        (24, struct.pack(">Q", 1 << 60)),
        (24, struct.pack(">Q", 0)),
        (32, struct.pack(">I", 1)),
        (36, struct.pack(">I", 0xFFFFFFFF)),
        (40, struct.pack(">Q", 8)),
        (40, struct.pack(">Q", 1 << 50)),
        (48, struct.pack(">Q", 0)),
        (60, struct.pack(">I", 1)),
        (72, struct.pack(">Q", 1 << 2)),
        (80, struct.pack(">Q", 1)),
        (88, struct.pack(">Q", 2)),
        (96, struct.pack(">I", 7)),
        (100, struct.pack(">I", 1 << 16)),
        (112, struct.pack(">I", 0x44415441)),
        (116, struct.pack(">I", 0xFFFFFF)),
    ],
)
def test_a_front_that_is_not_possible(overlay: Path, at: int, raw: bytes) -> None:
    patch(overlay, at, raw)
    with pytest.raises(ValueError):
        read_front(overlay)


async def test_damaged_tables_are_noticed_and_nothing_below_is_opened(overlay: Path) -> None:
    assert await check_disk(tool_of(overlay), overlay) is None, "although the file below does not exist"
    front = overlay.read_bytes()
    l1 = struct.unpack_from(">Q", front, 40)[0]
    patch(overlay, l1, struct.pack(">Q", (1 << 63) | 0x123456789000))
    read_front(overlay)
    assert await check_disk(tool_of(overlay), overlay) == "has damaged tables"
