"""User ids: blocks per data directory, ids in turn, never one that a process has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.host import uids
from cloche_server.host.uids import BLOCK, UidBlock, claim, existing

BASE = 3_000_000_000  # nobody's, on any host where tests run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def data(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    return made


def test_each_data_directory_has_a_block_and_keeps_it(tmp_path: Path, run: Path) -> None:
    one, two = data(tmp_path, "one"), data(tmp_path, "two")
    assert existing(one, BASE, run) is None
    first, second = claim(one, BASE, run), claim(two, BASE, run)
    assert (first.first, second.first) == (BASE, BASE + BLOCK)
    assert claim(one, BASE, run) == existing(one, BASE, run) == first
    (tmp_path / "link").symlink_to(one)
    assert claim(tmp_path / "link", BASE, run) == first


def test_the_block_of_a_directory_that_is_gone_is_given_out_again(tmp_path: Path, run: Path) -> None:
    one = data(tmp_path, "one")
    gone = claim(one, BASE, run)
    assert gone.take() == BASE + 1
    one.rmdir()
    again = claim(data(tmp_path, "two"), BASE, run)
    assert again == gone
    assert again.take() == BASE + 1


def test_but_not_while_a_process_has_one_of_its_ids(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = data(tmp_path, "one")
    gone = claim(one, BASE, run)
    one.rmdir()
    monkeypatch.setattr(uids, "uid_of", lambda pid: BASE + 7 if pid == os.getpid() else 0)
    assert claim(data(tmp_path, "two"), BASE, run) != gone


def test_ids_come_in_turn_and_the_first_is_left_alone(tmp_path: Path, run: Path) -> None:
    block = claim(data(tmp_path, "one"), BASE, run)
    assert [block.take() for _ in range(3)] == [BASE + 1, BASE + 2, BASE + 3]
    # Another process of the same directory goes on where this one is.
    assert claim(tmp_path / "one", BASE, run).take() == BASE + 4


def test_after_all_have_been_given_out_living_ones_are_passed_over(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = claim(data(tmp_path, "one"), BASE, run)
    (run / f"next-{BASE}").write_text(f"{BLOCK - 2} 0")
    assert block.take() == BASE + BLOCK - 2
    monkeypatch.setattr(uids, "used_uids", lambda _: frozenset({BASE + 1, BASE + 2}))
    assert block.take() == BASE + 3


def test_when_every_id_is_taken_that_is_said(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = claim(data(tmp_path, "one"), BASE, run)
    monkeypatch.setattr(uids, "used_uids", lambda _: frozenset(range(BASE, BASE + BLOCK)))
    with pytest.raises(ClocheError) as caught:
        block.take()
    assert caught.value.code == "capacity.unavailable"


@pytest.mark.parametrize("text", ["", "x", "1", "1 2 3", "-5 0"])
def test_a_damaged_counter_begins_anew_and_gives_nobody_a_living_id(
    text: str, tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = claim(data(tmp_path, "one"), BASE, run)
    (run / f"next-{BASE}").write_text(text)
    monkeypatch.setattr(uids, "used_uids", lambda _: frozenset({BASE + 1}))
    assert block.take() in block
    assert text == "-5 0" or (run / f"next-{BASE}").read_text() == "3 1"


def test_a_damaged_list_of_blocks_is_not_guessed(tmp_path: Path, run: Path) -> None:
    run.mkdir()
    (run / "blocks.json").write_text("{")
    with pytest.raises(ClocheError) as caught:
        claim(data(tmp_path, "one"), BASE, run)
    assert caught.value.code == "host.unsupported"


def test_a_group_belongs_to_one_file(tmp_path: Path) -> None:
    block = UidBlock(BASE, BASE, tmp_path)
    files = [tmp_path / str(number) for number in range(20)]
    for path in files:
        path.touch()
    groups = {block.group_of(path.stat()) for path in files}
    assert len(groups) == 20
    assert not any(BASE <= group < BASE + uids.BLOCK * uids.BLOCKS for group in groups)
    os.link(files[0], tmp_path / "link")
    assert block.group_of((tmp_path / "link").stat()) == block.group_of(files[0].stat())


def test_of_a_process_the_kernel_tells_the_user() -> None:
    assert uids.uid_of(os.getpid()) == os.getuid()
    assert uids.uid_of(2**22 + 5) is None
    assert not uids.is_first_of_namespace(os.getpid())
