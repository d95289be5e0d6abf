"""Waiting for what must come true soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def until(check: Callable[[], _T], seconds: float = 30.0, every: float = 0.1) -> _T:
    """The first true value of `check`; fails when there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"did not come true within {seconds:g} s; last: {value!r}"
        time.sleep(every)


class Watch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began
