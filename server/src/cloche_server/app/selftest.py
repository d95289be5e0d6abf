"""Self-tests: attempts to get out of a sandbox or to see more than is its own, and whether the wall held.

The host's side is looked at and tried from outside, so its answers are the kernel's. What is tried inside the guest is
told by the guest, whose root may lie; it is there to find mistakes of ours, not of an attacker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from cloche_server.app.access import Access
from cloche_server.app.machines import Machines
from cloche_server.core.errors import ClocheError
from cloche_server.core.network import NetworkMode, NetworkPolicy
from cloche_server.core.ports import Machine
from cloche_server.core.probes import Probe, Skipped
from cloche_server.guest.client import GuestClient
from cloche_server.guest.frames import Output
from cloche_server.guest.types import ExecRequest
from cloche_server.host.clock import random_bytes
from cloche_server.storage.templates import TemplateCatalog

GUEST_TIMEOUT: Final = 30.0
_MOST_OUTPUT: Final = 64 * 1024
_MOST_DETAIL: Final = 200


class Target:
    """A running machine that is tested. `memory`: the file on the host that it has mapped."""

    def __init__(
        self,
        sandbox_id: str,
        machine: Machine,
        guest: GuestClient,
        disk: Path,
        memory: Path,
        policy: NetworkPolicy = NetworkPolicy(NetworkMode.NONE),  # noqa: B008 - frozen
    ) -> None:
        self.sandbox_id = sandbox_id
        self.machine = machine
        self.guest = guest
        self.disk = disk
        self.memory = memory
        self.policy = policy


Found = Probe | Skipped
Prober = Callable[[Target], Awaitable[Sequence[Found]]]


class SelfTests:
    """`probers` are asked one after the other; whoever builds another part of the wall adds its own."""

    def __init__(self, access: Access, machines: Machines, catalog: TemplateCatalog) -> None:
        self._access = access
        self._machines = machines
        self._catalog = catalog
        self.probers: list[Prober] = [probe_vmm, probe_guest]

    async def run(self, workspace: str, sandbox_id: str) -> list[Found]:
        """Raises what a command in the sandbox raises before it starts."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        record, machine = entry.record, entry.machine
        assert machine is not None, "what serves has a machine"
        memory = self._catalog.existing(record.template_id).template.directory / "mem"
        if record.cold:
            memory = await asyncio.to_thread(self._machines.layers.zero_memory, record.resources.memory_mb)
        disk = self._machines.layers.path(record.layer_id)
        with self._access.busy(entry):
            return await probe_all(self.probers, Target(record.id, machine, guest, disk, memory, record.network))


async def probe_all(probers: Sequence[Prober], target: Target) -> list[Found]:
    found: list[Found] = []
    for prober in probers:
        found += await prober(target)
    return found


async def probe_vmm(target: Target) -> Sequence[Probe]:
    """The process on the host."""
    return await asyncio.to_thread(target.machine.probe, target.disk, target.memory)


#: One line each: name, `ok` or `bad`, and what was seen.
_SCRIPT: Final = r"""
say() { printf '%s\t%s\t%s\n' "$1" "$2" "$3"; }
disks=$(ls /sys/block 2>/dev/null | grep -Ev '^(loop|ram|zram)' | tr '\n' ' ')
[ "$disks" = "vda " ] && say guest.disks ok "one disk" || say guest.disks bad "disks: $disks"
kinds=$(cat /sys/bus/virtio/devices/*/device 2>/dev/null | sort | tr '\n' ' ')
other=$(cat /sys/bus/virtio/devices/*/device 2>/dev/null | grep -Ev '^0x000[1234]$' | tr '\n' ' ')
[ -n "$kinds" ] && [ -z "$other" ] && say guest.devices ok "disk, network, serial, random" \
  || say guest.devices bad "virtio devices: $kinds"
[ -z "$(ls /sys/bus/pci/devices 2>/dev/null)" ] && say guest.pci ok "no PCI devices" || say guest.pci bad "PCI devices"
[ ! -e /dev/vsock ] && [ ! -e /dev/kvm ] && [ ! -e /dev/fw_cfg ] && say guest.host_devices ok "no vsock, no kvm" \
  || say guest.host_devices bad "a device that leads to the host"
shared=$(grep -E '[[:space:]](9p|virtiofs|nfs|nfs4|cifs|fuse|vboxsf)[[:space:]]' /proc/mounts | head -n 1)
[ -z "$shared" ] && say guest.host_files ok "no file system of a host" || say guest.host_files bad "$shared"
"""
_GUEST: Final = ("guest.disks", "guest.devices", "guest.pci", "guest.host_devices", "guest.host_files")


async def probe_guest(target: Target) -> Sequence[Probe]:
    """What root in the guest finds around it."""
    try:
        lines = (await output(target.guest, _SCRIPT)).splitlines()
    except ClocheError as error:
        return [Probe(name, False, f"it could not be tried: {error.message}") for name in _GUEST]
    told = {fields[0]: fields for line in lines if len(fields := line.split("\t", 2)) == 3}
    return [_told(name, told.get(name)) for name in _GUEST]


def _told(name: str, fields: list[str] | None) -> Probe:
    if fields is None:
        return Probe(name, False, "the guest has told nothing")
    shown = "".join(c if c.isprintable() else "?" for c in fields[2])[:_MOST_DETAIL]
    return Probe(name, fields[1] == "ok", f"the guest says: {shown}")


async def output(guest: GuestClient, script: str) -> str:
    """What a shell script prints, as much as is bearable. Raises ClocheError."""
    collected = b""
    wanted = ExecRequest(
        id="probe-" + random_bytes(4).hex(), argv=("/bin/sh", "-c", script), timeout_ms=round(GUEST_TIMEOUT * 1000)
    )
    async with guest.exec(wanted) as call:
        async for frame in call:
            if isinstance(frame, Output) and len(collected) < _MOST_OUTPUT:
                collected += frame.data
    return collected.decode("utf-8", "replace")
