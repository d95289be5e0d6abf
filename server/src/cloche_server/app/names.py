"""Creates under a name: whoever asks for the same name at the same time ends up with the same sandbox.

A name is unique among the living of a workspace. A call by id never touches a successor of the same name.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from cloche_server.app.access import Access
from cloche_server.app.create import CreateRequest
from cloche_server.app.entry import Entry, name_taken
from cloche_server.app.idempotency import IdempotentCreates
from cloche_server.app.lifecycle import LifecycleVerbs
from cloche_server.app.turns import Turns
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import Sandbox


class IfExists(StrEnum):
    """What a create does when its name is in use."""

    ERROR = "error"
    CONNECT = "connect"
    REPLACE = "replace"


class NamedCreates:
    def __init__(self, creates: IdempotentCreates, access: Access, lifecycle: LifecycleVerbs) -> None:
        self._creates = creates
        self._access = access
        self._lifecycle = lifecycle
        self._turns = Turns()

    async def create(
        self, request: CreateRequest, key: str | None, body: bytes, if_exists: IfExists
    ) -> tuple[Sandbox, bool]:
        """The sandbox, and whether it was made now. With `connect` all options but the name count only when it is.

        Errors: those of a create; `sandbox.name_taken`; with `connect` `sandbox.invalid_state` for one that is paused,
        and `sandbox.failed`.
        """
        if request.name is None:
            return await self._creates.create(request, key, body), True
        async with self._turns.of((request.workspace, request.name)):
            # A repetition of a request that was carried out is no new request, whatever has the name now.
            if (earlier := await self._creates.earlier(request.workspace, key, body)) is not None:
                return earlier, True
            entry = self._access.named(request.workspace, request.name)
            if entry is not None and if_exists is IfExists.CONNECT:
                return await self._connect(entry), False
            if entry is not None and if_exists is IfExists.ERROR:
                raise name_taken(request.name, entry.record.id)
            if entry is not None and if_exists is IfExists.REPLACE:
                await self._lifecycle.delete(request.workspace, entry.record.id)
            return await self._creates.create(request, key, body), True

    async def _connect(self, entry: Entry) -> Sandbox:
        """It runs when this returns. Its TTL stays as it is, unless it has to be woken."""
        workspace, sandbox_id = entry.record.workspace, entry.record.id
        if entry.creating is not None and entry.record.status is Status.CREATING:
            await asyncio.wait({entry.creating})  # by another way than its name
        woken, _ = await self._access.serving(workspace, sandbox_id)
        return woken.record
