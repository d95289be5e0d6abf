"""A listener inside of a sandbox, whose connections the host takes."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from cloche_server.core.streams import ByteStream
from cloche_server.guest.sockets import Arrival, GuestListener


class Listening:
    """Ask for the `next` connection and `take` it; `close` ends it, and those that were taken go on. While it is open
    the sandbox is not idle."""

    def __init__(
        self,
        made: GuestListener,
        take: Callable[[Arrival], Awaitable[ByteStream]],
        hold: AbstractContextManager[object],
    ) -> None:
        self._made = made
        self._take = take
        self._held = contextlib.ExitStack()
        self._held.enter_context(hold)

    @property
    def port(self) -> int:
        return self._made.port

    async def next(self) -> Arrival:
        """Raises `sandbox.unreachable` and its like when none will come any more, because the sandbox sleeps or has
        ended."""
        return await self._made.next()

    async def take(self, arrival: Arrival) -> ByteStream:
        """Raises `port.closed` when it is too late, `sandbox.busy` and `request.rate_limited` as `dial` does."""
        return await self._take(arrival)

    def close(self) -> None:
        """May be called twice."""
        self._held.close()
        self._made.close()
