"""Token buckets by key, in bounded memory. Pure: the time is passed in, and each bucket is one number."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

#: Buckets that are kept. One that is forgotten is full again, so a flood of keys costs no memory, only strictness.
MAX_KEYS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """`remaining` calls may be made at once now; after `reset` seconds it is `limit` again. `retry_after` is 0 for a
    call that may be made, else the seconds until one may."""

    limit: int
    remaining: int
    reset: int
    retry_after: int

    @property
    def allowed(self) -> bool:
        return self.retry_after == 0


class RateLimiter:
    """`per_minute` calls on average, `burst` of them at once.

    Kept for each key: the moment at which its bucket is full (the generic cell rate algorithm)."""

    def __init__(self, per_minute: float, burst: int, max_keys: int = MAX_KEYS) -> None:
        self._interval = 60.0 / per_minute
        self._burst = max(1, burst)
        self._max_keys = max_keys
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def look(self, key: str, now: float) -> Verdict:
        """What `take` would say; nothing is counted."""
        return self._verdict(key, now)[0]

    def take(self, key: str, now: float) -> Verdict:
        """Counts one call at `now` (seconds of a clock that never jumps); a refused one is not counted."""
        verdict, full_at = self._verdict(key, now)
        if verdict.allowed:
            self._full_at[key] = full_at
            self._full_at.move_to_end(key)
            while len(self._full_at) > self._max_keys:
                self._full_at.popitem(last=False)
        return verdict

    def _verdict(self, key: str, now: float) -> tuple[Verdict, float]:
        full_at = max(now, self._full_at.get(key, now)) + self._interval
        over = full_at - now - self._interval * self._burst
        # A nanosecond of grace: sums of floats are not exact, and the last call of a burst is one of it.
        if over > 1e-9:
            left = full_at - self._interval - now
            return Verdict(self._burst, 0, math.ceil(left), max(1, math.ceil(over))), full_at
        return Verdict(self._burst, int(-over / self._interval + 1e-9), math.ceil(full_at - now), 0), full_at
