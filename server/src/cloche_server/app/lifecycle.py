"""Verbs that change a sandbox: delete, TTL, metadata."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry, rearmed
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.records import IdleAction, Sandbox, TerminationReason
from cloche_server.host.clock import Clock

#: A wait looks again after so many seconds, whatever it was told.
LONGEST_LOOK = 10.0


class LifecycleVerbs:
    """Each method finds the sandbox, lets its task do the work, and returns the new record."""

    def __init__(self, access: Access, supervisor: Supervisor, clock: Clock) -> None:
        self._access = access
        self._supervisor = supervisor
        self._clock = clock

    async def delete(self, workspace: str, sandbox_id: str) -> None:
        """Ends the sandbox in whatever state it is. Nothing is left when this returns."""
        entry = await self._access.find(workspace, sandbox_id)
        if entry.record.status is Status.CREATING and entry.creating is not None:
            entry.doomed = True
            entry.creating.cancel()
            await asyncio.wait({entry.creating})
            if self._supervisor.get(sandbox_id) is not entry:
                return
        await self._supervisor.post(entry, Event.DELETE, reason=TerminationReason.DELETED)

    async def set_ttl(
        self, workspace: str, sandbox_id: str, ttl_seconds: int | None, persistent: bool | None
    ) -> tuple[Entry, Sandbox]:
        """Counts the TTL anew from now; what is not given stays as it is."""
        entry = await self._access.find(workspace, sandbox_id)
        now = self._clock.now()

        def change(record: Sandbox) -> Sandbox:
            _still_there(record)
            ttl = record.ttl_seconds if ttl_seconds is None else ttl_seconds
            keep = record.persistent if persistent is None else persistent
            return rearmed(record, now, ttl, keep)

        return entry, await self._supervisor.change(entry, change)

    async def set_idle(
        self, workspace: str, sandbox_id: str, idle_seconds: int | None, action: IdleAction | None
    ) -> Sandbox:
        """From when on it counts as idle, and what happens then; what is not given stays as it is."""
        entry = await self._access.find(workspace, sandbox_id)

        def change(record: Sandbox) -> Sandbox:
            _still_there(record)
            seconds = record.idle_seconds if idle_seconds is None else idle_seconds
            return replace(record, idle_seconds=seconds, idle_action=action or record.idle_action)

        entry.last_activity = self._clock.monotonic()
        return await self._supervisor.change(entry, change)

    async def wait(self, workspace: str, sandbox_id: str, wanted: frozenset[Status], timeout: float) -> Sandbox:
        """The record as soon as it is in one of the `wanted` states, or can get there by itself no more, or when
        `timeout` seconds have passed. Raises `sandbox.not_found`, also for one that ends meanwhile."""
        deadline = self._clock.monotonic() + timeout
        while True:
            entry = await self._access.find(workspace, sandbox_id)
            left = deadline - self._clock.monotonic()
            if entry.record.status in wanted or entry.record.status is Status.FAILED or left <= 0:
                return entry.record
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, LONGEST_LOOK)):
                    await entry.moved.wait()

    async def set_metadata(self, workspace: str, sandbox_id: str, changes: Mapping[str, str | None]) -> Sandbox:
        """Sets keys; None removes one."""
        entry = await self._access.find(workspace, sandbox_id)

        def change(record: Sandbox) -> Sandbox:
            _still_there(record)
            merged = {**record.metadata, **changes}
            return replace(record, metadata={k: v for k, v in merged.items() if v is not None})

        return await self._supervisor.change(entry, change)


def _still_there(record: Sandbox) -> None:
    if record.status in {Status.DELETING, Status.DELETED}:
        raise ClocheError("sandbox.not_found", f"sandbox {record.id} not found")
