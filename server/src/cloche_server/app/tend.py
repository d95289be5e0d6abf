"""House-keeping of the machines of all sandboxes."""

from __future__ import annotations

import asyncio

from cloche_server.app.machines import Machines
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.lifecycle import SERVING
from cloche_server.telemetry import log

_log = log.get("tend")

TEND_EVERY = 5.0


async def tend(supervisor: Supervisor, machines: Machines) -> None:
    """Every few seconds for as long as the server runs; cancel to stop."""
    while True:
        await asyncio.sleep(TEND_EVERY)
        for entry in supervisor.entries():
            if entry.machine is not None and entry.record.status in SERVING:
                try:
                    await entry.machine.tend()
                except Exception as error:  # noqa: BLE001 - one machine must never take the server with it
                    _log.error("machine.tend_failed", sandbox=entry.record.id, error=repr(error))
        await machines.remove_rest()
