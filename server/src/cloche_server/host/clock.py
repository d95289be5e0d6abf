"""The clock. Code that decides takes `now` as an argument; code that acts takes a `Clock`."""

from __future__ import annotations

import secrets
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Wall time, Unix seconds."""

    def now_ns(self) -> int:
        """Wall time, Unix nanoseconds."""

    def monotonic(self) -> float:
        """Seconds of a clock that never jumps."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        return time.time()

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic()


def random_bytes(count: int) -> bytes:
    """Fresh bytes of the kernel's random pool."""
    return secrets.token_bytes(count)
