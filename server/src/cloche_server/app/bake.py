"""Baking a template: root file system, kernel, initramfs, cold boot, snapshot, proof.

The inputs are digested into the template's id, so that baking what is there already is a look-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cloche_server.app.machines import Machines, prepare_for_bake, run_quietly
from cloche_server.app.template_service import furnish, service_answers
from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import BootFiles, Engine, Network
from cloche_server.core.records import BootMode, ExecDefaults, Furnishing, Shape
from cloche_server.host import files
from cloche_server.host.clock import Clock
from cloche_server.storage.initramfs import build_initramfs
from cloche_server.storage.kernel import fetch_kernel
from cloche_server.storage.layers import Layers
from cloche_server.storage.recipe import Recipe
from cloche_server.storage.rootfs import build_rootfs
from cloche_server.storage.templates import TemplateCatalog, TemplateMeta
from cloche_server.telemetry import log

_log = log.get("bake")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What a template is baked from, whatever its shape."""

    name: str
    aliases: tuple[str, ...]
    description: str
    defaults: ExecDefaults
    disk_mb: int
    boot: BootFiles
    furnishing: Furnishing = field(default_factory=Furnishing)


class Baker:
    """Bakes templates on one engine. Bakes of one process wait for each other: each boots a machine."""

    def __init__(self, data: Path, engine: Engine, catalog: TemplateCatalog, clock: Clock, network: Network) -> None:
        self._network = network
        self._data = data
        self._engine = engine
        self._catalog = catalog
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()

    async def gather(self, recipe: Recipe, agent: Path, progress: Progress) -> Ingredients:
        """Builds or finds everything below a template. Raises `template.bake_failed`."""
        image = await build_rootfs(recipe, self._data / "images", recipe.disk_mb, progress)
        kernel = await fetch_kernel(self._data, progress)
        initrd = await build_initramfs(kernel, agent, self._data / "kernels" / kernel.version)
        return Ingredients(
            recipe.name,
            recipe.aliases,
            recipe.description,
            ExecDefaults(dict(recipe.defaults.env), recipe.defaults.workdir, recipe.defaults.user),
            recipe.disk_mb,
            BootFiles(kernel.vmlinuz, initrd, image.path),
            Furnishing(
                recipe.service.argv if recipe.service else (),
                recipe.service.port if recipe.service else 0,
                recipe.warm,
                recipe.memory_mb,
                recipe.min_memory_mb,
            ),
        )

    async def bake(self, wanted: Ingredients, shape: Shape, progress: Progress) -> TemplateMeta:
        """The baked template of these ingredients and this shape; found when it is there and whole."""
        inputs = self._inputs(wanted, shape)
        async with self._one_at_a_time:
            found = self._catalog.find(wanted.name, shape, self._engine.fingerprint)
            if found is not None and found.inputs == inputs:
                try:
                    await asyncio.to_thread(self._catalog.check, found)
                    return found
                except ClocheError as error:
                    progress(error.message)
                    await asyncio.to_thread(self._catalog.remove, found)
            return await self._bake(wanted, shape, inputs, progress)

    async def bake_like(self, model: TemplateMeta, shape: Shape, progress: Progress) -> TemplateMeta:
        """Another shape of a template that is baked already."""
        template = model.template
        wanted = Ingredients(
            template.name,
            model.aliases,
            model.description,
            model.defaults,
            template.disk_mb,
            model.boot,
            model.furnishing,
        )
        return await self.bake(wanted, shape, progress)

    def _inputs(self, wanted: Ingredients, shape: Shape) -> str:
        parts = [
            wanted.boot.root_image.parent.name,
            wanted.boot.kernel.parent.name,
            wanted.boot.initrd.name,
            self._engine.fingerprint,
            str(shape),
            str(wanted.disk_mb),
            json.dumps([dict(wanted.defaults.env), wanted.defaults.cwd, wanted.defaults.user]),
        ]
        if wanted.furnishing != Furnishing():
            parts.append(json.dumps(asdict(wanted.furnishing), sort_keys=True))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    async def _bake(self, wanted: Ingredients, shape: Shape, inputs: str, progress: Progress) -> TemplateMeta:
        template_id = f"{wanted.name}-{shape}-{inputs[:8]}"
        await asyncio.to_thread(self._catalog.sweep)
        self._check_room(shape)
        with files.staging(self._catalog.root) as staged, files.staging(self._data / "run") as work:
            progress(f"baking {wanted.name} with {shape.cpus} vCPU and {shape.memory_mb} MiB")

            async def prepare(agent_socket: Path) -> None:
                await prepare_for_bake(agent_socket, lambda guest: furnish(guest, wanted.furnishing, env, progress))

            env = wanted.defaults.env
            async with self._plugged("bake-" + work.name.strip(".")) as nic:
                await self._engine.bake(template_id, wanted.boot, shape, staged, work, prepare, progress, nic=nic)
            progress("checking and writing the template")
            meta = self._meta(wanted, shape, inputs, template_id)
            published = await asyncio.to_thread(self._catalog.publish, staged, meta)
        try:
            await self._prove(published, progress)
            await asyncio.to_thread(self._catalog.check, published)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._catalog.remove, published))
            raise
        _log.info("template.baked", template_id=template_id, size_bytes=published.template.size_bytes)
        return published

    @contextlib.asynccontextmanager
    async def _plugged(self, name: str) -> AsyncIterator[int | None]:
        """A slot in which nothing is carried: what is saved with a card needs one again, and no more."""
        card = await self._network.open(name)
        try:
            yield card.fd if card is not None else None
        finally:
            if card is not None:
                card.close()
            await asyncio.shield(self._network.close(name))

    def _check_room(self, shape: Shape) -> None:
        need = (shape.memory_mb + 512) * 1024 * 1024
        free = files.free_bytes(self._data)
        if free < need:
            raise ClocheError(
                "host.disk_full",
                f"baking needs {need >> 20} MiB of free disk below {self._data}, there are {free >> 20} MiB",
            )

    def _meta(self, wanted: Ingredients, shape: Shape, inputs: str, template_id: str) -> dict[str, Any]:
        boot = {
            part: str(getattr(wanted.boot, part).relative_to(self._data)) for part in ("kernel", "initrd", "root_image")
        }
        return {
            "id": template_id,
            "name": wanted.name,
            "aliases": list(wanted.aliases),
            "description": wanted.description,
            "defaults": {
                "env": dict(wanted.defaults.env),
                "cwd": wanted.defaults.cwd,
                "user": wanted.defaults.user,
            },
            "cpus": shape.cpus,
            "memory_mb": shape.memory_mb,
            "disk_mb": wanted.disk_mb,
            "accel": self._engine.isolation.accel,
            "fingerprint": self._engine.fingerprint,
            "inputs": inputs,
            "boot": boot,
            "created_at": self._clock.now(),
            **({"furnishing": asdict(wanted.furnishing)} if wanted.furnishing != Furnishing() else {}),
        }

    async def _prove(self, meta: TemplateMeta, progress: Progress) -> None:
        """Restores the new template once and runs a program in it, before anybody else may."""
        progress("restoring it once as a proof")
        with files.staging(self._data / "run") as work:
            work.rmdir()  # the engine makes it
            machines = Machines(self._engine, work.parent, asyncio.Semaphore(1), Layers(self._data), self._network)
            slot = await machines.launch(meta.template, work.name, BootMode.SNAPSHOT)
            try:
                await machines.restore(slot)
                await machines.renew(slot)
                await run_quietly(slot.guest, ("/bin/true",))
                await service_answers(slot.guest, meta.furnishing)
            finally:
                await asyncio.shield(machines.discard(slot))
