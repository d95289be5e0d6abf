"""Bandwidth: bytes that may pass now. Pure: the time is handed in (seconds)."""

from __future__ import annotations

from typing import Final

#: What may pass at once after a rest, in seconds of the rate.
_BURST: Final = 0.25
_SMALLEST_BURST: Final = 16 * 1024


class Bucket:
    """`rate`: bytes per second; 0: no limit."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._room = self._level = max(rate * _BURST, _SMALLEST_BURST)
        self._at = now

    def change(self, rate: float, now: float) -> None:
        """Another rate from now on, for everything that passes here already as well."""
        self._rate = rate
        self._room = max(rate * _BURST, _SMALLEST_BURST)
        self._level = min(self._level, self._room)
        self._at = now

    def take(self, want: int, now: float) -> int:
        """How many of `want` bytes may pass."""
        if self._rate <= 0:
            return want
        self._level = min(self._room, self._level + (now - self._at) * self._rate)
        self._at = now
        granted = min(want, max(0, int(self._level)))
        self._level -= granted
        return granted

    def spend(self, size: int, now: float) -> bool:
        """Whether a datagram may pass, which passes whole or not at all. One that is larger than what may pass at once
        does after a rest, and leaves a debt."""
        if self._rate <= 0:
            return True
        self._level = min(self._room, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < min(size, self._room):
            return False
        self._level -= size
        return True

    def give_back(self, unused: int) -> None:
        """Bytes that were taken and did not pass."""
        self._level = min(self._room, self._level + unused)

    def delay(self) -> float:
        """Seconds until it is worth asking again."""
        if self._rate <= 0:
            return 0.0
        worth = min(self._room, 8 * 1024)
        return max(0.002, (worth - self._level) / self._rate)
