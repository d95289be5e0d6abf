"""Disk layers: qcow2 overlays below `<data>/layers`, each over another layer or over the disk of a template.

A running machine writes to one layer. A capture seals it: the machine gets a fresh layer over it, and so does
everything that is made from the capture. Each layer is held by what uses it as its top (a sandbox, a snapshot) and by
the layers over it; the last to let go removes the file. What lies over what is written in the files themselves, so
nothing has to be kept in step with them.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import BakedTemplate
from cloche_server.host import files
from cloche_server.host.overlay import HEADER, NAME_MAX, read_header, record_below, recorded_below

__all__ = ["SUFFIX", "Layers", "make_overlay", "read_header", "zero_memory"]

SUFFIX: Final = ".qcow2"


def make_overlay(empty: Path, target: Path, backing: str, size: int) -> None:
    """An empty overlay of `size` bytes over `backing`, a name relative to `target`: a copy of another empty one with
    a new front. (A start of `qemu-img` would take as long as all the rest of a fork's disk.)"""
    header = read_header(empty)
    cluster = 1 << header.cluster_bits
    name = backing.encode()
    if header.name_offset + len(name) > cluster or len(name) > NAME_MAX:
        raise ValueError("the name of the file below is too long")
    entries = -(-size // (cluster * (cluster // 8)))
    if entries * 8 > cluster:
        raise ValueError("the disk is too large")
    files.copy_sparse(empty, target)
    target.chmod(0o600)
    with target.open("r+b") as file:
        front = bytearray(file.read(HEADER.size))
        struct.pack_into(">I", front, 16, len(name))
        struct.pack_into(">Q", front, 24, size)
        struct.pack_into(">I", front, 36, entries)
        file.seek(0)
        file.write(front)
        file.seek(header.name_offset)
        file.write(name.ljust(min(NAME_MAX, cluster - header.name_offset), b"\0"))
    record_below(target, backing)


def zero_memory(data: Path, memory_mb: int) -> Path:
    """A file of zeros, as large as a memory, that takes no room on the disk."""
    path = data / "zeros" / f"{memory_mb}m"
    if not path.exists():
        with files.staging(path.parent) as staged:
            empty = staged / "mem"
            with empty.open("xb") as file:
                file.truncate(memory_mb * 1024 * 1024)
            empty.chmod(0o400)
            files.publish(empty, path)
    return path


class Layers:
    """The layers of one data directory, with who holds what. Methods that touch files block; all may be called on
    several threads at once."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self.root = data / "layers"
        self._lock = threading.Lock()
        self._holds: dict[str, int] = {}
        self._parents: dict[str, str | None] = {}
        #: Digests of sealed layers, by the state of the file they were made of.
        self._digests: dict[str, tuple[tuple[int, int, int], str]] = {}

    def path(self, layer_id: str) -> Path:
        return self.root / (layer_id + SUFFIX)

    def zero_memory(self, memory_mb: int) -> Path:
        """See the function of this name."""
        return zero_memory(self._data, memory_mb)

    def create(self, layer_id: str, template: BakedTemplate, parent: str | None = None) -> Path:
        """An empty layer over `parent` or the template's disk, held once. Raises OSError, `template.corrupt`."""
        path = self.path(layer_id)
        try:
            if parent is None:
                backing, size = f"../templates/{template.id}/disk.qcow2", template.disk_mb * 1024 * 1024
            else:
                backing, size = parent + SUFFIX, read_header(self.path(parent)).size
            make_overlay(template.directory / "overlay.qcow2", path, backing, size)
        except (FileNotFoundError, ValueError) as error:
            path.unlink(missing_ok=True)
            raise ClocheError("template.corrupt", f"a disk file below {layer_id} is missing or damaged") from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        with self._lock:
            self._parents[layer_id] = parent
            self._holds[layer_id] = 1
            if parent is not None:
                self._hold(parent)
        return path

    def adopt(self, staged: Sequence[tuple[str, Path]]) -> None:
        """Takes finished files in as a chain, top first, whose top is held once. They name one another already, and are
        on the disk. When it raises OSError none of them is a layer."""
        moved: list[Path] = []
        try:
            for name, path in reversed(staged):
                record_below(path, read_header(path).backing)
                path.rename(self.path(name))
                moved.append(self.path(name))
            files.fsync_dir(self.root)
        except BaseException:
            for path in moved:
                path.unlink(missing_ok=True)
            raise
        with self._lock:
            names = [name for name, _ in staged]
            for name, below in zip(names, [*names[1:], None], strict=True):
                self._parents[name] = below
                self._holds[name] = 1

    def hold(self, layer_id: str) -> None:
        with self._lock:
            self._hold(layer_id)

    def _hold(self, layer_id: str) -> None:
        self._holds[layer_id] = self._holds.get(layer_id, 0) + 1

    def release(self, layer_id: str) -> None:
        """Lets go once; removes the file when nobody holds it, and then lets go of the one below. After an OSError it
        may be called again for a file that resisted."""
        errors = []
        for name in self._let_go(layer_id):
            try:
                self.path(name).unlink(missing_ok=True)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _let_go(self, layer_id: str) -> list[str]:
        unused: list[str] = []
        current: str | None = layer_id
        with self._lock:
            while current is not None:
                left = self._holds.get(current, 0) - 1
                if left > 0:
                    self._holds[current] = left
                    break
                self._holds.pop(current, None)
                self._digests.pop(current, None)
                unused.append(current)
                current = self._parents.pop(current, None)
        return unused

    def chain(self, layer_id: str) -> list[str]:
        """The layer and all below it, top first."""
        found: list[str] = []
        current: str | None = layer_id
        while current is not None and current not in found:
            found.append(current)
            current = self._parents.get(current)
        return found

    def digest(self, layer_id: str) -> str:
        """SHA-256 of the file of a sealed layer; read once for each state of the file. Raises OSError."""
        path = self.path(layer_id)
        status = path.stat()
        signature = (status.st_size, status.st_mtime_ns, status.st_ino)
        known = self._digests.get(layer_id)
        if known is None or known[0] != signature:
            known = (signature, files.hash_file(path))
            with self._lock:
                if layer_id in self._holds:  # what has gone meanwhile is not remembered
                    self._digests[layer_id] = known
        return known[1]

    def forget_digests(self, layer_ids: Iterable[str]) -> None:
        """The next look at these reads their files again."""
        with self._lock:
            for layer_id in layer_ids:
                self._digests.pop(layer_id, None)

    def changed(self, digests: Mapping[str, str]) -> list[str]:
        """The layers among `digests` (by id) that are not what they were, or cannot be read."""
        wrong = []
        for layer_id, wanted in digests.items():
            try:
                if self.digest(layer_id) != wanted:
                    wrong.append(layer_id)
            except OSError:
                wrong.append(layer_id)
        return wrong

    def bytes_of(self, layer_id: str) -> int:
        """What the files of a layer and of those below take on the disk of the host."""
        return sum(files.allocated_bytes(self.path(one)) for one in self.chain(layer_id) if self.path(one).exists())

    def take_stock(self, tops: Iterable[str], *, remove: bool = True) -> int:
        """At a start: holds every layer in `tops` (one hold each time it is named) and what lies below; with `remove`
        removes the rest, unless one that is needed cannot be read: then the rest may be what it lies over. Returns how
        many were removed."""
        with self._lock:
            self._holds.clear()
            self._parents.clear()
            parents, unreadable = self._read()
            for top in tops:
                self._hold(top)
                current = top
                while current in parents and current not in self._parents:
                    below = parents[current]
                    self._parents[current] = below
                    if below is None:
                        break
                    self._hold(below)
                    current = below
            if not remove or unreadable & self._holds.keys():
                return 0
            unused = parents.keys() - self._holds.keys()
        for name in unused:
            self.path(name).unlink(missing_ok=True)
        return len(unused)

    def _read(self) -> tuple[dict[str, str | None], set[str]]:
        """What each file lies over (None: the disk of a template), and those that cannot tell."""
        parents: dict[str, str | None] = {}
        unreadable = set()
        for path in self.root.glob("*" + SUFFIX):
            name, backing = path.name.removesuffix(SUFFIX), ""
            try:
                recorded = recorded_below(path)
                backing = recorded or read_header(path).backing
                if recorded is None:  # of a server that did not write it down
                    record_below(path, backing)
            except (OSError, ValueError):
                unreadable.add(name)
            parents[name] = backing.removesuffix(SUFFIX) if "/" not in backing and backing else None
        return parents, unreadable
