"""TTL arithmetic: when a sandbox ends. `now` is always an argument."""

from __future__ import annotations

MAX_TTL_SECONDS = 10 * 365 * 86400  # beyond this an integer is a mistake, not a wish


def expires_at(now: float, ttl_seconds: int, persistent: bool) -> float | None:
    """The moment the sandbox is deleted, or None when it has no TTL (0, or persistent)."""
    if persistent or ttl_seconds == 0:
        return None
    return now + ttl_seconds


def is_due(now: float, expires: float | None) -> bool:
    return expires is not None and now >= expires
