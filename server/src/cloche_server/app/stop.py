"""Stop and start: the guest shuts down in order, its disk is kept, and a start boots it again.

A stop never kills by itself: what does not end in time is told, and may still end. `force` kills after that time.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry, illegal, rearmed
from cloche_server.app.machines import Machines, Slot
from cloche_server.app.room import Room
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.records import BootMode, Sandbox
from cloche_server.host.clock import Clock
from cloche_server.storage.templates import TemplateCatalog
from cloche_server.telemetry import log

_log = log.get("stop")

#: Between SIGTERM and SIGKILL for what runs in the guest (seconds).
GRACE: Final = 5.0
_AT_REST: Final = frozenset({Status.STOPPED, Status.FAILED})


class StopVerbs:
    """Each method finds the sandbox, lets its task do the work, and returns the new record. Each may be repeated."""

    def __init__(
        self,
        access: Access,
        supervisor: Supervisor,
        machines: Machines,
        catalog: TemplateCatalog,
        room: Room,
        clock: Clock,
    ) -> None:
        self._access = access
        self._supervisor = supervisor
        self._machines = machines
        self._catalog = catalog
        self._room = room
        self._clock = clock

    # ---------------------------------------------------------------- stop

    async def stop(self, workspace: str, sandbox_id: str, timeout: float, *, force: bool = False) -> Sandbox:
        """Raises `sandbox.stop_timeout` when the guest has not shut down after `timeout` seconds: it may still do so,
        and nothing was killed. With `force` it is killed then."""
        entry = await self._access.awake(workspace, sandbox_id)
        await self._supervisor.perform(entry, lambda: self.ask(entry, timeout))
        deadline = time.monotonic() + timeout
        while entry.record.status is Status.STOPPING and (left := deadline - time.monotonic()) > 0:
            await self._moved(entry, left)
        if force and entry.record.status is Status.STOPPING and entry.machine is not None:
            await entry.machine.kill()
            await self._moved(entry, 10.0)
        if entry.record.status is Status.STOPPING:
            raise ClocheError(
                "sandbox.stop_timeout",
                f"the guest of {sandbox_id} has not shut down within {timeout:g} s; it was not killed",
                details={"status": entry.record.status.value},
            )
        return entry.record

    async def _moved(self, entry: Entry, seconds: float) -> None:
        moved = entry.moved
        try:
            async with asyncio.timeout(seconds):
                await moved.wait()
        except TimeoutError:
            pass

    async def ask(self, entry: Entry, timeout: float, reason: str = "asked") -> None:
        """Inside the task of the sandbox: has the guest shut down, and does not wait for it."""
        if entry.record.status in {Status.STOPPED, Status.STOPPING}:
            return
        if entry.record.status is not Status.RUNNING or entry.guest is None:
            raise illegal(entry.record, Event.STOP)
        await entry.processes.look(entry.guest)
        await entry.guest.shutdown(round(min(GRACE, max(0.0, timeout - 1)) * 1000))
        await self._supervisor.move(entry, Event.STOP, status_reason=reason)

    # ---------------------------------------------------------------- start

    async def start(self, workspace: str, sandbox_id: str) -> Sandbox:
        """Boots a stopped or failed sandbox from its disk. One that runs is left as it is. Raises
        `capacity.unavailable`, `sandbox.boot_failed`; it is then stopped, as before."""
        entry = await self._access.awake(workspace, sandbox_id)
        return await self._supervisor.perform(entry, lambda: self._start(entry))

    async def restart(self, workspace: str, sandbox_id: str, timeout: float, *, force: bool = False) -> Sandbox:
        """A stop, when there is something to stop, and a start."""
        entry = await self._access.awake(workspace, sandbox_id)
        if entry.record.status not in _AT_REST:
            await self.stop(workspace, sandbox_id, timeout, force=force)
        return await self.start(workspace, sandbox_id)

    async def _start(self, entry: Entry) -> Sandbox:
        record = entry.record
        if record.status is Status.RUNNING:
            return record
        if record.status not in _AT_REST or not record.layer_id:
            raise illegal(record, Event.START)
        self._access.check_budget(entry)
        began = self._clock.monotonic()
        meta = self._catalog.existing(record.template_id)
        if entry.machine is not None:  # it resisted when it was to end
            await entry.machine.kill()
            entry.machine.release()
            entry.machine = None
        await self._room.take(record.id)
        slot: Slot | None = None
        try:
            await self._supervisor.move(entry, Event.START)
            slot = await self._machines.boot(meta, record.id, record.layer_id, record.resources)
            await self._machines.restore(slot)
            ca_pem = await self._machines.plug_in(record)
            await self._machines.renew(slot, booted=True, ca_pem=ca_pem)
            if slot.disk_mb < record.resources.disk_mb:  # of a restore that did not come so far
                await self._machines.grow_disk(slot, record.resources.disk_mb)
        except BaseException as error:
            await asyncio.shield(self._not_started(entry, slot, error))
            raise
        entry.ended = asyncio.Event()
        self._supervisor.attach(entry, slot.machine, slot.guest)
        now = self._clock.now()
        entry.last_activity = self._clock.monotonic()
        return await self._supervisor.move(
            entry,
            Event.BOOTED,
            process=slot.machine.ref,
            isolation=self._machines.engine.isolation,
            started_at=now,
            boot_ms=max(1, round((self._clock.monotonic() - began) * 1000)),
            boot_mode=BootMode.COLD,
            cold=True,
            termination=None,
            ended_at=None,
            status_reason=None,
            expires_at=rearmed(record, now, record.ttl_seconds, record.persistent).expires_at,
        )

    async def _not_started(self, entry: Entry, slot: Slot | None, error: BaseException) -> None:
        _log.error("start.failed", sandbox=entry.record.id, error=repr(error))
        if slot is not None:
            await slot.guest.aclose()
            await slot.machine.kill()
            slot.machine.release()
            await self._machines.unplug(entry.record.id)
        self._room.give_back(entry.record.id)
        if entry.record.status is Status.STARTING:
            await self._supervisor.move(entry, Event.UNDONE, process=None)
