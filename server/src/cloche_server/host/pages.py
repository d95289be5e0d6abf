"""Pages of the memory of another process: which of a mapping were written, copied out, and written in.

A page of a private file mapping that has been written is anonymous: present or swapped, and not of the file
(Documentation/admin-guide/mm/pagemap.rst of the kernel). `PAGEMAP_SCAN` finds such pages since Linux 6.7; older
kernels are asked page by page. The bytes go through process_vm_readv(2) and process_vm_writev(2).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core import ports

PAGE: Final = 4096
_SCAN: Final = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_SCAN_ARG: Final = struct.Struct("=12Q")
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
_REGIONS: Final = 4096
_VECTORS: Final = 1024  # IOV_MAX
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14
_MAGIC: Final = b"cloche pages 1\n\0"

#: First page and number of pages, ascending and apart.
Run = tuple[int, int]

_libc: Final = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    _call = getattr(_libc, _name)
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


@dataclass(frozen=True, slots=True)
class Region:
    """A mapping in a process. `start` and `length` in bytes."""

    pid: int
    start: int
    length: int


class Pages:
    """Some pages of a memory: `runs`, and their bytes one after the other in `data`."""

    __slots__ = ("_data", "_owner", "_runs")

    def __init__(self, runs: Sequence[Run], data: memoryview, owner: mmap.mmap | None = None) -> None:
        self._runs = tuple(runs)
        self._data = data
        self._owner = owner

    @property
    def runs(self) -> tuple[Run, ...]:
        return self._runs

    @property
    def data(self) -> memoryview:
        return self._data

    @property
    def count(self) -> int:
        return len(self.data) // PAGE

    def close(self) -> None:
        """Gives the memory back; the pages cannot be used any more."""
        self.data.release()
        if self._owner is not None:
            # Parts of it may still be held by the traceback of an error; it goes with them then.
            with contextlib.suppress(BufferError):
                self._owner.close()
            self._owner = None

    def header(self) -> bytes:
        """What stands before the bytes in a file, a whole number of pages."""
        flat = array.array("I")
        for run in self.runs:
            flat.extend(run)
        raw = _MAGIC + struct.pack("=QQ", len(self.runs), self.count) + flat.tobytes()
        return raw + bytes(-len(raw) % PAGE)

    def save(self, path: Path) -> str:
        """Writes a file that `load` reads and fsyncs it. Returns the SHA-256 of all of it, in hex. Blocking."""
        head = self.header()
        digest = hashlib.sha256(head)
        with path.open("xb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(head))
            for at in range(0, len(self.data), 1 << 22):
                part = self.data[at : at + (1 << 22)]
                digest.update(part)
                _write_all(file.fileno(), part)
            os.fsync(file.fileno())
        return digest.hexdigest()


def load(path: Path, memory_pages: int) -> Pages:
    """The pages of a file; they are read when they are used. Raises ValueError when it is not such a file for a
    memory of so many pages."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < PAGE:
            raise ValueError("too short")
        owner = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view = memoryview(owner)
    try:
        runs, start = _parse(view, size, memory_pages)
    except BaseException:
        view.release()
        owner.close()
        raise
    return Pages(runs, view[start:], owner)


def _parse(view: memoryview, size: int, memory_pages: int) -> tuple[list[Run], int]:
    head = len(_MAGIC) + 16
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise ValueError("not a file of pages")
    number, count = struct.unpack("=QQ", view[len(_MAGIC) : head])
    if number > memory_pages or count > memory_pages:
        raise ValueError("more pages than the memory has")
    start = -(-(head + 8 * number) // PAGE) * PAGE
    if size != start + count * PAGE:
        raise ValueError("not of the length its header says")
    flat = array.array("I")
    flat.frombytes(bytes(view[head : head + 8 * number]))
    runs = list(zip(flat[::2], flat[1::2], strict=True))
    at = total = 0
    for first, length in runs:
        if first < at or length == 0 or first + length > memory_pages:
            raise ValueError("runs that overlap or lie outside the memory")
        at, total = first + length, total + length
    if total != count:
        raise ValueError("its runs do not add up")
    return runs, start


def find_region(pid: int, path: Path) -> Region:
    """Where a process has mapped a file from its start. Raises ProcessLookupError, or FileNotFoundError."""
    name = os.fspath(path)
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
    spans = []
    for line in lines:
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5] == name:
            low, high = (int(part, 16) for part in fields[0].split("-"))
            spans.append((int(fields[2], 16), low, high))
    spans.sort()
    # The kernel may show one mapping in several parts.
    if not spans or spans[0][0] != 0 or any(a[2] != b[1] for a, b in itertools.pairwise(spans)):
        raise FileNotFoundError(errno.ENOENT, f"process {pid} has not mapped it as one piece", name)
    return Region(pid, spans[0][1], spans[-1][2] - spans[0][1])


def written(region: Region) -> list[Run]:
    """The pages of a private file mapping that differ from the file, because somebody wrote to them."""
    with Path(f"/proc/{region.pid}/pagemap").open("rb", buffering=0) as pagemap:
        try:
            return list(_merge(_scan(pagemap.fileno(), region)))
        except OSError as error:
            if error.errno not in {errno.ENOTTY, errno.EINVAL}:
                raise
        return list(_merge(_read_pagemap(pagemap.fileno(), region)))


def _merge(runs: Iterator[Run]) -> Iterator[Run]:
    first = count = 0
    for start, length in runs:
        if count and start == first + count:
            count += length
            continue
        if count:
            yield first, count
        first, count = start, length
    if count:
        yield first, count


def _scan(fd: int, region: Region) -> Iterator[Run]:
    vector = (ctypes.c_uint64 * (3 * _REGIONS))()
    at, end = region.start, region.start + region.length
    while at < end:
        where = (_SCAN_ARG.size, 0, at, end, 0, ctypes.addressof(vector), _REGIONS, 0)
        # Not of the file, and present or swapped.
        argument = bytearray(_SCAN_ARG.pack(*where, _FILE, _FILE, _PRESENT | _SWAPPED, 0))
        found = fcntl.ioctl(fd, _SCAN, argument)
        for i in range(0, 3 * found, 3):
            yield (vector[i] - region.start) // PAGE, (vector[i + 1] - vector[i]) // PAGE
        if found < _REGIONS:
            return
        at = vector[3 * found - 2]  # not `walk_end`: some kernels leave it where their own buffer was full before


def _read_pagemap(fd: int, region: Region) -> Iterator[Run]:
    first = region.start // PAGE
    for at in range(0, region.length // PAGE, 1 << 15):
        size = 8 * min(1 << 15, region.length // PAGE - at)
        raw = os.pread(fd, size, 8 * (first + at))
        if len(raw) != size:  # of a process that has ended there is nothing to read, and that is no error
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        entries = array.array("Q", raw)
        for number, entry in enumerate(entries):
            # Bit 63: present, 62: swapped, 61: of a file or shared.
            if entry >> 62 and not entry >> 61 & 1:
                yield at + number, 1


class Room:
    """Memory for `copy_out`, made before the machine stands still: that the kernel clears it first takes as long as
    the copying."""

    def __init__(self, size: int) -> None:
        self.size = max(PAGE, size)
        self.owner: mmap.mmap | None = mmap.mmap(-1, self.size)
        self.owner.madvise(mmap.MADV_HUGEPAGE)
        with contextlib.suppress(OSError):
            self.owner.madvise(_POPULATE_WRITE)

    def take(self, size: int) -> mmap.mmap | None:
        """The memory, if it is large enough; once."""
        if size > self.size:
            return None
        owner, self.owner = self.owner, None
        return owner

    def close(self) -> None:
        if self.owner is not None:
            self.owner.close()
            self.owner = None


def copy_out(region: Region, runs: Sequence[Run], room: Room | None = None) -> Pages:
    """The bytes of `runs`. The process should not be writing to them. Raises OSError. Blocking."""
    size = sum(count for _, count in runs) * PAGE
    if not size:
        return Pages((), memoryview(b""))
    owner = (room.take(size) if room is not None else None) or mmap.mmap(-1, size)
    data = memoryview(owner)[:size]
    try:
        _transfer(_libc.process_vm_readv, region, runs, _address(data))
    except BaseException:
        data.release()
        owner.close()
        raise
    return Pages(runs, data, owner)


def write_in(region: Region, pages: ports.Pages) -> None:
    """Puts `pages` into the memory of a process that is not running yet. Raises OSError. Blocking."""
    if not pages.count:
        return
    if sum(pages.runs[-1]) > region.length // PAGE:
        raise OSError(errno.EFBIG, "the pages lie outside the memory")
    _transfer(_libc.process_vm_writev, region, pages.runs, _address(pages.data))


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _transfer(call: Callable[..., int], region: Region, runs: Sequence[Run], local: int) -> None:
    for at in range(0, len(runs), _VECTORS):
        part = runs[at : at + _VECTORS]
        remote = array.array("Q")
        for first, count in part:
            remote.extend((region.start + first * PAGE, count * PAGE))
        size = sum(remote[1::2])
        mine = array.array("Q", (local, size))
        # A transfer may end early, at a page that is not there; then the region is not what it was.
        done = call(region.pid, mine.buffer_info()[0], 1, remote.buffer_info()[0], len(part), 0)
        if done != size:
            number = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise OSError(number, os.strerror(number))
        local += size


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
