"""When a sandbox ends: TTL and lifetime. `now` is always an argument."""

from __future__ import annotations

MAX_TTL_SECONDS = 10 * 365 * 86400  # beyond this an integer is a mistake, not a wish


def expires_at(now: float, ttl_seconds: int, persistent: bool, ends_at: float | None = None) -> float | None:
    """The moment the TTL has passed, or None when it has no TTL (0, or persistent). Never after `ends_at`."""
    if persistent or ttl_seconds == 0:
        return None
    return now + ttl_seconds if ends_at is None else min(now + ttl_seconds, ends_at)


def lifetime_end(now: float, seconds: int, most: int, parent: float | None = None) -> float | None:
    """The end that no renewal moves: `seconds` after `now`, at most `most` seconds (0: none asked for, no bound), and
    not after that of the sandbox it is forked from. None when there is no end."""
    wanted = min((one for one in (seconds, most) if one), default=None)
    ends = [] if wanted is None else [now + wanted]
    return min(ends if parent is None else [*ends, parent], default=None)


def is_due(now: float, deadline: float | None) -> bool:
    return deadline is not None and now >= deadline
