"""Export: one archive of a snapshot and, unless it is left out, of the template below it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

from cloche_server.app.machines import Machines
from cloche_server.app.steps import to_the_end
from cloche_server.app.work import on_thread
from cloche_server.core.errors import ClocheError
from cloche_server.storage import saved
from cloche_server.storage.archive import BOOT_FILES, FORMAT, KIND, LAYERS_MAX, TEMPLATE_FILES, shown_metadata
from cloche_server.storage.archive_write import Digests, OpenPart, Part, close_parts, open_parts, write_archive
from cloche_server.storage.snapshots import Snapshot, SnapshotCatalog
from cloche_server.storage.templates import TemplateCatalog, TemplateMeta
from cloche_server.telemetry import log

_log = log.get("export")


class Export:
    """An archive on its way: iterate over it once, and `aclose` it in any case."""

    def __init__(
        self, filename: str, pieces: Iterator[bytes], stop: threading.Event, parts: Sequence[OpenPart]
    ) -> None:
        self.filename = filename
        self._pieces = pieces
        self._stop = stop
        self._parts = parts
        self._step: asyncio.Future[bytes | None] | None = None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The next piece is only made when the last one was taken. A piece may be empty. Raises `snapshot.corrupt`;
        what was given out until then is not a whole archive, and does not pass for one."""
        while True:
            self._step = asyncio.ensure_future(asyncio.to_thread(next, self._pieces, None))
            try:
                piece = await asyncio.shield(self._step)
            except OSError as error:
                raise ClocheError("snapshot.corrupt", "a file of the snapshot, or below it, cannot be read") from error
            if piece is None:
                return
            yield piece

    async def aclose(self) -> None:
        """Ends the work and closes the files."""
        self._stop.set()
        await to_the_end(self._close())

    async def _close(self) -> None:
        if self._step is not None:
            await asyncio.wait({self._step})
            if not self._step.cancelled():
                self._step.exception()  # seen
        close_parts(self._parts)


class Exporter:
    def __init__(self, machines: Machines, templates: TemplateCatalog, snapshots: SnapshotCatalog) -> None:
        self._machines = machines
        self._templates = templates
        self._snapshots = snapshots
        self._digests = Digests()

    async def export(self, workspace: str, snapshot_id: str, *, template: bool = True) -> Export:
        """Raises `snapshot.not_found`, `snapshot.corrupt`, `template.corrupt`. All files are open when this returns, so
        that it makes no difference to the archive when the snapshot is removed."""
        snapshot = self._snapshots.get(workspace, snapshot_id)
        below = self._templates.existing(snapshot.template_id)
        layers = self._machines.layers
        layers.hold(snapshot.layer_id)
        opened: list[OpenPart] = []
        try:
            chain = layers.chain(snapshot.layer_id)
            if len(chain) > LAYERS_MAX:
                raise ClocheError(
                    "request.invalid",
                    f"the disk has {len(chain)} layers, an archive takes {LAYERS_MAX}; promote it first",
                )
            meta, parts = await asyncio.to_thread(self._parts, snapshot, below, chain, template)
            await on_thread(lambda stop: opened.extend(open_parts(parts, self._digests, stop)))
        except asyncio.CancelledError:
            close_parts(opened)
            raise
        except OSError as error:
            raise ClocheError("snapshot.corrupt", "a file of the snapshot, or below it, is missing") from error
        finally:
            await asyncio.shield(self._machines.release_layer(snapshot.layer_id))
        described = self._described(snapshot, meta, below, chain, template)
        _log.info("snapshot.exported", snapshot=snapshot.id, members=len(opened), template=template)
        stop = threading.Event()
        return Export(_filename(snapshot), write_archive(described, opened, stop), stop, opened)

    def _parts(
        self, snapshot: Snapshot, below: TemplateMeta, chain: Sequence[str], template: bool
    ) -> tuple[dict[str, Any], list[Part]]:
        directory = self._snapshots.root / snapshot.id
        meta = saved.read_meta(directory)
        own = ("pages", "dev") if snapshot.memory else ()
        parts = [Part(f"snapshot/{name}", directory / name, meta["digests"][name]) for name in own]
        for number, layer in enumerate(chain):
            parts.append(Part(f"layers/{number}.qcow2", self._machines.layers.path(layer), snapshot.layers.get(layer)))
        if template:
            home = below.template.directory
            parts += [Part(f"template/{name}", home / name, below.digests[name]) for name in TEMPLATE_FILES]
            parts += [Part(f"boot/{name}", getattr(below.boot, name)) for name in BOOT_FILES]
        return meta, parts

    def _described(
        self, snapshot: Snapshot, meta: dict[str, Any], below: TemplateMeta, chain: Sequence[str], template: bool
    ) -> dict[str, Any]:
        defaults, shape, data = snapshot.defaults, below.template.shape, self._templates.root.parent
        return {
            "format": FORMAT,
            "kind": KIND,
            "fingerprint": snapshot.fingerprint,
            "snapshot": {
                "id": snapshot.id,
                "sandbox_id": snapshot.sandbox_id,
                "name": snapshot.name,
                "created_at": snapshot.created_at,
                "template": snapshot.template,
                "cpus": snapshot.shape.cpus,
                "memory_mb": snapshot.shape.memory_mb,
                "disk_mb": snapshot.disk_mb,
                "cold": snapshot.cold,
                "memory": snapshot.memory,
                "page_count": meta["page_count"],
                "layers": list(chain),
                "defaults": {"env": dict(defaults.env), "cwd": defaults.cwd, "user": defaults.user},
                "metadata": shown_metadata(snapshot.metadata),
            },
            "template": {
                "id": below.template.id,
                "name": below.template.name,
                "digests": {name: below.digests[name] for name in TEMPLATE_FILES},
                "cpus": shape.cpus,
                "memory_mb": shape.memory_mb,
                "disk_mb": below.template.disk_mb,
                "accel": below.template.accel,
                "thaw": below.template.thaw,
                "image": _relative(below.boot.root_image, data) if template else None,
            },
        }


def _relative(path: Path, data: Path) -> str:
    return str(path.relative_to(data))


def _filename(snapshot: Snapshot) -> str:
    """For a header: ASCII, no quotes, no slashes."""
    words = re.sub(r"[^A-Za-z0-9_-]+", "-", snapshot.name or "").strip("-")[:60]
    return f"{words or 'snapshot'}-{snapshot.id}.tar.zst"
