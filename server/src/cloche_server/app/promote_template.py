"""Promotion: a snapshot becomes a template that sandboxes are made from by name.

The result is like what a bake makes: one memory, one device state, one disk. It depends on nothing that its snapshot
stood on but the root image and the boot files, which nobody writes to.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cloche_server.app.machines import Machines
from cloche_server.app.steps import to_the_end
from cloche_server.app.work import on_thread, staging
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import is_template_name
from cloche_server.host import files
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.host.confined import Confined
from cloche_server.settings import Settings
from cloche_server.storage.flatten import empty_overlay, flatten_disk, flatten_memory
from cloche_server.storage.layers import read_header
from cloche_server.storage.locate import find_recipe
from cloche_server.storage.snapshots import Snapshot, SnapshotCatalog
from cloche_server.storage.templates import TemplateCatalog, TemplateMeta
from cloche_server.telemetry import log

_log = log.get("promote")

_MIB = 1024 * 1024


class Promoter:
    """Promotions of one server wait for each other: each copies a whole memory."""

    def __init__(
        self,
        settings: Settings,
        machines: Machines,
        templates: TemplateCatalog,
        snapshots: SnapshotCatalog,
        clock: Clock,
        tool: Confined,
    ) -> None:
        self._settings = settings
        self._machines = machines
        self._templates = templates
        self._snapshots = snapshots
        self._clock = clock
        self._tool = tool
        self._one_at_a_time = asyncio.Lock()

    async def promote(
        self, workspace: str, snapshot_id: str, name: str, aliases: Sequence[str] = (), description: str = ""
    ) -> TemplateMeta:
        """The newest version of the template `name` of the workspace, made of a snapshot. Nothing is left when it
        raises: `request.invalid`, `template.name_taken`, `snapshot.not_found`, `snapshot.corrupt`,
        `snapshot.incompatible`, `template.corrupt`, `host.disk_full`."""
        snapshot = self._snapshots.get(workspace, snapshot_id)
        aliases = tuple(dict.fromkeys(one for one in aliases if one != name))
        if not snapshot.memory:
            raise ClocheError(
                "request.invalid",
                f"the snapshot {snapshot.id} holds no memory; take one with memory and promote that",
            )
        layers = self._machines.layers
        layers.hold(snapshot.layer_id)
        done: list[TemplateMeta] = []
        try:
            try:
                await asyncio.to_thread(self._check_names, workspace, name, aliases)
                async with self._one_at_a_time:
                    # What came before may have them.
                    await asyncio.to_thread(self._check_names, workspace, name, aliases)
                    done.append(await self._make(snapshot, name, aliases, description))
            finally:
                await to_the_end(self._machines.release_layer(snapshot.layer_id))
        except BaseException:
            for one in done:  # whoever went away while the layer was let go has not learnt of it
                await to_the_end(asyncio.to_thread(self._templates.remove, one))
            raise
        made = done[0]
        _log.info(
            "template.promoted", template_id=made.template.id, snapshot=snapshot.id, size_bytes=made.template.size_bytes
        )
        return made

    def _check_names(self, workspace: str, name: str, aliases: Sequence[str]) -> None:
        mine = [m for m in self._templates.visible(workspace) if m.workspace == workspace]
        for one in (name, *aliases):
            if not is_template_name(one):
                raise ClocheError(
                    "request.invalid",
                    "the name of a template has at most 63 of a-z, 0-9, dot, underscore and hyphen, "
                    "and begins with a letter or a digit",
                    details={"field": "name" if one == name else "aliases"},
                )
            if self._templates.resolve(one) is not None or self._is_recipe(one):
                raise ClocheError(
                    "template.name_taken",
                    f"{one} is a template of all workspaces, which a promotion does not replace; choose another name",
                    details={"name": one},
                )
            other = next((m for m in mine if m.template.name != name and one in (m.template.name, *m.aliases)), None)
            if other is not None:
                raise ClocheError(
                    "template.name_taken",
                    f"{one} is in use by your template {other.template.name}; choose another name, or delete that one",
                    details={"name": one},
                )

    def _is_recipe(self, name: str) -> bool:
        try:
            find_recipe(self._settings.recipes, name)
        except ClocheError:
            return False
        return True

    async def _make(self, snapshot: Snapshot, name: str, aliases: Sequence[str], description: str) -> TemplateMeta:
        below = self._templates.existing(snapshot.template_id)
        await asyncio.to_thread(self._templates.check, below)
        top = self._machines.layers.path(snapshot.layer_id)
        await asyncio.to_thread(self._check_room, snapshot)
        template_id = f"{name}-{snapshot.shape}-{random_bytes(4).hex()}"
        made: list[TemplateMeta] = []
        meta = self._meta(snapshot, below, template_id, name, aliases, description)
        try:
            async with staging(self._templates.root) as staged:
                _log.info("promote.progress", text="writing memory and device state", template_id=template_id)
                await self._write_memory(snapshot, below, staged)
                _log.info("promote.progress", text="flattening the disk", template_id=template_id)
                size = await asyncio.to_thread(lambda: read_header(top).size)
                await flatten_disk(self._tool, top, below.boot.root_image, staged / "disk.qcow2", size)
                await empty_overlay(staged / "overlay.qcow2", f"../../templates/{template_id}/disk.qcow2", size)
                work = asyncio.to_thread(lambda: made.append(self._templates.publish(staged, meta)))
                await to_the_end(work)
        except BaseException as error:
            for one in made:
                await to_the_end(asyncio.to_thread(self._templates.remove, one))
            if isinstance(error, (OSError, ValueError)):
                raise _told(error) from error
            raise
        return made[0]

    async def _write_memory(self, snapshot: Snapshot, below: TemplateMeta, staged: Path) -> None:
        fingerprint = self._machines.engine.fingerprint

        def write(stop: Any) -> None:
            state = self._snapshots.load(snapshot, fingerprint)
            try:
                base = None if snapshot.cold else below.template.directory / "mem"
                size = snapshot.shape.memory_mb * _MIB
                flatten_memory(base, state.pages, size, staged / "mem", stop)
                shutil.copyfile(state.device_state, staged / "dev")
            finally:
                state.pages.close()

        await on_thread(write)

    def _check_room(self, snapshot: Snapshot) -> None:
        layers = self._machines.layers
        need = snapshot.shape.memory_mb * _MIB + layers.bytes_of(snapshot.layer_id) + 64 * _MIB
        free = files.free_bytes(self._templates.root.parent)
        if free < need:
            raise ClocheError(
                "host.disk_full",
                f"the template may need {need >> 20} MiB of free disk, there are {free >> 20} MiB; nothing was made",
            )

    def _meta(
        self,
        snapshot: Snapshot,
        below: TemplateMeta,
        template_id: str,
        name: str,
        aliases: Sequence[str],
        description: str,
    ) -> dict[str, Any]:
        data, defaults = self._templates.root.parent, snapshot.defaults
        boot = {part: str(getattr(below.boot, part).relative_to(data)) for part in ("kernel", "initrd", "root_image")}
        return {
            "id": template_id,
            "name": name,
            "aliases": list(aliases),
            "description": description,
            "defaults": {"env": dict(defaults.env), "cwd": defaults.cwd, "user": defaults.user},
            "cpus": snapshot.shape.cpus,
            "memory_mb": snapshot.shape.memory_mb,
            "disk_mb": snapshot.disk_mb,
            "accel": self._machines.engine.isolation.accel,
            "fingerprint": snapshot.fingerprint,
            "inputs": f"snapshot {snapshot.id}",
            "boot": boot,
            "created_at": self._clock.now(),
            "workspace": snapshot.workspace,
            "thaw": True,
            "snapshot_id": snapshot.id,
        }


def _told(error: Exception) -> ClocheError:
    if isinstance(error, OSError) and files.is_full(error):
        return ClocheError("host.disk_full", "the disk of the host is full; nothing was made")
    return ClocheError("snapshot.corrupt", "a file that the snapshot stands on is missing or damaged; nothing was made")
