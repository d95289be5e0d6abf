"""Snapshots on disk: `snapshots/<id>/{pages,dev,meta.json}`, published whole, and the disk layer they hold.

One without memory has `meta.json` only. The SHA-256 of every disk layer is in there as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloche_server.core.errors import ClocheError
from cloche_server.core.netctl import grant_from_json, grant_to_json, policy_from_json, policy_to_json
from cloche_server.core.network import NetworkPolicy, SecretGrant
from cloche_server.core.ports import Captured, SavedState
from cloche_server.core.records import ExecDefaults, Shape
from cloche_server.host import files
from cloche_server.storage import saved
from cloche_server.storage.layers import zero_memory


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sandbox at one moment. `layer_id` is the sealed disk layer; `size_bytes` is what memory and device state take,
    without what lies in layers that others share; `layers` are the digests of the layer and of all below it."""

    id: str
    workspace: str
    sandbox_id: str
    name: str | None
    created_at: float
    template: str
    template_name: str
    template_id: str
    fingerprint: str
    shape: Shape
    disk_mb: int
    layer_id: str
    defaults: ExecDefaults
    metadata: Mapping[str, str] = field(default_factory=dict)
    parent_snapshot_id: str | None = None
    size_bytes: int = 0
    cold: bool = False
    #: It holds memory and processes; else the disk only, which a machine boots from.
    memory: bool = True
    layers: Mapping[str, str] = field(default_factory=dict)
    #: What its sandbox might reach, and the secrets it might use: a copy begins with the same. None: nobody knows.
    network: NetworkPolicy | None = None
    grants: tuple[SecretGrant, ...] = ()


class SnapshotCatalog:
    """All snapshots of one data directory. Methods that touch files block."""

    def __init__(self, data: Path) -> None:
        self.root = data / "snapshots"
        self._all: dict[str, Snapshot] = {}
        #: Names of what `read` could not read. Nobody knows which layers these hold.
        self.unreadable: tuple[str, ...] = ()
        self._checked: dict[str, tuple[tuple[int, int, int], ...]] = {}

    def read(self) -> list[Snapshot]:
        """Reads what is there; what an interrupted write has left is removed. A directory that cannot be read is
        left alone and not listed."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.sweep_staging(self.root)
        found, unreadable = {}, []
        for path in self.root.iterdir():
            if path.name.startswith("."):
                continue
            try:
                snapshot = _from_meta(saved.read_meta(path), _size(path))
            except (ClocheError, KeyError, TypeError, ValueError, OSError):
                unreadable.append(path.name)
                continue
            found[snapshot.id] = snapshot
        self._all, self.unreadable = found, tuple(unreadable)
        return list(found.values())

    def of(self, workspace: str) -> list[Snapshot]:
        """Newest first."""
        mine = (s for s in list(self._all.values()) if s.workspace == workspace)  # threads add and remove meanwhile
        return sorted(mine, key=lambda s: (s.created_at, s.id), reverse=True)

    def get(self, workspace: str, snapshot_id: str) -> Snapshot:
        """Raises `snapshot.not_found`."""
        found = self._all.get(snapshot_id)
        if found is None or found.workspace != workspace:
            raise ClocheError("snapshot.not_found", "snapshot not found; `GET /v1/snapshots` lists what there is")
        return found

    def _needs(self, snapshot: Snapshot, fingerprint: str) -> saved.Needs:
        memory_mb = snapshot.shape.memory_mb
        zeros = zero_memory(self.root.parent, memory_mb) if snapshot.cold else None
        return saved.Needs(snapshot.template_id, fingerprint, memory_mb, zeros)

    def publish(self, snapshot: Snapshot, captured: Captured, layers: list[Path]) -> Snapshot:
        """Writes it durably; when this returns it is there for good. Raises OSError, `host.disk_full`."""
        needs = self._needs(snapshot, snapshot.fingerprint)
        target = self.root / snapshot.id
        try:
            with files.staging(self.root) as staged:
                work = staged / "snapshot"
                work.mkdir(mode=0o700)
                saved.write(work, captured, needs, layers, _to_meta(snapshot))
                files.publish(work, target)
            done = _from_meta(saved.read_meta(target), _size(target))
        except BaseException:
            files.remove_tree(target)
            raise
        self._all[snapshot.id] = done
        return done

    def adopt(self, work: Path, snapshot: Snapshot, saved_meta: dict[str, Any]) -> Snapshot:
        """Takes in a finished directory with `pages` and `dev` that came from elsewhere; `saved_meta` is what goes
        before the description of the snapshot in `meta.json`. Raises OSError, `host.disk_full`."""
        files.write_atomic(work / "meta.json", json.dumps({**saved_meta, **_to_meta(snapshot)}, indent=2) + "\n")
        files.publish(work, self.root / snapshot.id)
        try:
            done = _from_meta(saved.read_meta(self.root / snapshot.id), _size(self.root / snapshot.id))
        except BaseException:
            files.remove_tree(self.root / snapshot.id)
            raise
        self._all[snapshot.id] = done
        return done

    def ids_of_templates(self) -> set[str]:
        """The templates that snapshots of any workspace lie over."""
        return {snapshot.template_id for snapshot in list(self._all.values())}

    def load(self, snapshot: Snapshot, fingerprint: str) -> SavedState:
        """What a machine with memory continues from; its pages are the caller's to close. Digests are compared once
        for each state of the files. Raises `snapshot.corrupt`, `snapshot.incompatible`."""
        directory = self.root / snapshot.id
        signature = _signature(directory)
        needs = self._needs(snapshot, fingerprint)
        state = saved.load(directory, needs, check=self._checked.get(snapshot.id) != signature)
        self._checked[snapshot.id] = signature
        return state

    def verify(self, snapshot: Snapshot) -> list[str]:
        """What is wrong with its own files, byte by byte; nothing when all is as it was written."""
        directory = self.root / snapshot.id
        try:
            digests = saved.read_meta(directory)["digests"]
        except (ClocheError, KeyError):
            return ["its description cannot be read"]
        problems = []
        for name in ("dev", "pages") if snapshot.memory else ():
            try:
                same = files.hash_file(directory / name) == digests.get(name)
            except OSError:
                problems.append(f"its file {name} cannot be read")
                continue
            if not same:
                problems.append(f"its file {name} has changed")
        return problems

    def remove(self, snapshot: Snapshot) -> bool:
        """Takes its name away first: from then on it does not exist. False when somebody else has removed it."""
        if self._all.pop(snapshot.id, None) is None:
            return False
        self._checked.pop(snapshot.id, None)
        gone = files.staging_path(self.root)
        try:
            # Only another name: that works on a full disk as well.
            (self.root / snapshot.id).rename(gone)
        except FileNotFoundError:
            return True
        except OSError:
            self._all[snapshot.id] = snapshot
            raise
        files.fsync_dir(self.root)
        files.remove_tree(gone)
        return True


def _signature(directory: Path) -> tuple[tuple[int, int, int], ...]:
    try:
        stats = [(directory / name).stat() for name in ("dev", "pages", "meta.json")]
    except OSError as error:
        raise saved.corrupt("a file of it is missing") from error
    return tuple((s.st_size, s.st_mtime_ns, s.st_ino) for s in stats)


def _size(directory: Path) -> int:
    return sum(files.allocated_bytes(path) for path in directory.iterdir())


def _to_meta(snapshot: Snapshot) -> dict[str, Any]:
    defaults = snapshot.defaults
    return {
        "id": snapshot.id,
        "workspace": snapshot.workspace,
        "sandbox_id": snapshot.sandbox_id,
        "name": snapshot.name,
        "created_at": snapshot.created_at,
        "template": snapshot.template,
        "template_name": snapshot.template_name,
        "cpus": snapshot.shape.cpus,
        "disk_mb": snapshot.disk_mb,
        "layer_id": snapshot.layer_id,
        "defaults": {"env": dict(defaults.env), "cwd": defaults.cwd, "user": defaults.user},
        "metadata": dict(snapshot.metadata),
        "parent_snapshot_id": snapshot.parent_snapshot_id,
        "layers": dict(snapshot.layers),
        "network": None if snapshot.network is None else policy_to_json(snapshot.network),
        "grants": [grant_to_json(grant) for grant in snapshot.grants],
    }


def _from_meta(meta: dict[str, Any], size: int) -> Snapshot:
    return Snapshot(
        id=meta["id"],
        workspace=meta["workspace"],
        sandbox_id=meta["sandbox_id"],
        name=meta["name"],
        created_at=meta["created_at"],
        template=meta["template"],
        template_name=meta["template_name"],
        template_id=meta["template_id"],
        fingerprint=meta["fingerprint"],
        shape=Shape(meta["cpus"], meta["memory_mb"]),
        disk_mb=meta["disk_mb"],
        layer_id=meta["layer_id"],
        defaults=ExecDefaults(**meta["defaults"]),
        metadata=meta["metadata"],
        parent_snapshot_id=meta["parent_snapshot_id"],
        size_bytes=size,
        cold=bool(meta["cold"]),
        memory=bool(meta.get("memory", True)),  # of snapshots that were taken when all had memory
        layers=meta.get("layers", {}),
        network=policy_from_json(meta["network"]) if meta.get("network") else None,
        grants=tuple(grant_from_json(grant) for grant in meta.get("grants", ())),
    )
