"""Which tests on real machines stay together with one worker, and which come first."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

#: A file whose tests share something: the sandbox of a module, or another fixture that outlives one test.
_SHARES = re.compile(r"""\bshared\b|scope=["'](module|class|package)["']""")


@cache
def together(file: Path) -> bool:
    """Whether the tests of a file belong together. Those of other files go where there is room, one by one."""
    return _SHARES.search(file.read_text("utf-8")) is not None


def order(item: pytest.Item) -> int:
    """What is long comes first and what can be dealt out singly comes last, so that all workers end together."""
    if item.get_closest_marker("slow"):
        return 0
    return 1 if together(item.path) else 2


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
