"""Import: a snapshot, and what it stands on, from an archive that may be hostile.

Everything is taken into a staging directory and compared there. What gets a name gets one of ours: fresh ids for the
snapshot, its layers and its template, and digests for boot files. Nothing that is here is ever replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cloche_server.app.machines import Machines
from cloche_server.app.steps import to_the_end
from cloche_server.app.template_keeper import BOOT
from cloche_server.app.work import on_thread, staging
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import id_from_random
from cloche_server.host import files, pages
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.host.confined import Confined
from cloche_server.settings import Settings
from cloche_server.storage import saved
from cloche_server.storage.archive import BOOT_FILES, TEMPLATE_FILES, Manifest, bad
from cloche_server.storage.archive_read import Unpacker
from cloche_server.storage.flatten import check_disk, empty_overlay
from cloche_server.storage.layers import SUFFIX, zero_memory
from cloche_server.storage.qcow2 import Front, read_front, rename_backing
from cloche_server.storage.snapshots import Snapshot, SnapshotCatalog
from cloche_server.storage.templates import TemplateCatalog, TemplateMeta
from cloche_server.telemetry import log

_log = log.get("import")

_MIB: Final = 1024 * 1024


@dataclass(slots=True)
class _Made:
    """What has been given a name so far."""

    template: TemplateMeta | None = None
    layers: list[str] = field(default_factory=list)
    snapshot: Snapshot | None = None


class Importer:
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

    async def take_in(
        self, workspace: str, body: AsyncIterator[bytes], name: str | None = None, length: int | None = None
    ) -> Snapshot:
        """A snapshot of the workspace, from the bytes of an archive. Nothing is left when it raises: `request.invalid`,
        `request.too_large`, `snapshot.incompatible`, `host.disk_full`, and what `body` raises. `length`: of the body,
        where it is known before."""
        limit = self._limit()
        if length is not None and length > limit:
            raise self._too_large(length)
        found: list[TemplateMeta] = []

        def judge(manifest: Manifest) -> set[str]:
            self._judge(manifest)
            here = self._here(workspace, manifest)
            if here is not None:
                found.append(here)
            elif not manifest.with_template:
                raise ClocheError(
                    "snapshot.incompatible",
                    "the archive was made without the template that its snapshot lies over, and that template is not "
                    "here; export it with `template=true`",
                )
            kept = {"snapshot/", "layers/"} if here is not None else {""}
            return {m.name for m in manifest.members if not m.name.startswith(tuple(kept))}

        async with staging(self._snapshots.root) as staged:
            try:
                manifest = await self._receive(body, Unpacker(staged, judge, self._reserve()), limit)
                return await self._install(workspace, manifest, staged, found[0] if found else None, name)
            except OSError as error:
                raise _told(error) from error

    # ---------------------------------------------------------------- before anything is kept

    def _limit(self) -> int:
        limit = self._settings.max_import_mb * _MIB
        if not limit:
            raise ClocheError(
                "snapshot.import_disabled",
                "this server takes no archives; its operator can allow them with the setting `max_import_mb`",
            )
        return limit

    def _reserve(self) -> int:
        return self._settings.disk_reserve_mb * _MIB

    async def _receive(self, body: AsyncIterator[bytes], unpacker: Unpacker, limit: int) -> Manifest:
        received = 0
        try:
            async for chunk in body:
                received += len(chunk)
                if received > limit:
                    raise self._too_large(received)
                await to_the_end(asyncio.to_thread(unpacker.feed, chunk))
            return unpacker.finish()
        finally:
            unpacker.close()

    def _too_large(self, size: int) -> ClocheError:
        most = self._settings.max_import_mb
        return ClocheError(
            "request.too_large",
            f"the archive holds {-(-size // _MIB)} MiB or more, this server takes {most} MiB (`max_import_mb`)",
            details={"limit_bytes": most * _MIB},
        )

    def _judge(self, manifest: Manifest) -> None:
        engine, settings = self._machines.engine, self._settings
        # A disk alone boots under any of them.
        if manifest.memory and manifest.fingerprint != engine.fingerprint:
            raise ClocheError(
                "snapshot.incompatible",
                f"the snapshot was taken under {manifest.fingerprint}; this host runs {engine.fingerprint}",
                details={"fingerprint": manifest.fingerprint, "host": engine.fingerprint},
            )
        size = sum(member.size for member in manifest.members)
        if size > settings.max_import_mb * _MIB:
            raise self._too_large(size)
        for what, value, most in (
            ("cpus", manifest.shape.cpus, settings.max_cpus),
            ("memory_mb", manifest.shape.memory_mb, settings.max_memory_mb),
            ("disk_mb", max(manifest.disk_mb, manifest.template.disk_mb), settings.max_disk_mb),
        ):
            if value > most:
                raise bad(f"its snapshot has {what} {value}, this host allows at most {most}")
        if files.free_bytes(self._snapshots.root) < self._reserve():
            raise ClocheError("host.disk_full", "the disk of the host has no room for an archive; nothing was imported")

    def _here(self, workspace: str, manifest: Manifest) -> TemplateMeta | None:
        """The template below, if it is here: one of all workspaces or of this one, byte for byte the same. That of
        another workspace is none, or its digests would open its memory."""
        wanted = manifest.template
        for meta in self._templates.all():
            if meta.workspace not in {None, workspace} or meta.fingerprint != manifest.fingerprint:
                continue
            same = meta.template.id == wanted.id and {n: meta.digests[n] for n in TEMPLATE_FILES} == wanted.digests
            came = meta.hidden and meta.origin == wanted.origin
            if (same or came) and meta.template.shape == wanted.shape:
                return meta
        return None

    # ---------------------------------------------------------------- from staging to its places

    async def _install(
        self, workspace: str, manifest: Manifest, staged: Path, here: TemplateMeta | None, name: str | None
    ) -> Snapshot:
        if here is not None:
            await asyncio.to_thread(self._templates.check, here)
        template_id = here.template.id if here is not None else f"import-{id_from_random(random_bytes(16))}"
        names = [id_from_random(random_bytes(16)) for _ in manifest.layers]
        work = asyncio.to_thread(_check_files, manifest, staged, names, template_id, new=here is None)
        await to_the_end(work)
        disks = [staged / f"layers/{number}.qcow2" for number in range(len(names))]
        if here is None:
            disks.append(staged / "template/disk.qcow2")
        for path in disks:
            if (wrong := await check_disk(self._tool, path)) is not None:
                raise bad(f"a disk in it {wrong}")
        digests = await on_thread(lambda _: [files.hash_file(path) for path in disks[: len(names)]])
        made = _Made()
        try:
            if here is None:
                size = manifest.template.disk_mb * _MIB
                await empty_overlay(
                    staged / "template/overlay.qcow2", f"../../templates/{template_id}/disk.qcow2", size
                )
                meta = self._template_meta(workspace, manifest, template_id)
                await to_the_end(asyncio.to_thread(self._publish_template, staged, manifest, meta, made))
            snapshot = self._snapshot(workspace, manifest, template_id, names[0], name)
            snapshot = replace(snapshot, layers=dict(zip(names, digests, strict=True)))
            described = _saved_meta(manifest, template_id)
            await to_the_end(asyncio.to_thread(self._publish, staged, names, snapshot, described, made))
        except BaseException:
            await to_the_end(asyncio.to_thread(self._undo, made))
            raise
        _log.info("snapshot.imported", snapshot=snapshot.id, template_id=template_id, new_template=here is None)
        return self._snapshots.get(workspace, snapshot.id)

    def _publish_template(self, staged: Path, manifest: Manifest, meta: dict[str, Any], made: _Made) -> None:
        root = self._templates.root.parent / BOOT
        root.mkdir(mode=0o700, exist_ok=True)
        with self._templates.boot_lock:
            for part in BOOT_FILES:
                path = staged / "boot" / part
                path.chmod(0o444)
                with contextlib.suppress(FileExistsError):  # the same bytes are there
                    os.link(path, root / manifest.member(f"boot/{part}").sha256)
            files.fsync_dir(root)
            made.template = self._templates.publish(staged / "template", meta)

    def _publish(
        self, staged: Path, names: list[str], snapshot: Snapshot, described: dict[str, Any], made: _Made
    ) -> None:
        chain = [(name, staged / f"layers/{number}.qcow2") for number, name in enumerate(names)]
        for _, path in chain:
            path.chmod(0o600)
        self._machines.layers.adopt(chain)
        made.layers = names
        if snapshot.cold:
            zero_memory(self._snapshots.root.parent, snapshot.shape.memory_mb)
        (staged / "snapshot").mkdir(mode=0o700, exist_ok=True)  # a disk alone has no members in it
        with self._templates.use_lock:
            made.snapshot = self._snapshots.adopt(staged / "snapshot", snapshot, described)
            if self._templates.get(snapshot.template_id) is None:  # removed in this moment
                raise ClocheError("template.corrupt", "the template below was removed meanwhile; nothing was imported")

    def _undo(self, made: _Made) -> None:
        # Whoever has removed the snapshot meanwhile has let go of its layers as well.
        mine = made.snapshot is None or self._snapshots.remove(made.snapshot)
        if made.layers and mine:
            self._machines.layers.release(made.layers[0])
        if made.template is None:
            return
        with self._templates.use_lock:
            # Another import may have found it; it then goes when nobody uses it any more.
            if made.template.template.id not in self._snapshots.ids_of_templates():
                self._templates.remove(made.template)

    def _snapshot(
        self, workspace: str, manifest: Manifest, template_id: str, layer_id: str, name: str | None
    ) -> Snapshot:
        return Snapshot(
            id=id_from_random(random_bytes(16)),
            workspace=workspace,
            sandbox_id=manifest.sandbox_id,
            name=manifest.name if name is None else name,
            created_at=min(manifest.created_at, self._clock.now()),
            template=manifest.template_asked,
            template_name=manifest.template.name,
            template_id=template_id,
            fingerprint=manifest.fingerprint,
            shape=manifest.shape,
            disk_mb=manifest.disk_mb,
            layer_id=layer_id,
            defaults=manifest.defaults,
            metadata=manifest.metadata,
            cold=manifest.cold,
            memory=manifest.memory,
        )

    def _template_meta(self, workspace: str, manifest: Manifest, template_id: str) -> dict[str, Any]:
        """Hidden: no create finds it, whatever it is called."""
        template = manifest.template
        return {
            "id": template_id,
            "name": template.name,
            "aliases": [],
            "description": "",
            "defaults": {"env": {}, "cwd": None, "user": None},
            "cpus": template.shape.cpus,
            "memory_mb": template.shape.memory_mb,
            "disk_mb": template.disk_mb,
            "accel": template.accel,
            "fingerprint": manifest.fingerprint,
            "inputs": f"archive {manifest.sha256}",
            "boot": {part: f"{BOOT}/{manifest.member(f'boot/{part}').sha256}" for part in BOOT_FILES},
            "created_at": self._clock.now(),
            "workspace": workspace,
            "hidden": True,
            "thaw": template.thaw,
            "origin": template.origin,
        }


def _check_files(manifest: Manifest, staged: Path, names: list[str], template_id: str, *, new: bool) -> None:
    """What digests cannot tell: that the files are what they are called, and name only one another. Their names for
    what lies below are then written anew."""
    if manifest.memory:
        _check_pages(manifest, staged / "snapshot/pages")
    size = manifest.disk_mb * _MIB
    bottom = f"../templates/{manifest.template.id}/disk.qcow2"
    above = [*(f"{layer}{SUFFIX}" for layer in manifest.layers[1:]), bottom]
    fresh = [*(f"{name}{SUFFIX}" for name in names[1:]), f"../templates/{template_id}/disk.qcow2"]
    for number, (backing, renamed) in enumerate(zip(above, fresh, strict=True)):
        path = staged / f"layers/{number}.qcow2"
        front = _front(path)
        if (front.backing, front.backing_format) != (backing, "qcow2"):
            raise bad("a layer of its disk does not lie over the next one")
        if front.size > size or (number == 0 and front.size != size):
            raise bad("a layer of its disk has another size than it announces")
        size = front.size
        _rename(path, renamed)
    if new:
        path, template = staged / "template/disk.qcow2", manifest.template
        front = _front(path)
        if (front.backing, front.backing_format) != (f"../../{template.image}", "raw"):
            raise bad("the disk of its template does not lie over its root image")
        if front.size != template.disk_mb * _MIB or front.size > size:
            raise bad("the disk of its template has another size than it announces")
        _rename(path, f"../../{BOOT}/{manifest.member('boot/root_image').sha256}")


def _check_pages(manifest: Manifest, path: Path) -> None:
    try:
        loaded = pages.load(path, manifest.shape.memory_mb * _MIB // pages.PAGE)
        count = loaded.count
        loaded.close()
    except ValueError:
        raise bad("its pages of memory are not what they are called") from None
    if count != manifest.page_count:
        raise bad("it holds another number of pages than it announces")


def _front(path: Path) -> Front:
    try:
        return read_front(path)
    except ValueError as error:
        raise bad(f"a disk in it is not one that Cloche writes: {error}") from None


def _rename(path: Path, name: str) -> None:
    try:
        rename_backing(path, name)
    except ValueError:
        raise bad("a disk in it has no room for the name of the file below it") from None


def _saved_meta(manifest: Manifest, template_id: str) -> dict[str, Any]:
    own = ("pages", "dev") if manifest.memory else ()
    return {
        "format": saved.FORMAT,
        "template_id": template_id,
        "fingerprint": manifest.fingerprint,
        "memory_mb": manifest.shape.memory_mb,
        "cold": manifest.cold,
        "memory": manifest.memory,
        "page_count": manifest.page_count,
        "digests": {name: manifest.member(f"snapshot/{name}").sha256 for name in own},
    }


def _told(error: OSError) -> ClocheError:
    if files.is_full(error):
        return ClocheError("host.disk_full", "the disk of the host is full; nothing was imported")
    return ClocheError("internal", "a file of the archive could not be written; the log of the server has more")
