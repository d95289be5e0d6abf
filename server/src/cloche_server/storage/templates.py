"""Baked templates on disk: list, check, publish, remove.

`templates/<id>/meta.json` is the truth about a baked template, and is written last. Nothing in the directory
changes after that, so a file whose size or digest differs from `meta.json` is damaged.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import BakedTemplate, BootFiles
from cloche_server.core.records import ExecDefaults, Furnishing, Shape
from cloche_server.host import files

FORMAT: Final = 1
FILES: Final = ("mem", "dev", "disk.qcow2", "overlay.qcow2")


@dataclass(frozen=True, slots=True)
class TemplateMeta:
    """All that is known of a baked template. `inputs` is the digest of all it was made from."""

    template: BakedTemplate
    aliases: tuple[str, ...]
    description: str
    defaults: ExecDefaults
    boot: BootFiles
    fingerprint: str
    inputs: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    #: The only workspace that may use it, because its memory holds data of that workspace; None: all may.
    workspace: str | None = None
    #: It lies below snapshots that came in an archive, and has no name that a create could find.
    hidden: bool = False
    #: The snapshot it was promoted from.
    snapshot_id: str | None = None
    #: What it was where its archive was made: id and digests, in one digest.
    origin: str | None = None
    furnishing: Furnishing = field(default_factory=Furnishing)

    @property
    def from_recipe(self) -> bool:
        """It was baked, and can be baked in another shape."""
        return self.workspace is None


@dataclass(frozen=True, slots=True)
class Family:
    """All baked shapes of one template name; `default` is the newest of the default shape."""

    name: str
    aliases: tuple[str, ...]
    description: str
    shapes: tuple[TemplateMeta, ...]

    @property
    def workspace(self) -> str | None:
        return self.shapes[-1].workspace

    @property
    def snapshot_id(self) -> str | None:
        return self.shapes[-1].snapshot_id


class TemplateCatalog:
    """The baked templates below `<data>/templates`. Another process may bake at any time, so the
    directory is looked at again whenever its modification time has changed."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self.root = data / "templates"
        self._seen: tuple[int, int] | None = None
        self._metas: dict[str, TemplateMeta] = {}
        self._checked: dict[str, tuple[tuple[int, int, int], ...]] = {}
        #: Held while boot files are shared by a template that is being published, or are removed as nobody's.
        self.boot_lock = threading.Lock()
        #: Held while a snapshot is laid over a template that it has found, or one is removed as nobody's.
        self.use_lock = threading.Lock()

    def all(self) -> list[TemplateMeta]:
        """Every complete baked template, oldest first."""
        try:
            status = self.root.stat()
        except FileNotFoundError:
            return []
        seen = (status.st_mtime_ns, status.st_ino)
        if seen != self._seen:
            found = [self._load(path) for path in self.root.iterdir() if not path.name.startswith(".")]
            metas = sorted((m for m in found if m), key=lambda m: (m.template.created_at, m.template.id))
            self._metas = {meta.template.id: meta for meta in metas}
            self._seen = seen
        return list(self._metas.values())

    def get(self, template_id: str) -> TemplateMeta | None:
        return next((meta for meta in self.all() if meta.template.id == template_id), None)

    def existing(self, template_id: str) -> TemplateMeta:
        """The template that something was made from. Raises `template.corrupt` when it is not there any more."""
        meta = self.get(template_id)
        if meta is None:
            raise ClocheError("template.corrupt", f"the template {template_id} is not there any more")
        return meta

    def visible(self, workspace: str | None) -> list[TemplateMeta]:
        """What a workspace may make sandboxes from, oldest first: what all may use, and what it has promoted. Its own
        names come before the same names of all."""
        metas = self.all()
        own = {m.template.name for m in metas if workspace is not None and m.workspace == workspace and not m.hidden}
        return [
            m
            for m in metas
            if not m.hidden and (m.workspace == workspace if m.template.name in own else m.workspace is None)
        ]

    def resolve(self, name: str, workspace: str | None = None) -> str | None:
        """The template name behind a name or alias; None when a workspace has nothing of that name."""
        metas = self.visible(workspace)
        for meta in reversed(metas):
            if meta.template.name == name:
                return name
        return next((meta.template.name for meta in reversed(metas) if name in meta.aliases), None)

    def find(self, name: str, shape: Shape, fingerprint: str, workspace: str | None = None) -> TemplateMeta | None:
        """The newest baked template of a name and shape that this engine can restore."""
        fitting = [
            meta
            for meta in self.visible(workspace)
            if meta.template.name == name and meta.template.shape == shape and meta.fingerprint == fingerprint
        ]
        return fitting[-1] if fitting else None

    def newest(self, name: str, fingerprint: str | None = None, workspace: str | None = None) -> TemplateMeta | None:
        """The newest baked template of a name, of any shape: what other shapes are baked like."""
        fitting = [
            meta
            for meta in self.visible(workspace)
            if meta.template.name == name and fingerprint in (None, meta.fingerprint)
        ]
        return fitting[-1] if fitting else None

    def families(self, workspace: str | None = None) -> list[Family]:
        """The names, each with its shapes, by name. Of what was promoted only the newest version."""
        by_name: dict[str, list[TemplateMeta]] = {}
        for meta in self.visible(workspace):
            by_name.setdefault(meta.template.name, []).append(meta)
        return [
            Family(
                name,
                metas[-1].aliases,
                metas[-1].description,
                tuple(metas if metas[-1].from_recipe else metas[-1:]),
            )
            for name, metas in sorted(by_name.items())
        ]

    def check(self, meta: TemplateMeta) -> None:
        """Raises `template.corrupt` when a file is missing or is not what was published.

        Digests are compared once for each state of the files (size, mtime, inode); later calls cost four
        `stat`s. Blocking: call it on a thread when the digests may be due.
        """
        signature = self._signature(meta)
        if self._checked.get(meta.template.id) == signature:
            return
        for name in FILES:
            if files.hash_file(meta.template.directory / name) != meta.digests[name]:
                raise _corrupt(meta, f"its file {name} has changed")
        self._checked[meta.template.id] = signature

    def checked(self, meta: TemplateMeta) -> bool:
        """Whether `check` would be cheap and succeed."""
        return self._checked.get(meta.template.id) == self._signature(meta)

    def _signature(self, meta: TemplateMeta) -> tuple[tuple[int, int, int], ...]:
        found = []
        for name in FILES:
            try:
                status = os.stat(meta.template.directory / name)  # noqa: PTH116 - on the path of every create
            except OSError:
                raise _corrupt(meta, f"its file {name} is missing") from None
            if status.st_size != meta.sizes[name]:
                raise _corrupt(meta, f"its file {name} has another size than it was baked with")
            found.append((status.st_size, status.st_mtime_ns, status.st_ino))
        try:
            os.stat(meta.boot.root_image)  # noqa: PTH116
        except OSError:
            raise _corrupt(meta, "the image below it is missing") from None
        return tuple(found)

    def publish(self, staged: Path, meta: dict[str, Any]) -> TemplateMeta:
        """Completes `meta` with sizes and digests, writes it, and gives the directory its name."""
        meta = {
            **meta,
            "format": FORMAT,
            "files": {
                name: {"size": (staged / name).stat().st_size, "sha256": files.hash_file(staged / name)}
                for name in FILES
            },
        }
        files.write_atomic(staged / "meta.json", json.dumps(meta, indent=2) + "\n")
        for name in FILES:
            (staged / name).chmod(0o444)
        target = self.root / str(meta["id"])
        files.publish(staged, target)
        published = self._load(target)
        if published is None:
            raise ClocheError("template.bake_failed", "the template that was baked is not complete")
        return published

    def remove(self, meta: TemplateMeta) -> None:
        """Takes the name away first, so that nobody finds half a template."""
        doomed = self.root / f".removed-{meta.template.id}"
        try:
            meta.template.directory.rename(doomed)
        except FileNotFoundError:
            return
        files.remove_tree(doomed)

    def sweep(self) -> None:
        """Removes what killed bakes and interrupted removals have left."""
        for part in (self.root, self._data / "run", self._data / "images"):
            files.sweep_staging(part)
        if self.root.is_dir():
            for path in self.root.glob(".removed-*"):
                files.remove_tree(path)

    def _load(self, directory: Path) -> TemplateMeta | None:
        try:
            meta = json.loads((directory / "meta.json").read_text("utf-8"))
            if meta["format"] != FORMAT or meta["id"] != directory.name:
                return None
            template = BakedTemplate(
                id=meta["id"],
                name=meta["name"],
                directory=directory,
                shape=Shape(int(meta["cpus"]), int(meta["memory_mb"])),
                disk_mb=int(meta["disk_mb"]),
                accel=meta["accel"],
                size_bytes=sum(
                    files.allocated_bytes(directory / name) for name in FILES if (directory / name).exists()
                ),
                created_at=float(meta["created_at"]),
                thaw=bool(meta.get("thaw", False)),
            )
            return TemplateMeta(
                template=template,
                aliases=tuple(meta["aliases"]),
                description=meta["description"],
                defaults=ExecDefaults(**meta["defaults"]),
                boot=BootFiles(*(self._data / meta["boot"][part] for part in ("kernel", "initrd", "root_image"))),
                fingerprint=meta["fingerprint"],
                inputs=meta["inputs"],
                sizes={name: int(meta["files"][name]["size"]) for name in FILES},
                digests={name: str(meta["files"][name]["sha256"]) for name in FILES},
                workspace=meta.get("workspace"),
                hidden=bool(meta.get("hidden", False)),
                snapshot_id=meta.get("snapshot_id"),
                origin=meta.get("origin"),
                furnishing=_furnishing(meta.get("furnishing", {})),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _furnishing(data: Mapping[str, Any]) -> Furnishing:
    """What `asdict` made of one, read back; of an older template there is none."""
    return Furnishing(
        service=tuple(data.get("service", ())),
        service_port=int(data.get("service_port", 0)),
        warm=tuple(tuple(argv) for argv in data.get("warm", ())),
        memory_mb=int(data.get("memory_mb", 0)),
        min_memory_mb=int(data.get("min_memory_mb", 0)),
    )


def _corrupt(meta: TemplateMeta, why: str) -> ClocheError:
    return ClocheError(
        "template.corrupt",
        f"the template {meta.template.name} ({meta.template.id}) is damaged: {why}; "
        + (
            f"run `cloche-server template bake {meta.template.name}` again"
            if meta.from_recipe
            else "promote or import the snapshot again"
        ),
        details={"template_id": meta.template.id},
    )
