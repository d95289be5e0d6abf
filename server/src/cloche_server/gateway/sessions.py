"""What is under way. A session is cut when its client hangs up, its right ends, nothing moves, or the server stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Session:
    """`why` says what has cut it."""

    def __init__(self, sandbox_id: str, port: int, idle: float, scope: asyncio.Timeout) -> None:
        self.sandbox_id = sandbox_id
        self.port = port
        self.why: str | None = None
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._idle = idle
        self._moved = self._loop.time()
        self._timers = [self._loop.call_later(idle, self._look)]

    def beat(self) -> None:
        """Bytes have moved."""
        self._moved = self._loop.time()

    def ends_in(self, seconds: float) -> None:
        self._timers.append(self._loop.call_later(max(0.0, seconds), self.end, "expired"))

    def end(self, why: str) -> None:
        if self.why is None:
            self.why = why
            # The scope may be at its end already, which is as good.
            with contextlib.suppress(RuntimeError):
                self._scope.reschedule(self._loop.time())

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _look(self) -> None:
        left = self._moved + self._idle - self._loop.time()
        if left <= 0:
            self.end("idle")
        else:
            self._timers[0] = self._loop.call_later(left, self._look)


class Sessions:
    """All of a gateway. `idle`: seconds without a byte in either direction."""

    def __init__(self, idle: float) -> None:
        self._idle = idle
        self._open: set[Session] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @contextlib.asynccontextmanager
    async def open(self, sandbox_id: str, port: int) -> AsyncIterator[Session]:
        """Raises `TimeoutError` when it was cut; `Session.why` says why."""
        async with asyncio.timeout(None) as scope:
            session = Session(sandbox_id, port, self._idle, scope)
            self._open.add(session)
            self._empty.clear()
            try:
                yield session
            finally:
                self._open.discard(session)
                if not self._open:
                    self._empty.set()
                session.close()

    def revoke(self, sandbox_id: str, port: int) -> None:
        """Ends those that lead to a port."""
        for session in [one for one in self._open if (one.sandbox_id, one.port) == (sandbox_id, port)]:
            session.end("revoked")

    def stop(self) -> None:
        for session in list(self._open):
            session.end("stopping")

    async def wait_empty(self) -> None:
        await self._empty.wait()
