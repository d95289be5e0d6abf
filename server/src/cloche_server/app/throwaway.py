"""A sandbox that is nobody's and lives only for its self-test."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cloche_server.app.machines import Machines
from cloche_server.app.netprobes import NetworkProbes
from cloche_server.app.selftest import Found, Target, probe_all, probe_guest, probe_vmm
from cloche_server.core.ports import Engine, Network
from cloche_server.core.records import BootMode
from cloche_server.host import files
from cloche_server.storage.layers import Layers
from cloche_server.storage.templates import TemplateMeta


async def probe_throwaway(engine: Engine, network: Network, data: Path, meta: TemplateMeta) -> list[Found]:
    """Restores a template, runs all probes and leaves nothing. Raises what a create raises."""
    with files.staging(data / "run") as work:
        work.rmdir()  # the engine makes it
        machines = Machines(engine, work.parent, asyncio.Semaphore(1), Layers(data), network)
        slot = await machines.launch(meta.template, work.name, BootMode.SNAPSHOT)
        try:
            await machines.restore(slot)
            await machines.renew(slot)
            disk, memory = machines.layers.path(slot.layer), meta.template.directory / "mem"
            target = Target(slot.id, slot.machine, slot.guest, disk, memory)
            return await probe_all([probe_vmm, probe_guest, NetworkProbes(network, None).probe], target)
        finally:
            await asyncio.shield(machines.discard(slot))
