"""Pages of another process: found, copied out and written in, with real children that map a file privately."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cloche_server.host import pages
from cloche_server.host.files import hash_file
from cloche_server.host.pages import PAGE, Pages, Region, Room, Run

#: Maps a file privately and does what its standard input says, one command a line; answers each with a line.
CHILD = """
import ctypes, mmap, sys
with open(sys.argv[1], "rb") as file:
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
others = []
print("ready", flush=True)
for line in sys.stdin:
    verb, *numbers = line.split()
    numbers = [int(number) for number in numbers]
    if verb == "write":
        seed, numbers = numbers[0], numbers[1:]
        for first, count in zip(numbers[::2], numbers[1::2]):
            for page in range(first, first + count):
                memory[page * 4096 : page * 4096 + 8] = (seed * 1000003 + page).to_bytes(8, "little")
        print("written", flush=True)
    elif verb == "read":
        print(sum(memory[page * 4096] for page in range(len(memory) // 4096)), flush=True)
    elif verb == "forget":
        memory.madvise(mmap.MADV_DONTNEED)
        print("forgotten", flush=True)
    elif verb == "protect":
        first, count = numbers
        done = ctypes.CDLL(None).mprotect(
            ctypes.c_void_p(address + first * 4096), ctypes.c_size_t(count * 4096), mmap.PROT_READ
        )
        print("protected", done, flush=True)
    elif verb == "bytes":
        print(memory[numbers[0] * 4096 : (numbers[0] + numbers[1]) * 4096].hex(), flush=True)
"""


class Child:
    def __init__(self, path: Path, size_pages: int) -> None:
        self.path, self.size_pages = path, size_pages
        with path.open("wb") as file:
            file.truncate(size_pages * PAGE)
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def region(self) -> Region:
        return pages.find_region(self.pid, self.path)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def do(self, verb: str, *numbers: int) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join([verb, *map(str, numbers)]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def write(self, runs: Sequence[Run], seed: int = 1) -> None:
        assert self.do("write", seed, *itertools.chain(*runs)) == "written"

    def kill(self, *, reap: bool = True) -> None:
        self._process.send_signal(signal.SIGKILL)
        if reap:
            self._process.wait()
        else:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


Make = Callable[[int], Child]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Make]:
    made: list[Child] = []

    def make(size_pages: int) -> Child:
        made.append(Child(tmp_path / f"memory-{len(made)}", size_pages))
        return made[-1]

    yield make
    for one in made:
        one.close()


def by_pagemap(region: Region) -> list[Run]:
    with Path(f"/proc/{region.pid}/pagemap").open("rb", buffering=0) as file:
        return list(pages._merge(pages._read_pagemap(file.fileno(), region)))


def by_scan(region: Region) -> list[Run]:
    """Fails where `written` would silently use the other way."""
    with Path(f"/proc/{region.pid}/pagemap").open("rb", buffering=0) as file:
        try:
            return list(pages._merge(pages._scan(file.fileno(), region)))
        except OSError as error:
            if error.errno == errno.ENOTTY:
                pytest.skip("PAGEMAP_SCAN IS MISSING: this kernel is older than 6.7, only the other way is tested")
            raise


def content(runs: Sequence[Run], seed: int = 1) -> bytes:
    """What `Child.write` has left in these pages."""
    numbers = (page for first, count in runs for page in range(first, first + count))
    return b"".join((seed * 1000003 + page).to_bytes(8, "little").ljust(PAGE, b"\0") for page in numbers)


# ------------------------------------------------------------------ which were written


def test_nothing_written(child: Make) -> None:
    one = child(64)
    assert pages.written(one.region) == []
    assert by_scan(one.region) == by_pagemap(one.region) == []


def test_what_was_only_read_is_not_written(child: Make) -> None:
    one = child(64)
    one.do("read")
    one.write([(5, 2)])
    assert pages.written(one.region) == by_pagemap(one.region) == [(5, 2)]


def test_first_and_last_page_and_all_of_them(child: Make) -> None:
    one = child(33)
    one.write([(0, 1), (32, 1)])
    assert pages.written(one.region) == [(0, 1), (32, 1)]
    one.write([(0, 33)])
    assert pages.written(one.region) == by_pagemap(one.region) == [(0, 33)]


@pytest.mark.parametrize("number", [pages._REGIONS - 1, pages._REGIONS, pages._REGIONS + 1, 2 * pages._REGIONS + 7])
def test_more_runs_than_one_call_tells(child: Make, number: int) -> None:
    one = child(3 * number)
    runs = [(3 * n + 1, 1 + n % 2) for n in range(number)]
    one.write(runs)
    assert by_scan(one.region) == runs
    assert by_pagemap(one.region) == runs
    assert pages.written(one.region) == runs


def test_a_run_longer_than_what_is_read_at_once(child: Make) -> None:
    """Runs are put together across the pieces in which the kernel is asked."""
    one = child((1 << 15) + 100)
    one.write([((1 << 15) - 3, 7)])
    assert pages.written(one.region) == by_pagemap(one.region) == [((1 << 15) - 3, 7)]


@pytest.mark.parametrize("number", [errno.ENOTTY, errno.EINVAL])
def test_a_kernel_without_the_scan(child: Make, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    one = child(64)
    one.write([(3, 2), (60, 4)])

    def refuse(*_: object) -> Iterator[Run]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pages, "_scan", refuse)
    assert pages.written(one.region) == [(3, 2), (60, 4)]


def test_another_failure_of_the_scan_is_not_hidden(child: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = child(4)

    def refuse(*_: object) -> Iterator[Run]:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(pages, "_scan", refuse)
    with pytest.raises(PermissionError):
        pages.written(one.region)


@pytest.fixture(scope="module")
def lasting() -> Iterator[Child]:
    with tempfile.TemporaryDirectory() as directory:
        one = Child(Path(directory) / "memory", 600)
        yield one
        one.close()


RUNS = st.lists(st.tuples(st.integers(0, 590), st.integers(1, 10)), max_size=60)


@given(RUNS, st.booleans())
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_ways_agree_with_what_was_written(lasting: Child, runs: list[Run], read_first: bool) -> None:
    lasting.do("forget")
    if read_first:
        lasting.do("read")
    lasting.write(runs)
    touched = {page for first, count in runs for page in range(first, first + count)}
    found = by_scan(lasting.region)
    assert {page for first, count in found for page in range(first, first + count)} == touched
    assert by_pagemap(lasting.region) == pages.written(lasting.region) == found
    assert all(a[0] + a[1] < b[0] for a, b in itertools.pairwise(found)), "runs that touch are one"
    copied = pages.copy_out(lasting.region, found)
    assert bytes(copied.data) == content(found)
    copied.close()


# ------------------------------------------------------------------ where it is mapped


def test_a_mapping_in_several_parts_is_one(child: Make) -> None:
    one = child(64)
    whole = one.region
    assert one.do("protect", 10, 5) == "protected 0"
    maps = Path(f"/proc/{one.pid}/maps").read_text()
    assert maps.count(str(one.path)) == 3, "the kernel shows it in parts, or this tests nothing"
    assert one.region == whole == Region(one.pid, whole.start, 64 * PAGE)


def test_a_file_that_is_not_mapped(child: Make, tmp_path: Path) -> None:
    one = child(4)
    with pytest.raises(FileNotFoundError):
        pages.find_region(one.pid, tmp_path / "other")


def test_a_file_that_is_not_mapped_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(4 * PAGE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), PAGE, access=mmap.ACCESS_COPY, offset=2 * PAGE):
        with pytest.raises(FileNotFoundError):
            pages.find_region(os.getpid(), path)


@pytest.mark.parametrize("reap", [True, False])
def test_a_dead_process(child: Make, reap: bool) -> None:
    """Also one whose parent has not asked for its end yet: nothing may look as if it had written nothing."""
    one = child(64)
    one.write([(1, 3)])
    region = one.region
    one.kill(reap=reap)
    with pytest.raises(OSError):
        pages.find_region(one.pid, one.path)
    with pytest.raises(OSError):
        pages.written(region)
    with pytest.raises(OSError):
        pages.copy_out(region, [(1, 3)])
    with pytest.raises(OSError):
        pages.write_in(region, Pages([(0, 1)], memoryview(bytearray(PAGE))))


@pytest.mark.parametrize("find", [pages._read_pagemap, pages._scan])
def test_a_process_that_dies_while_it_is_read(child: Make, find: Callable[[int, Region], Iterator[Run]]) -> None:
    one = child(64)
    one.write([(1, 3)])
    region = one.region
    with Path(f"/proc/{one.pid}/pagemap").open("rb", buffering=0) as file:
        one.kill()
        with pytest.raises(OSError):
            list(find(file.fileno(), region))


# ------------------------------------------------------------------ out and in


def test_round_trip_with_more_vectors_than_one_call_takes(child: Make, tmp_path: Path) -> None:
    one, other = child(6000), child(6000)
    runs = [(2 * n, 1) for n in range(2 * pages._VECTORS + 5)] + [(5000, 900)]
    one.write(runs, seed=7)
    found = pages.written(one.region)
    assert found == runs
    copied = pages.copy_out(one.region, found)
    assert (copied.count, bytes(copied.data)) == (sum(n for _, n in runs), content(runs, 7))
    digest = copied.save(tmp_path / "pages")
    assert digest == hash_file(tmp_path / "pages")
    loaded = pages.load(tmp_path / "pages", 6000)
    assert loaded.runs == copied.runs
    pages.write_in(other.region, loaded)
    assert pages.written(other.region) == runs
    back = pages.copy_out(other.region, runs)
    assert bytes(back.data) == content(runs, 7)
    assert bytes.fromhex(other.do("bytes", 1, 1)) == bytes(PAGE), "what lies between is as in the file"
    for each in (copied, loaded, back):
        each.close()


def test_pages_can_be_written_in_again_and_again(child: Make, tmp_path: Path) -> None:
    """Children of one fork share the memory they are made from, and a file is not changed by its readers."""
    one = child(16)
    one.write([(2, 3)])
    copied = pages.copy_out(one.region, [(2, 3)])
    copied.save(tmp_path / "pages")
    before = (tmp_path / "pages").read_bytes()
    loaded = pages.load(tmp_path / "pages", 16)
    for source in (copied, copied, loaded, loaded):
        other = child(16)
        pages.write_in(other.region, source)
        assert bytes.fromhex(other.do("bytes", 2, 3)) == content([(2, 3)])
    loaded.close()
    copied.close()
    assert (tmp_path / "pages").read_bytes() == before


def test_nothing_to_copy(child: Make, tmp_path: Path) -> None:
    one = child(16)
    copied = pages.copy_out(one.region, [])
    assert (copied.runs, copied.count) == ((), 0)
    copied.save(tmp_path / "pages")
    loaded = pages.load(tmp_path / "pages", 16)
    assert (loaded.runs, loaded.count) == ((), 0)
    pages.write_in(one.region, loaded)
    assert pages.written(one.region) == []
    loaded.close()
    copied.close()


@pytest.mark.parametrize("size", [0, 1, 3 * PAGE, 2 * PAGE, 100 * PAGE])
def test_room_that_is_large_enough_is_used_and_other_is_not(child: Make, size: int) -> None:
    one = child(16)
    one.write([(2, 3)])
    room = Room(size)
    owner = room.owner
    copied = pages.copy_out(one.region, [(2, 3)], room)
    assert (copied._owner is owner) == (size >= 3 * PAGE)
    assert bytes(copied.data) == content([(2, 3)])
    assert copied.count == 3
    room.close()
    assert bytes(copied.data) == content([(2, 3)]), "room that was used belongs to the pages"
    copied.close()
    copied.close()
    again = pages.copy_out(one.region, [(2, 3)], room)
    assert bytes(again.data) == content([(2, 3)]), "it can be used once"
    again.close()


def test_a_page_that_is_not_there_is_no_half_a_copy(child: Make) -> None:
    one = child(16)
    region = Region(one.pid, one.region.start, 17 * PAGE)
    beyond = sorted(_spans(one.pid))
    if any(low <= region.start + 16 * PAGE < high for low, high in beyond):
        region = Region(one.pid, 16 * PAGE, 17 * PAGE)  # nothing is ever mapped so low
    with pytest.raises(OSError):
        pages.copy_out(region, [(15, 2)])


def _spans(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        low, high = line.split()[0].split("-")
        yield int(low, 16), int(high, 16)


def test_pages_outside_the_memory_are_not_written(child: Make) -> None:
    one = child(16)
    for runs in ([(16, 1)], [(15, 2)], [(0, 1), (1 << 20, 1)]):
        data = bytearray(PAGE * sum(n for _, n in runs))
        with pytest.raises(OSError) as told:
            pages.write_in(one.region, Pages(runs, memoryview(data)))
        assert told.value.errno == errno.EFBIG
    assert pages.written(one.region) == []


def test_closed_pages_cannot_be_used(child: Make) -> None:
    one = child(4)
    one.write([(1, 1)])
    copied = pages.copy_out(one.region, [(1, 1)])
    copied.close()
    with pytest.raises(ValueError):
        bytes(copied.data)


def test_the_calls_are_declared() -> None:
    """A pointer that is cut to 32 bits would be the wrong memory."""
    for name in ("process_vm_readv", "process_vm_writev"):
        call = getattr(pages._libc, name)
        assert call.restype is ctypes.c_ssize_t
        assert call.argtypes[1] is call.argtypes[3] is ctypes.c_void_p
