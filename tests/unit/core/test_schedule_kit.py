"""What decides which tests a run has: every worker of it must come to the same."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from kit.schedule import left_out, some

_PROGRAM = """
from pathlib import Path
from kit.schedule import left_out, some
print([(at, getattr(case, "__name__", "")) for at, case in some([(n, Path.unlink) for n in range(20)])])
"""


@pytest.mark.thorough
def test_all_workers_of_a_run_choose_alike_and_another_run_otherwise() -> None:
    def chosen(mark: str, hash_seed: str) -> str:
        env = {**os.environ, "RUN_MARK": mark, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        env.pop("CLOCHE_TEST_ALL", None)
        ran = subprocess.run([sys.executable, "-c", _PROGRAM], env=env, capture_output=True, text=True, check=True)
        return ran.stdout

    assert chosen("a run", "1") == chosen("a run", "2")
    assert len({chosen(f"run {n}", "1") for n in range(4)}) > 1


def test_a_third_of_them_at_least_one_and_all_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_MARK", "a run")
    monkeypatch.delenv("CLOCHE_TEST_ALL", raising=False)
    for count in (1, 2, 3, 4, 11):
        cases = list(range(count))
        assert len(some(cases)) == -(-count // 3)
        assert set(some(cases)) <= set(cases)
    monkeypatch.setenv("CLOCHE_TEST_ALL", "1")
    assert some([1, 2, 3]) == [1, 2, 3]


class _Item:
    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self._marks = nodeid, marks

    def get_closest_marker(self, name: str) -> bool:
        return name in self._marks


def test_long_tests_are_left_out_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has failed is run again alone, and has to be in that run as well."""
    items = [_Item(f"long {n}", "slow", "vm") for n in range(300)]
    others: Any = [_Item("short", "vm"), _Item("long but of no machine", "slow")]
    monkeypatch.delenv("RUN_MARK", raising=False)
    assert left_out([*items, *others]) == set()
    monkeypatch.delenv("CLOCHE_TEST_ALL", raising=False)
    monkeypatch.setenv("RUN_MARK", "a run")
    out = left_out([*items, *others])
    assert 60 < len(out) < 140
    assert out <= {item.nodeid for item in items}
    assert all(left_out([item]) == out & {item.nodeid} for item in items)
    monkeypatch.setenv("RUN_MARK", "another run")
    assert left_out(items) != out
    monkeypatch.setenv("CLOCHE_TEST_ALL", "1")
    assert left_out(items) == set()
