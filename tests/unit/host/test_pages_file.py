"""The file of saved pages: read as it was written, and refused when it is anything else."""

from __future__ import annotations

import random
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cloche_server.host import pages
from cloche_server.host.files import hash_file
from cloche_server.host.pages import PAGE, Pages, Run

MEMORY = 4000
SAVED_RUNS = [(0, 1), (5, 2), (100, 3), (3999, 1)]


def saved(runs: Sequence[Run] = SAVED_RUNS) -> bytes:
    size = sum(count for _, count in runs) * PAGE
    made = Pages(runs, memoryview(random.Random(1).randbytes(size)))
    return made.header() + bytes(made.data)


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "pages"


def load(path: Path, raw: bytes, memory_pages: int = MEMORY) -> tuple[tuple[Run, ...], bytes] | None:
    """What `raw` is read as; None when it is refused. Any other error passes."""
    path.write_bytes(raw)
    try:
        loaded = pages.load(path, memory_pages)
    except (ValueError, OSError):
        return None
    found = loaded.runs, bytes(loaded.data)
    loaded.close()
    _check(*found, memory_pages)
    return found


def _check(runs: tuple[Run, ...], data: bytes, memory_pages: int) -> None:
    at = 0
    for first, count in runs:
        assert at <= first
        assert count > 0
        at = first + count
    assert at <= memory_pages
    assert len(data) == PAGE * sum(count for _, count in runs)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Pages(SAVED_RUNS, memoryview(random.Random(1).randbytes(7 * PAGE)))
    digest = made.save(tmp_path / "pages")
    assert (tmp_path / "pages").read_bytes() == saved()
    assert digest == hash_file(tmp_path / "pages")
    assert load(tmp_path / "again", saved()) == (tuple(SAVED_RUNS), bytes(made.data))
    with pytest.raises(FileExistsError):
        made.save(tmp_path / "pages")


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), max_size=600))
@hypothesis_settings(max_examples=50, deadline=None)
def test_any_runs_come_back(file: Path, steps: list[tuple[int, int]]) -> None:
    runs, at = [], 0
    for gap, count in steps:
        runs.append((at + gap, count))
        at += gap + count
    found = load(file, saved(runs), at + 1)
    assert found is not None
    assert found[0] == tuple(runs)


@given(st.integers(0, len(saved()) - 1))
@hypothesis_settings(max_examples=150, deadline=None)
def test_every_truncation_is_refused(file: Path, length: int) -> None:
    assert load(file, saved()[:length]) is None


@given(st.binary(min_size=1, max_size=2 * PAGE))
@hypothesis_settings(max_examples=50, deadline=None)
def test_more_than_there_should_be_is_refused(file: Path, more: bytes) -> None:
    assert load(file, saved() + more) is None


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), min_size=1, max_size=8))
@hypothesis_settings(max_examples=500, deadline=None)
def test_a_damaged_header_is_refused_or_harmless(file: Path, changes: list[tuple[int, int]]) -> None:
    raw = bytearray(saved())
    for at, value in changes:
        raw[at] = value
    load(file, bytes(raw))


@given(
    st.integers(0, 2**64 - 1) | st.integers(0, 8),
    st.integers(0, 2**64 - 1) | st.integers(0, 8),
    st.lists(st.integers(0, 2**32 - 1) | st.integers(0, MEMORY), max_size=12),
    st.integers(0, 9),
)
@hypothesis_settings(max_examples=300, deadline=None)
def test_any_numbers_in_the_header(file: Path, number: int, count: int, flat: list[int], body: int) -> None:
    raw = pages._MAGIC + struct.pack("=QQ", number, count) + struct.pack(f"={len(flat)}I", *flat)
    load(file, raw.ljust(PAGE, b"\0") + bytes(body * PAGE))


@given(st.binary(max_size=3 * PAGE))
@hypothesis_settings(max_examples=100, deadline=None)
def test_garbage_is_refused(file: Path, raw: bytes) -> None:
    assert load(file, raw) is None
    assert load(file, pages._MAGIC + raw) in (None, ((), b""))


@pytest.mark.parametrize(
    "runs",
    [
        [(5, 2), (6, 1)],
        [(5, 2), (0, 1)],
        [(5, 0)],
        [(MEMORY, 1)],
        [(MEMORY - 1, 2)],
        [(2**32 - 1, 2**32 - 1)],
    ],
)
def test_runs_that_overlap_or_lie_outside_are_refused(file: Path, runs: list[Run]) -> None:
    count = min(sum(n for _, n in runs), 10)
    raw = pages._MAGIC + struct.pack("=QQ", len(runs), count) + struct.pack(f"={2 * len(runs)}I", *sum(runs, ()))
    assert load(file, raw.ljust(PAGE, b"\0") + bytes(count * PAGE)) is None


def test_a_memory_of_another_size_is_refused(file: Path) -> None:
    assert load(file, saved(), MEMORY) is not None
    assert load(file, saved(), MEMORY - 1) is None


@pytest.mark.parametrize("what", ["missing", "directory", "empty"])
def test_what_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "pages"
    if what == "directory":
        path.mkdir()
    elif what == "empty":
        path.touch()
    with pytest.raises((OSError, ValueError)):
        pages.load(path, MEMORY)


def test_nothing_stays_open_of_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pages").write_bytes(saved()[:-PAGE])
    for _ in range(3):
        with pytest.raises(ValueError):
            pages.load(tmp_path / "pages", MEMORY)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
