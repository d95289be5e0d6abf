"""One disk of many layers, one memory of a base and pages."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.host.confined import Confined
from cloche_server.host.files import allocated_bytes
from cloche_server.host.pages import PAGE, Pages
from cloche_server.storage.flatten import empty_overlay, flatten_disk, flatten_memory, write_sparse
from cloche_server.storage.qcow2 import read_front

MIB = 1024 * 1024


def tool(*words: object) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout


def content(path: Path) -> bytes:
    raw = path.with_name("content.raw")
    tool("qemu-img", "convert", "-f", "qcow2", "-O", "raw", path, raw)
    return raw.read_bytes()


async def test_a_disk_of_layers_of_several_sizes(tmp_path: Path) -> None:
    """Written, overwritten, zeroed and discarded, and grown on the way; below it is the image and nothing else."""
    image, layers = tmp_path / "images/i/rootfs.raw", tmp_path / "data/layers"
    image.parent.mkdir(parents=True)
    layers.mkdir(parents=True)
    image.write_bytes(os.urandom(4 * MIB) + bytes(4 * MIB))
    commands = [
        ["write -P 1 0 64k", "write -P 2 1M 1M"],
        ["write -P 3 1M 64k", "write -z 128k 64k", "write -P 4 7M 1M"],
        ["discard 1M 64k", "write -P 5 10M 64k", "write -z 7M 128k"],
    ]
    below, below_format = "../../images/i/rootfs.raw", "raw"
    for number, (todo, size) in enumerate(zip(commands, (8, 8, 12), strict=True)):
        path = layers / f"{number}.qcow2"
        tool("qemu-img", "create", "-q", "-f", "qcow2", "-b", below, "-F", below_format, path, size * MIB)
        tool("qemu-io", "-f", "qcow2", *(word for one in todo for word in ("-c", one)), path)
        below, below_format = path.name, "qcow2"
    staged = tmp_path / "templates" / ".staging"
    staged.mkdir(parents=True)
    await flatten_disk(Confined("qemu-img", tmp_path, None), layers / "2.qcow2", image, staged / "disk.qcow2", 12 * MIB)
    front = read_front(staged / "disk.qcow2")
    assert (front.backing, front.backing_format, front.size) == ("../../images/i/rootfs.raw", "raw", 12 * MIB)
    expected = content(layers / "2.qcow2")
    for path in layers.glob("*.qcow2"):
        path.unlink()
    final = staged.rename(tmp_path / "templates" / "t-1")
    assert content(final / "disk.qcow2") == expected
    assert allocated_bytes(final / "disk.qcow2") < 4 * MIB, "what is in the image is not in it once more"
    await empty_overlay(final / "overlay.qcow2", "../../templates/t-1/disk.qcow2", 12 * MIB)
    assert content(final / "overlay.qcow2") == expected


RUNS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=8)
KINDS = st.lists(st.sampled_from([None, 0, 1, 7]), min_size=64, max_size=64)


@settings(max_examples=60, deadline=None)
@given(KINDS, RUNS, st.data())
def test_memory_is_the_base_with_pages_over_it(kinds: list[int | None], gaps: list[Any], data: st.DataObject) -> None:
    runs, at = [], 0
    for gap, count in gaps:
        first = at + gap + 1
        if first + count > 64:
            break
        runs.append((first, count))
        at = first + count
    total = sum(count for _, count in runs)
    fill = data.draw(st.lists(st.sampled_from([0, 3]), min_size=total, max_size=total))
    raw = b"".join(bytes([value]) * PAGE for value in fill)
    expected = bytearray(b"".join(bytes([kind or 0]) * PAGE for kind in kinds))
    position = 0
    for first, count in runs:
        expected[first * PAGE : (first + count) * PAGE] = raw[position * PAGE : (position + count) * PAGE]
        position += count
    with tempfile.TemporaryDirectory() as root:
        base, target = Path(root) / "base", Path(root) / "mem"
        with base.open("wb") as file:
            file.truncate(64 * PAGE)
            for number, kind in enumerate(kinds):
                if kind is not None:
                    os.pwrite(file.fileno(), bytes([kind]) * PAGE, number * PAGE)
        flatten_memory(base, Pages(runs, memoryview(bytearray(raw))), 64 * PAGE, target, threading.Event())
        assert target.read_bytes() == expected


def test_zeros_take_no_room(tmp_path: Path) -> None:
    pages = Pages([(0, 512), (1000, 8)], memoryview(bytearray(bytes(512 * PAGE) + b"x" * 8 * PAGE)))
    flatten_memory(None, pages, 8 * MIB, tmp_path / "mem", threading.Event())
    assert (tmp_path / "mem").stat().st_size == 8 * MIB
    assert allocated_bytes(tmp_path / "mem") <= 64 * 1024


def test_it_can_be_ended(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(InterruptedError):
        flatten_memory(None, Pages([(0, 1)], memoryview(bytearray(PAGE))), MIB, tmp_path / "mem", stop)


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 77])
def test_a_last_page_that_is_not_whole(tmp_path: Path, size: int) -> None:
    raw = b"\0" * min(size, PAGE) + b"y" * max(0, size - PAGE)
    with (tmp_path / "f").open("xb", buffering=0) as file:
        os.ftruncate(file.fileno(), size)
        written = write_sparse(file.fileno(), raw, 0)
    assert (tmp_path / "f").read_bytes() == raw
    assert written == max(0, size - PAGE)
