"""Captures of a running sandbox: what forks, snapshots and hibernation have in common.

Commands are frozen first, so that nothing runs in a copy before it has random numbers of its own. Then the vCPUs
stand still while memory and disk are taken, and everything goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Final

from cloche_server.app.entry import Entry, illegal
from cloche_server.app.machines import Machines
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import id_from_random
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.ports import BakedTemplate, BootFiles, Captured
from cloche_server.core.records import Sandbox
from cloche_server.host.clock import random_bytes
from cloche_server.storage.templates import TemplateCatalog
from cloche_server.telemetry import log

_log = log.get("capturing")

#: After this the guest goes on by itself, should this server end in the middle (ms of its own time, which does not pass
#: while its vCPUs stand still). A copy has so long until its renewal; one that takes longer, on a host that has far too
#: much to do, has gone on with the random numbers of the others, and is ended.
THAW_AFTER_MS: Final = 15_000
FREEZE_TIMEOUT: Final = 10.0


class Capturer:
    """Takes a sandbox at one moment. Its methods run inside `Supervisor.perform`."""

    def __init__(self, supervisor: Supervisor, machines: Machines, catalog: TemplateCatalog) -> None:
        self._supervisor = supervisor
        self._machines = machines
        self._catalog = catalog

    def template(self, entry: Entry) -> BakedTemplate:
        """The template whose memory file the machine has mapped. Raises `template.corrupt`."""
        return self.template_by_id(entry.record.template_id)

    def template_by_id(self, template_id: str) -> BakedTemplate:
        """Raises `template.corrupt`."""
        return self._catalog.existing(template_id).template

    def has_template(self, template_id: str) -> bool:
        return self._catalog.get(template_id) is not None

    def boot_files(self, template_id: str) -> BootFiles:
        """What a machine over the disk of this template boots from. Raises `template.corrupt`."""
        return self._catalog.existing(template_id).boot

    async def zeros(self, record: Sandbox) -> Path | None:
        """The file of zeros that the memory of a sandbox differs from; None when it is that of its template."""
        if not record.cold:
            return None
        return await asyncio.to_thread(self._machines.layers.zero_memory, record.resources.memory_mb)

    async def sealed(self, entry: Entry, *, event: Event, memory: bool = True) -> tuple[Captured, str]:
        """Disk and, with `memory`, memory of a running or paused sandbox, which goes on over a fresh layer; without
        `memory` also of one at rest. The sealed layer is held once for the caller, who has to release it. `event` is
        what is told when the state does not allow it."""
        record, machine = entry.record, entry.machine
        at_rest = not memory and machine is None and record.status in {Status.STOPPED, Status.FAILED}
        if not at_rest and (record.status not in {Status.RUNNING, Status.PAUSED} or machine is None):
            raise illegal(record, event)
        if not record.layer_id:
            raise ClocheError("sandbox.capture_failed", f"the sandbox {record.id} was made before disks had layers")
        layers, old = self._machines.layers, record.layer_id
        new = id_from_random(random_bytes(16))
        path = await asyncio.to_thread(layers.create, new, self.template(entry), old)

        def recorded() -> Awaitable[None]:
            return self._supervisor.amend(entry, layer_id=new)

        try:
            if machine is None:
                await recorded()
                return Captured(b"", None, 0.0), old
            if not memory:
                await self._written_out(entry)
            async with self.frozen(entry, disk=not memory):
                captured = await machine.capture(memory=memory, new_layer=path, recorded=recorded, goes_on=True)
        except BaseException:
            await asyncio.shield(self._settle(entry, old, new))
            raise
        # The hold of the sandbox on the old layer becomes the caller's; the new one was made with the sandbox's.
        return captured, old

    async def _settle(self, entry: Entry, old: str, new: str) -> None:
        """A capture has failed: the new layer goes, unless the machine writes to it already."""
        used = True
        with contextlib.suppress(Exception):
            if entry.machine is not None:
                used = await entry.machine.active_layer() == new
        if used and entry.record.layer_id != new:
            await self._supervisor.amend(entry, layer_id=new)
        await self._machines.release_layer(old if used else new)

    async def _written_out(self, entry: Entry) -> None:
        """All that its guest has in memory for the disk is on the disk. The commands of a paused sandbox stay frozen
        while its vCPUs run for that."""
        assert entry.machine is not None
        assert entry.guest is not None
        paused = entry.record.status is Status.PAUSED
        try:
            if paused:
                await entry.machine.resume()
            try:
                await entry.guest.quiesce()
            finally:
                if paused:
                    await asyncio.shield(entry.machine.pause())
        except ClocheError as error:
            raise ClocheError(
                "sandbox.capture_failed", f"the disk of the sandbox could not be brought up to date: {error.message}"
            ) from error

    @contextlib.asynccontextmanager
    async def frozen(self, entry: Entry, *, disk: bool = False) -> AsyncIterator[None]:
        """While its commands, and with `disk` its file system, are frozen. Those of a paused sandbox are already."""
        guest = entry.guest
        if entry.record.status is Status.PAUSED or guest is None:
            yield
            return
        await self.freeze(entry, disk=disk)
        try:
            yield
        finally:
            if entry.machine is not None and entry.guest is guest:
                await asyncio.shield(self.thaw(entry))

    async def freeze(self, entry: Entry, *, disk: bool = False) -> None:
        """Raises `sandbox.capture_failed`, `sandbox.unreachable`."""
        assert entry.guest is not None
        try:
            await entry.guest.freeze(disk=disk, timeout_ms=THAW_AFTER_MS, timeout=FREEZE_TIMEOUT)
        except ClocheError as error:
            if not error.code.startswith("guest."):
                raise
            raise ClocheError(
                "sandbox.capture_failed", f"the commands of the sandbox could not be frozen: {error.message}"
            ) from error

    async def thaw(self, entry: Entry) -> None:
        """Never raises."""
        try:
            if entry.guest is not None:
                await entry.guest.thaw(keep=False, timeout=FREEZE_TIMEOUT)
        except Exception as error:  # noqa: BLE001 - it thaws by itself after a while
            _log.warning("thaw.failed", sandbox=entry.record.id, error=repr(error))
