"""The end of a netd that nobody needs any more: it outlives its server, but not the last machine that it serves too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

#: So long nobody may need it (seconds): a server that was killed may take its time to come again.
ALONE_SECONDS: Final = 600.0


async def until_alone(needed: Callable[[], bool], seconds: float = ALONE_SECONDS) -> None:
    """Returns when it was not needed for so long, each time it was asked. `needed`: a server is connected, or the
    machine of a sandbox lives, which its tap tells, whatever has become of the server."""
    step = seconds / 20
    alone = 0
    while alone < 20:
        await asyncio.sleep(step)
        alone = 0 if needed() else alone + 1
