"""Commands that are to start in one guest, a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from ..core.errors import ClocheError

#: So many at once. The agent forks for one after the other, so more would only wait there: each for all that came
#: before it, with the clock of its call running, and with its body in the memory of the guest.
AT_ONCE: Final = 8
#: Seconds that one waits for its turn.
PATIENCE: Final = 240.0


class Starts:
    """The turns of one guest, in the order in which they were asked for."""

    def __init__(self, at_once: int = AT_ONCE, patience: float = PATIENCE) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._patience = patience

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Raises `sandbox.busy` when it does not come in time; nothing was started then."""
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            raise ClocheError(
                "sandbox.busy",
                f"so many commands are being started in this sandbox that it was not the turn of this one within "
                f"{self._patience:g} seconds; it was not started",
                retry_after=5,
            ) from None
        try:
            yield
        finally:
            self._free.release()
