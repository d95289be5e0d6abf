"""A log that is only appended to: whole lines, bounded parts, nothing half."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.host import append
from cloche_server.host.append import AppendLog


def test_newest_first_over_all_parts(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "x.log", 30, 3)
    for number in range(20):
        log.append(b"line %02d\n" % number)
    log.close()
    lines = list(AppendLog(tmp_path / "x.log", 30, 3).newest_first())
    assert lines == [b"line %02d" % number for number in range(19, 19 - len(lines), -1)]
    assert len(lines) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_size <= 30


@given(st.lists(st.binary(min_size=1, max_size=300).filter(lambda one: b"\n" not in one), max_size=40))
def test_lines_come_back(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    log = AppendLog(tmp_path_factory.mktemp("log") / "x.log", 1 << 20, 2)
    for line in lines:
        log.append(line + b"\n")
    block, append._BLOCK = append._BLOCK, 64  # type: ignore[misc]
    try:
        assert list(log.newest_first()) == lines[::-1]
    finally:
        append._BLOCK = block  # type: ignore[misc]
        log.close()


def test_what_is_written_half_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AppendLog(tmp_path / "x.log", 1 << 20, 2)
    log.append(b"first\n")
    write = os.write

    def full(fd: int, data: Any) -> int:
        if len(data) <= 3:
            raise OSError(28, "No space left on device")
        return write(fd, data[:3])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            log.append(b"second\n")
    log.append(b"third\n")
    log.close()
    assert (tmp_path / "x.log").read_bytes() == b"first\nthird\n"


def test_a_line_that_was_torn_by_a_power_cut_ends(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(b"whole\nhal")
    log = AppendLog(tmp_path / "x.log", 1 << 20, 2)
    log.append(b"next\n")
    log.close()
    assert (tmp_path / "x.log").read_bytes() == b"whole\nhal\nnext\n"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "x.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        AppendLog(tmp_path / "x.log", 100, 2).append(b"a\n")
    assert not (tmp_path / "elsewhere").exists()
