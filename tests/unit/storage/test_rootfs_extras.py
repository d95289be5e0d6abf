"""What a recipe puts into a root file system stays in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.storage.recipe_files import PutFile
from cloche_server.storage.rootfs_extras import _move_programs, put_files, python_version


def test_files_are_put_in(tmp_path: Path) -> None:
    put_files(tmp_path, [PutFile("/opt/a/b", 0o755, b"x")])
    assert (tmp_path / "opt/a/b").read_bytes() == b"x"
    assert (tmp_path / "opt/a/b").stat().st_mode & 0o7777 == 0o755


def test_a_link_on_the_way_leads_nowhere(tmp_path: Path) -> None:
    tree, host = tmp_path / "tree", tmp_path / "host"
    tree.mkdir()
    host.mkdir()
    (host / "f").write_text("old")
    (tree / "opt").symlink_to(host)
    with pytest.raises(ClocheError) as refused:
        put_files(tree, [PutFile("/opt/f", 0o644, b"new")])
    assert refused.value.code == "template.bake_failed"
    (tree / "last").symlink_to(host / "f")
    put_files(tree, [PutFile("/last", 0o644, b"new")])
    assert (host / "f").read_text() == "old"
    assert not (tree / "last").is_symlink()


def test_programs_run_with_the_python_of_the_guest(tmp_path: Path) -> None:
    source, target = tmp_path / "bin", tmp_path / "to"
    source.mkdir()
    target.mkdir()
    (source / "script").write_bytes(b"#!/host/python\nprint(1)\n")
    (source / "binary").write_bytes(b"\x7fELF\x02")
    _move_programs(source, target)
    assert (target / "script").read_bytes() == b"#!/usr/bin/python3\nprint(1)\n"
    assert (target / "binary").read_bytes() == b"\x7fELF\x02"
    assert not source.exists()


def test_the_python_of_the_guest(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    with pytest.raises(ClocheError):
        python_version(tmp_path)
    for name in ("python3.11", "python3.11-config"):
        (tmp_path / "usr/bin" / name).touch()
    assert python_version(tmp_path) == "3.11"
