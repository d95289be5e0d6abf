"""Memory for a sandbox that has none now, because it sleeps, is stopped or has failed."""

from __future__ import annotations

from cloche_server.app.capacity import Capacity, refused
from cloche_server.app.pools import Pools


class Room:
    """Its disk is promised already."""

    def __init__(self, capacity: Capacity, pools: Pools) -> None:
        self._capacity = capacity
        self._pools = pools

    async def take(self, sandbox_id: str) -> None:
        """Promises the memory; pooled machines give way. One that has it keeps it. Raises `capacity.unavailable`."""
        refusal = self._capacity.try_memory(sandbox_id)
        while refusal is not None and await self._pools.give_up_one():
            refusal = self._capacity.try_memory(sandbox_id)
        if refusal is not None:
            raise refused(refusal)

    def give_back(self, sandbox_id: str) -> None:
        """Its machine has ended."""
        self._capacity.without_memory(sandbox_id)
