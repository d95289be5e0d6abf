"""Secrets that programs in sandboxes have sent where they must not go, as events."""

from __future__ import annotations

import asyncio
from typing import Final

from cloche_server.app.journal import Journal
from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import Network

#: netd is asked anew after so long without news (seconds), and so long after it could not be asked.
WAIT: Final = 15.0
AGAIN_AFTER: Final = 2.0


class Violations:
    """netd counts them, and holds them back to one a minute for each sandbox and secret; it keeps those that happened
    while no server ran, and those that a server had no time to write down."""

    def __init__(self, network: Network, journal: Journal) -> None:
        self._network = network
        self._journal = journal

    async def run(self) -> None:
        """Until it is cancelled."""
        told = ""
        while True:
            try:
                answer = await self._network.violations(told, WAIT)
            except ClocheError:
                await asyncio.sleep(AGAIN_AFTER)
                continue
            for one in answer["entries"]:
                payload = {name: one[name] for name in ("secret", "host", "method", "count")}
                await self._journal.tell("secret.violation", one["workspace"], one["sandbox"], payload)
            told = answer["next"]
