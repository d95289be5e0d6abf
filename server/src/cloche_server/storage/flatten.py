"""One flat disk and one flat memory, made of what a snapshot stands on.

The disk keeps the root image below it: nobody writes to that, all sandboxes share its pages in the page cache, and a
flat copy would take several times the room.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import Pages
from cloche_server.host import files, overlay, process
from cloche_server.host.confined import Bounds, Confined
from cloche_server.host.pages import PAGE
from cloche_server.storage.qcow2 import read_front
from cloche_server.telemetry import log

_log = log.get("flatten")

_CHUNK: Final = 1 << 20
_ZEROS: Final = bytes(_CHUNK)
_ZERO_PAGE: Final = bytes(PAGE)
_MIB: Final = 1024 * 1024
#: Copying some gigabytes between slow disks; a check reads tables only.
_FLATTEN_SECONDS, _FLATTEN_CPU = 3600.0, 1800
_CHECK_SECONDS, _CHECK_CPU = 300.0, 60
#: Tables of a disk of terabytes take 32 MiB; the rest is for what waits to be written.
_MEMORY_MB: Final = 512
_BEYOND: Final = "ends the program that reads it, or takes more time, processor or memory than it may have"

Span = tuple[int, int]


async def flatten_disk(tool: Confined, top: Path, image: Path, target: Path, size: int) -> None:
    """Writes what lies over the raw `image`, down from the layer `top`, as one qcow2 file of `size` bytes over that
    image. Raises `host.disk_full`, `internal`, `snapshot.corrupt`; OSError and ValueError for a layer that names what
    it must not, because a machine has written to its layers."""
    chain = await asyncio.to_thread(_judged, top)
    await _create("-b", _seen_from(target, top), target, str(size))
    below = _seen_from(target, image)
    bounds = Bounds(_FLATTEN_SECONDS, _FLATTEN_CPU, _MEMORY_MB, size // _MIB + size // _MIB // 50 + 64)
    # Not unsafe: it reads what differs from the image, and only that.
    words = ["rebase", "-q", "-f", "qcow2", "-F", "raw", "-b", below, tool.name(target)]
    try:
        done = await tool.run(words, reads=[*chain, image], writes=target, bounds=bounds)
    except TimeoutError:
        raise ClocheError("internal", f"the disk could not be written within {_FLATTEN_SECONDS:g} s") from None
    if done.returncode < 0:
        raise ClocheError("snapshot.corrupt", f"the disk of the snapshot cannot be read: {_BEYOND}")
    if done.returncode:
        raise process.failure(["qemu-img", *words], done, "internal", process.describe(done.returncode))


def _judged(top: Path) -> list[Path]:
    chain = overlay.chain(top)
    for path in chain:
        if path.parent == top.parent:
            read_front(path)
    return chain


async def empty_overlay(target: Path, backing: str, size: int) -> None:
    """An empty overlay over a qcow2 file whose name is relative to where the overlay will lie, and that need not be
    there yet."""
    await _create("-b", backing, target, str(size))


async def _create(*words: str | Path) -> None:
    """Opens no file below, so nothing that a stranger has written."""
    await process.run(["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", *words], timeout=60)


def _seen_from(file: Path, other: Path) -> str:
    """A name that stays true when the data directory is moved as a whole."""
    return os.path.relpath(other, file.parent)


async def check_disk(tool: Confined, path: Path) -> str | None:
    """What is wrong with the tables of a qcow2 file, to be read after "a disk in it"; None when they are sound. Nothing
    but this file is opened, whatever it says of others. Raises OSError, `host.unsupported`, `internal`."""
    name = {"driver": "qcow2", "backing": None, "file": {"driver": "file", "filename": tool.name(path)}}
    bounds = Bounds(_CHECK_SECONDS, _CHECK_CPU, _MEMORY_MB, 1)
    try:
        done = await tool.run(["check", "-q", "json:" + json.dumps(name)], reads=[path], bounds=bounds)
    except TimeoutError:
        return _BEYOND
    if done.returncode in {0, 3}:  # 3: clusters that nobody uses, which a machine that was killed leaves
        return None
    _log.info("check.failed", code=done.returncode, output=done.stderr[-500:].decode("utf-8", "replace"))
    return _BEYOND if done.returncode < 0 else "has damaged tables"


def flatten_memory(base: Path | None, pages: Pages, size: int, target: Path, stop: threading.Event) -> None:
    """Writes a memory of `size` bytes: that of the file `base` (None: zeros) with `pages` laid over, zeros as holes.
    Blocking; ends with `InterruptedError` soon after `stop` is set. Raises OSError."""
    with target.open("xb", buffering=0) as file:
        os.ftruncate(file.fileno(), size)
        if base is not None:
            with base.open("rb", buffering=0) as source:
                for start, end in _apart(_data(source.fileno(), size), pages.runs):
                    _copy(source.fileno(), file.fileno(), start, end, stop)
        at = 0
        for first, count in pages.runs:
            for offset in range(0, count * PAGE, _CHUNK):
                _check(stop)
                length = min(_CHUNK, count * PAGE - offset)
                write_sparse(file.fileno(), pages.data[at + offset : at + offset + length], first * PAGE + offset)
            at += count * PAGE
        os.fsync(file.fileno())


def _data(fd: int, size: int) -> Iterator[Span]:
    for start, end in files.data_ranges(fd):
        yield start - start % PAGE, min(size, -(-end // PAGE) * PAGE)


def _apart(spans: Iterator[Span], runs: tuple[tuple[int, int], ...]) -> Iterator[Span]:
    """What of `spans` no run of pages covers; both ascend."""
    number = 0
    for start, end in spans:
        while start < end:
            while number < len(runs) and sum(runs[number]) * PAGE <= start:
                number += 1
            first, last = (runs[number][0] * PAGE, sum(runs[number]) * PAGE) if number < len(runs) else (end, end)
            if first > start:
                yield start, min(first, end)
            start = last if first < end else end


def _copy(source: int, target: int, start: int, end: int, stop: threading.Event) -> None:
    while start < end:
        _check(stop)
        raw = os.pread(source, min(_CHUNK, end - start), start)
        if not raw:
            raise OSError("the memory became shorter while it was read")
        write_sparse(target, raw, start)
        start += len(raw)


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise InterruptedError


def write_sparse(fd: int, data: bytes | memoryview, at: int) -> int:
    """Writes `data` at `at` of a file that is a hole there, without its pages of zeros. Returns the bytes written."""
    raw = bytes(data)
    if raw == _ZEROS[: len(raw)]:
        return 0
    written, start = 0, 0
    while start < len(raw):
        end = start
        while end < len(raw) and (page := raw[end : end + PAGE]) != _ZERO_PAGE[: len(page)]:
            end += PAGE
        end = min(end, len(raw))
        written += end - start
        while start < end:
            start += os.pwrite(fd, raw[start:end], at + start)
        start += PAGE
    return written
