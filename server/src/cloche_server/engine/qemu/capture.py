"""A machine at one moment: device state, the pages that differ from its template, and a sealed disk layer.

The vCPUs stand still from `stop` to `cont`. What can be made ready before is made ready before; what can wait is
done after.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import Captured
from cloche_server.engine.qemu.qmp import QmpError, QmpLost
from cloche_server.host.pages import PAGE, Pages, Room, copy_out, find_region, written
from cloche_server.telemetry import log

if TYPE_CHECKING:
    from cloche_server.engine.qemu.machine import QemuMachine

_log = log.get("capture")

#: More room than what is written now: the guest runs on until it is stopped.
MORE_PAGES: Final = 2048


async def capture(
    machine: QemuMachine,
    *,
    memory: bool,
    new_layer: Path | None,
    recorded: Callable[[], Awaitable[None]] | None,
    goes_on: bool,
) -> Captured:
    """See `Machine.capture`."""
    pid, room, running = machine.ref.pid, None, False
    device_state = machine.directory / ".capture.dev"
    pages: Pages | None = None
    try:
        if memory:
            region = await asyncio.to_thread(find_region, pid, machine.memory)
            room = await asyncio.to_thread(lambda: Room((sum(c for _, c in written(region)) + MORE_PAGES) * PAGE))
        running = (await machine.command("query-status")).get("status") == "running"
        began = time.perf_counter()
        await machine.command("stop")
        if memory:
            await machine.save_device_state(device_state, last=not goes_on and new_layer is None)
            pages = await asyncio.to_thread(lambda: copy_out(region, written(region), room))
        if new_layer is not None:
            await machine.command(
                "blockdev-snapshot-sync",
                {"device": "d0", "snapshot-file": str(new_layer), "format": "qcow2", "mode": "existing"},
            )
        if recorded is not None:
            await recorded()
        if goes_on and running:
            await machine.command("cont")
        pause = (time.perf_counter() - began) * 1000
        state = await asyncio.to_thread(device_state.read_bytes) if memory else b""
        return Captured(state, pages, pause)
    except BaseException as error:
        if pages is not None:
            pages.close()
        if running:
            await asyncio.shield(_go_on(machine))
        if isinstance(error, QmpError | QmpLost | OSError):
            raise ClocheError("sandbox.capture_failed", f"the machine could not be captured: {error}") from error
        raise
    finally:
        if room is not None:
            room.close()
        device_state.unlink(missing_ok=True)


async def _go_on(machine: QemuMachine) -> None:
    try:
        await machine.command("cont")
    except (QmpError, QmpLost) as error:
        _log.error("capture.cont_failed", sandbox=machine.id, error=str(error))
