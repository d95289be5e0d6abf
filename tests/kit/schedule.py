"""Which tests on real machines stay together with one worker, and which come first."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

#: A file whose tests share something: the sandbox of a module, or another fixture that outlives one test.
_SHARES = re.compile(r"""\bshared\b|scope=["'](module|class|package)["']""")


_T = TypeVar("_T")


def is_whole() -> bool:
    """Whether time is no matter: with `CLOCHE_TEST_ALL=1`, and when pytest is called by hand."""
    return "RUN_MARK" not in os.environ or bool(os.environ.get("CLOCHE_TEST_ALL"))


def some(cases: Sequence[_T]) -> list[_T]:
    """A third of many cases of one kind, other ones in each run of `./test`; all of them with `CLOCHE_TEST_ALL=1`, and
    when pytest is called by hand. Each takes half a minute of emulation, and what breaks one mostly breaks several."""
    if is_whole():
        return list(cases)
    run = os.environ["RUN_MARK"]
    # Every worker has to choose the same, so nothing goes in whose text differs between processes.
    chosen = random.Random(f"{run} {len(cases)}").sample(range(len(cases)), -(-len(cases) // 3))
    return [cases[at] for at in sorted(chosen)]


def left_out(items: Sequence[pytest.Item]) -> set[str]:
    """The ids of the long tests on machines that this run of `./test` does without: one of three, other ones each
    time. All are in it with `CLOCHE_TEST_ALL=1`, and when pytest is called by hand."""
    if is_whole():
        return set()
    # Each by itself, so that what has failed is run again.
    run = os.environ["RUN_MARK"]
    long = [item.nodeid for item in items if item.get_closest_marker("slow") and item.get_closest_marker("vm")]
    return {name for name in long if random.Random(f"{run} {name}").random() < 1 / 3}


@cache
def together(file: Path) -> bool:
    """Whether the tests of a file belong together. Those of other files go where there is room, one by one."""
    return _SHARES.search(file.read_text("utf-8")) is not None


def sort(items: list[pytest.Item]) -> None:
    """What is long comes first and what can be dealt out singly comes last, so that all workers end together.

    What belongs together stays together, in its own order.
    """
    long = {item.path for item in items if item.get_closest_marker("slow")}

    def rank(item: pytest.Item) -> int:
        if not item.get_closest_marker("vm"):
            return -1
        if together(item.path):
            return 0 if item.path in long else 1
        return 0 if item.get_closest_marker("slow") else 2

    items.sort(key=rank)


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals out files that share something as a whole, and tests of other files singly, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    scope_of = scope_below(config.rootpath)

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduler(config, log)


def scope_below(root: Path) -> Callable[[str], str]:
    """Gives the name of what a test has to stay with: its file or, alone, itself."""

    def scope_of(nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return file if together(root / file) else nodeid

    return scope_of
