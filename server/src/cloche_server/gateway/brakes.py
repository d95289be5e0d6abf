"""How fast: requests to one sandbox, and guesses at what opens it."""

from __future__ import annotations

import ipaddress

from cloche_server.core.errors import ClocheError
from cloche_server.core.ratelimit import RateLimiter, Verdict


class Brakes:
    """`requests` in a minute to one sandbox, `burst` of them at once; `guesses` in a minute that are wrong, from one
    address at one sandbox. 0: no limit. Times are seconds of a clock that never jumps."""

    def __init__(self, requests: int, burst: int, guesses: int) -> None:
        self._requests = RateLimiter(requests, burst) if requests else None
        self._guesses = RateLimiter(guesses, guesses) if guesses else None

    def request(self, sandbox_id: str, now: float) -> None:
        """Counts one that may come in. Raises `request.rate_limited`."""
        if self._requests is not None:
            _check(self._requests.take(sandbox_id, now), "more requests come to this sandbox than the server allows")

    def wrong(self, sandbox_id: str, client: str, now: float) -> None:
        """Counts a token or password that opens nothing. Raises `request.rate_limited`."""
        if self._guesses is not None:
            _check(self._guesses.take(_key(sandbox_id, client), now), _GUESSES)

    def check_guess(self, sandbox_id: str, client: str, now: float) -> None:
        """Before a password is looked at. Raises `request.rate_limited`."""
        if self._guesses is not None:
            _check(self._guesses.look(_key(sandbox_id, client), now), _GUESSES)


_GUESSES = "too many tokens and passwords that were wrong came from this address"


def _check(verdict: Verdict, sentence: str) -> None:
    if not verdict.allowed:
        raise ClocheError(
            "request.rate_limited",
            f"{sentence}; try again in {verdict.retry_after} s",
            details={"limit": verdict.limit},
            retry_after=verdict.retry_after,
        )


def _key(sandbox_id: str, client: str) -> str:
    """Of IPv6 the /64: one machine has as many addresses in it as it likes."""
    try:
        found = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return f"{sandbox_id} unknown"
    if found.version == 6:
        return f"{sandbox_id} {ipaddress.ip_network((found, 64), strict=False)}"
    return f"{sandbox_id} {found}"
