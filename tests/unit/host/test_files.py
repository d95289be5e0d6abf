"""Files: whole or not at all, sparse, and nothing removed that is not ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.host import files, process

MIB = 1024 * 1024


def test_write_atomic_replaces_content_and_sets_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, "one")
    files.write_atomic(path, b"two", mode=0o600)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_write_atomic_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "dir" / "full").mkdir(parents=True)
    with pytest.raises(ClocheError):
        files.write_atomic(tmp_path / "dir", "x")  # a file cannot replace a directory
    assert [entry.name for entry in tmp_path.iterdir()] == ["dir"]


def test_write_atomic_on_a_full_disk_says_so(tmp_path: Path, small_disk: Path) -> None:
    with pytest.raises(ClocheError) as caught:
        files.write_atomic(small_disk / "file", bytes(4 * MIB))
    assert caught.value.code == "host.disk_full"
    assert list(small_disk.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield path
    files.unmount_below(path)


@pytest.mark.parametrize("part", ["../x", "a/../../x", "/etc/passwd", "..", "a\0b", "link/x"])
def test_safe_join_refuses_to_leave(tmp_path: Path, part: str) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "link").symlink_to(tmp_path)
    with pytest.raises(ClocheError) as caught:
        files.safe_join(base, part)
    assert caught.value.code == "request.invalid"


def test_safe_join_inside(tmp_path: Path) -> None:
    assert files.safe_join(tmp_path, "a", "b/c..d") == tmp_path / "a/b/c..d"


def test_copy_sparse_keeps_content_and_holes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(64 * MIB)
        for position in (0, 10 * MIB + 5, 40 * MIB):
            file.seek(position)
            file.write(os.urandom(100_000))
    source.chmod(0o640)
    files.copy_sparse(source, tmp_path / "copy")
    assert files.hash_file(tmp_path / "copy") == files.hash_file(source)
    assert files.allocated_bytes(tmp_path / "copy") < 2 * MIB
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o640


def test_copy_sparse_of_nothing_but_a_hole(tmp_path: Path) -> None:
    with (tmp_path / "source").open("wb") as file:
        file.truncate(MIB)
    files.copy_sparse(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == bytes(MIB)


def test_copy_sparse_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("new")
    (tmp_path / "copy").write_text("old")
    with pytest.raises(FileExistsError):
        files.copy_sparse(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "old"


def test_copy_sparse_to_a_full_disk_leaves_nothing(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "source").write_bytes(os.urandom(2 * MIB))
    with pytest.raises(ClocheError) as caught:
        files.copy_sparse(tmp_path / "source", small_disk / "copy")
    assert caught.value.code == "host.disk_full"
    assert list(small_disk.iterdir()) == []


def test_remove_tree_is_idempotent_and_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("x")
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/link").symlink_to(tmp_path / "kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for path in (tree, tree, tmp_path / "link", tmp_path / "never"):
        files.remove_tree(path)
    assert (tmp_path / "kept/file").read_text() == "x"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kept"]


def test_remove_tree_refuses_to_go_into_a_mount(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "precious").write_text("x")
    with pytest.raises(ClocheError, match="still mounted"):
        files.remove_tree(tmp_path)
    assert (small_disk / "precious").exists()


def test_unmount_below(small_disk: Path) -> None:
    assert files.mounts_below(small_disk.parent) == [small_disk]
    files.unmount_below(small_disk.parent)
    assert files.mounts_below(small_disk.parent) == []


def test_publish_gives_the_name_once(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with files.staging(tmp_path) as work:
            (work / "done").mkdir()
            (work / "done/file").write_text(content)
            assert files.publish(work / "done", tmp_path / "target") == (content == "first")
    assert (tmp_path / "target/file").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_staging_leaves_nothing_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), files.staging(tmp_path / "made") as work:
        (work / "file").write_text("x")
        raise RuntimeError
    assert list((tmp_path / "made").iterdir()) == []


def test_sweep_removes_what_a_dead_owner_left_with_its_helpers(tmp_path: Path) -> None:
    dead = tmp_path / ".staging-1-1-aabb"  # process 1 started at another time
    dead.mkdir()
    (dead / "file").write_text("x")
    helper = process.spawn_detached(["sleep", "60"], cwd=dead)
    started = process.start_time(helper)
    assert started is not None
    (tmp_path / "finished").mkdir()
    with files.staging(tmp_path) as mine:
        files.sweep_staging(tmp_path)
        assert mine.is_dir()
        assert not dead.exists()
        assert (tmp_path / "finished").is_dir()
    os.waitpid(helper, 0)
    assert not process.is_alive(helper, started)


def test_sweep_of_a_place_that_is_not_there(tmp_path: Path) -> None:
    files.sweep_staging(tmp_path / "none")


def test_free_bytes(tmp_path: Path) -> None:
    assert files.free_bytes(tmp_path) > 0
