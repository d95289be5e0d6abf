"""Machines before they are sandboxes: launch, restore, greet, warm, and get rid of one.

A slot is a machine with its directory and the link to its agent. Its id becomes the id of the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cloche_server.app.steps import to_the_end
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import id_from_random
from cloche_server.core.network import GUEST_NETWORK
from cloche_server.core.ports import (
    BakedTemplate,
    BootFiles,
    Card,
    Engine,
    Machine,
    Membership,
    Network,
    SavedState,
    Trust,
)
from cloche_server.core.records import BootMode, Resources, Sandbox, Shape
from cloche_server.guest.client import GuestClient
from cloche_server.guest.types import ExecRequest, RenewRequest
from cloche_server.host import files
from cloche_server.host.clock import random_bytes
from cloche_server.storage.layers import Layers, read_header
from cloche_server.storage.templates import TemplateMeta
from cloche_server.telemetry import log

_log = log.get("machines")

ENTROPY_BYTES = 64
#: Under emulation on a busy host the first answer of a restored guest can take long.
FIRST_ANSWER_TIMEOUT = 60.0
#: A guest that boots has to answer within this (seconds).
BOOT_TIMEOUT = 180.0


@dataclass(frozen=True, slots=True)
class Source:
    """What a machine continues from instead of its template: `layer` is the sealed layer its disk is laid over. Without
    `state` there is nothing but that disk, which `boot` starts."""

    template: BakedTemplate
    layer: str
    disk_mb: int
    state: SavedState | None
    mode: BootMode
    boot: BootFiles | None = None


@dataclass(slots=True)
class Slot:
    """One machine that is not (yet) a sandbox. `restored` tells which of its parts are alive."""

    id: str
    template: BakedTemplate
    directory: Path
    machine: Machine
    guest: GuestClient
    mode: BootMode
    disk_mb: int
    layer: str
    restored: bool = False
    #: Whether it has its own random numbers and names. It has run since, so they are nobody else's.
    renewed: bool = False
    #: Whether it has done in the pool what takes long the first time.
    practised: bool = False
    timings: dict[str, float] = field(default_factory=dict)


class Machines:
    """Makes and unmakes slots on one engine below one directory."""

    def __init__(self, engine: Engine, root: Path, gate: asyncio.Semaphore, layers: Layers, network: Network) -> None:
        self.engine = engine
        self.network = network
        self.broker: Trust | None = None
        self.groups: Membership | None = None
        self.root = root
        self.layers = layers
        self._gate = gate
        #: Ids of machines that are gone and whose directory may still be there.
        self._rest: set[str] = set()
        #: And those whose slot has resisted.
        self._unplugged: set[str] = set()

    def new_id(self) -> str:
        return id_from_random(random_bytes(16))

    async def launch(
        self, template: BakedTemplate, machine_id: str, mode: BootMode, source: Source | None = None
    ) -> Slot:
        """A process on a disk layer of its own that waits for its restore. Leaves nothing when it raises."""
        directory = self.root / machine_id
        try:
            async with self._gate:
                below = source.layer if source is not None else None
                # To its end: a thread goes on when its caller is cancelled, and would make a layer of nobody.
                await to_the_end(asyncio.to_thread(self.layers.create, machine_id, template, below))
                disk = self.layers.path(machine_id)
                state = source.state if source is not None else None
                if source is not None and source.boot is not None and state is None:
                    machine = await self._boot(machine_id, source.boot, template.shape, disk)
                else:
                    async with self._card(machine_id) as nic:
                        machine = await self.engine.launch(machine_id, directory, template, disk, state, nic=nic)
        except BaseException:
            await to_the_end(self._remove(machine_id, machine_id))
            raise
        slot = self._slot(machine_id, template, machine, mode, machine_id)
        if source is not None:
            slot.disk_mb = source.disk_mb
        return slot

    async def relaunch(
        self, template: BakedTemplate, machine_id: str, layer: str, state: SavedState, mode: BootMode = BootMode.WAKE
    ) -> Slot:
        """A process for a sandbox that has a directory and a layer already. They stay when it raises."""
        async with self._gate:
            directory = self.root / machine_id
            async with self._card(machine_id) as nic:
                machine = await self.engine.launch(
                    machine_id, directory, template, self.layers.path(layer), state, nic=nic
                )
        return self._slot(machine_id, template, machine, mode, layer)

    async def boot(self, meta: TemplateMeta, machine_id: str, layer: str, resources: Resources) -> Slot:
        """A process that boots the disk of a sandbox. Directory and layer stay when it raises."""
        try:
            disk_mb = (await asyncio.to_thread(read_header, self.layers.path(layer))).size >> 20
        except (OSError, ValueError) as error:
            raise ClocheError("sandbox.boot_failed", "the disk of the sandbox is missing or damaged") from error
        async with self._gate:
            machine = await self._boot(machine_id, meta.boot, resources.shape, self.layers.path(layer))
        slot = self._slot(machine_id, meta.template, machine, BootMode.COLD, layer)
        slot.disk_mb = disk_mb
        return slot

    async def _boot(self, machine_id: str, boot: BootFiles, shape: Shape, disk: Path) -> Machine:
        zeros = await asyncio.to_thread(self.layers.zero_memory, shape.memory_mb)
        async with self._card(machine_id) as nic:
            return await self.engine.boot(machine_id, self.root / machine_id, boot, shape, zeros, disk, nic=nic)

    @contextlib.asynccontextmanager
    async def _card(self, machine_id: str) -> AsyncIterator[int | None]:
        """A slot for a machine, whose card it inherits while this lasts. When the start fails there is no slot."""
        card: Card | None = None
        try:
            card = await self.network.open(machine_id)
            yield card.fd if card is not None else None
        except BaseException:
            await to_the_end(self.unplug(machine_id))
            raise
        finally:
            if card is not None:
                card.close()

    async def plug_in(self, record: Sandbox) -> str | None:
        """Before its user's code runs: what its policy allows is carried from now on. Returns the certificate of the
        authority that the guest has to trust, if any. Raises `network.unavailable`, `secret.unavailable`,
        `secret.not_found`."""
        trusted = await self.broker.ready(record) if self.broker is not None else None
        await self.network.admit(record.id, record.workspace, record.network, record.grants)
        if self.groups is not None:
            await self.groups.joined(record)
        return trusted

    def place(self, workspace: str, group: str | None, sandbox_id: str) -> dict[str, Any]:
        """What the record of a new sandbox says about its network group. Raises `request.invalid`."""
        return {} if self.groups is None else self.groups.place(workspace, group, sandbox_id)

    def left(self, record: Sandbox) -> None:
        """Of a sandbox that came to nothing: its group is told."""
        if self.groups is not None:
            self.groups.touch(record)

    async def unplug(self, machine_id: str) -> None:
        """Removes the slot of a machine that has ended. What resists is tried again by `remove_rest`."""
        try:
            await self.network.close(machine_id)
        except (OSError, ClocheError) as error:
            self._unplugged.add(machine_id)
            _log.warning("slot.not_removed", machine=machine_id, error=str(error))
        else:
            self._unplugged.discard(machine_id)

    def _slot(self, machine_id: str, template: BakedTemplate, machine: Machine, mode: BootMode, layer: str) -> Slot:
        guest = GuestClient(str(machine.agent_socket))
        return Slot(machine_id, template, self.root / machine_id, machine, guest, mode, template.disk_mb, layer)

    async def restore(self, slot: Slot, before_run: Callable[[], None] | None = None) -> None:
        """Loads the snapshot, calls `before_run` on a thread, starts the vCPUs and waits for the agent's first word. A
        machine that boots is only waited for."""
        if slot.mode is BootMode.COLD:
            await slot.guest.connect(timeout=BOOT_TIMEOUT)
            slot.restored = True
            return
        async with self._gate:
            await slot.machine.restore(before_run)
            slot.restored = True
            await slot.guest.connect(timeout=FIRST_ANSWER_TIMEOUT)

    async def renew(
        self,
        slot: Slot,
        *,
        names: bool = True,
        booted: bool = False,
        warm: bool = False,
        thaw: bool = False,
        ca_pem: str | None = None,
    ) -> None:
        """Gives a restored machine its own clock, random numbers and, unless it is the one it was, `names`, before any
        user code. `booted`: it comes from its own disk, where its machine-id is. `thaw`: it was captured with its
        commands frozen, and they go on afterwards. Raises `sandbox.boot_failed` when they have gone on before."""
        result = await slot.guest.renew(
            RenewRequest(
                entropy=random_bytes(ENTROPY_BYTES),
                time_now=True,
                hostname=hostname(slot.id) if names else None,
                machine_id=random_bytes(16).hex() if names and not booted else None,
                warm=warm,
                thaw=thaw or (slot.template.thaw and not booted),
                network=GUEST_NETWORK if self.network.enabled else None,
                ca_pem=ca_pem,
            ),
            timeout=FIRST_ANSWER_TIMEOUT,
        )
        if names and "thawed_early" in result.steps:
            raise ClocheError(
                "sandbox.boot_failed",
                f"the copy {slot.id} was not ready in time: its programs have run with the random numbers of the "
                "original, so it was ended; try again when this host has less to do",
                retry_after=5.0,
            )
        slot.renewed = True

    async def greet(self, slot: Slot, ca_pem: str | None = None) -> None:
        """Sets the clock of a renewed machine that has waited, and so makes sure that it answers."""
        await slot.guest.renew(RenewRequest(time_now=True, ca_pem=ca_pem), timeout=FIRST_ANSWER_TIMEOUT)

    async def grow_disk(self, slot: Slot, disk_mb: int) -> None:
        """Grows the disk of a restored machine and the file system on it, online."""
        if disk_mb == slot.disk_mb:
            return
        await slot.machine.grow_disk(disk_mb)
        await slot.guest.renew(RenewRequest(grow_disk=True, time_now=True), timeout=FIRST_ANSWER_TIMEOUT)
        slot.disk_mb = disk_mb

    async def discard(self, slot: Slot) -> None:
        """Ends the machine and removes all of it, also when its caller is cancelled. Idempotent."""
        await to_the_end(self._discard(slot))

    async def _discard(self, slot: Slot) -> None:
        try:
            await slot.guest.aclose()
        finally:
            try:
                await slot.machine.kill()
            finally:
                slot.machine.release()
                await self._remove(slot.id, slot.layer)

    async def _remove(self, machine_id: str, layer: str) -> None:
        try:
            await self.remove_directory(machine_id)
        finally:
            await self.release_layer(layer)

    async def release_layer(self, layer: str) -> None:
        """Lets go of a disk layer; one that nobody holds any more is removed."""
        if layer:
            await asyncio.to_thread(self.layers.release, layer)

    async def remove_directory(self, machine_id: str) -> None:
        """What cannot be removed now is tried again by `remove_rest`."""
        self._rest.add(machine_id)
        await self.unplug(machine_id)
        await asyncio.to_thread(files.remove_tree, self.root / machine_id)
        self._rest.discard(machine_id)

    async def remove_rest(self) -> None:
        """Removes directories that resisted, for instance because there was no descriptor left."""
        for machine_id in list(self._unplugged):
            await self.unplug(machine_id)
        await asyncio.to_thread(self.engine.clear_rest)
        for machine_id in list(self._rest):
            try:
                await self.remove_directory(machine_id)
            except (OSError, ClocheError) as error:
                _log.warning("directory.not_removed", machine=machine_id, error=str(error))


def hostname(machine_id: str) -> str:
    return "sb-" + "".join(c for c in machine_id if c.isalnum())[:12]


async def prepare_for_bake(agent_socket: Path, furnish: Callable[[GuestClient], Awaitable[None]]) -> None:
    """Waits for the agent of a cold boot, runs what every sandbox will run first, lets `furnish` do what this template
    has of its own, and syncs: all that was touched is then in the snapshot's memory."""
    guest = GuestClient(str(agent_socket))
    try:
        await guest.connect(timeout=240)
        # Placeholders as long as what every sandbox writes over them: that needs no new block of the disk.
        names = RenewRequest(
            time_now=True, hostname=hostname("0" * 20), machine_id="0" * 32, warm=True, network=GUEST_NETWORK
        )
        await guest.renew(replace(names, entropy=random_bytes(ENTROPY_BYTES)), timeout=60)
        for argv in WARM_UP:
            await run_quietly(guest, argv)
        await furnish(guest)
        await guest.quiesce()
    finally:
        await guest.aclose()


#: Programs whose files should be in the page cache of the snapshot.
WARM_UP: tuple[tuple[str, ...], ...] = (
    ("/bin/sh", "-c", "true"),
    ("/bin/bash", "-c", "echo warm | cat; ls / >/dev/null; id >/dev/null"),
    ("/usr/bin/env", "python3", "-c", "import json, os, sys, subprocess, re; print('warm')"),
    ("/bin/sync",),
)


async def run_quietly(guest: GuestClient, argv: tuple[str, ...]) -> None:
    """Runs a command for its side effects on caches. That it is missing in a template is no error."""
    try:
        async with guest.exec(ExecRequest(id="warm-" + random_bytes(4).hex(), argv=argv, timeout_ms=60_000)) as call:
            async for _ in call:
                pass
    except ClocheError as error:
        _log.warning("warm_up.failed", program=argv[0], code=error.code)
