"""One data directory with a template, disk layers and snapshots of real files, and the use cases over it."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from app_host import settings

from cloche_server.app.archive_import import Importer
from cloche_server.app.export import Exporter
from cloche_server.app.machines import Machines
from cloche_server.app.promote_template import Promoter
from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import Captured
from cloche_server.core.records import ExecDefaults, Shape
from cloche_server.host.confined import Confined
from cloche_server.host.pages import PAGE, Pages
from cloche_server.storage.layers import Layers, make_overlay, read_header
from cloche_server.storage.qcow2 import rename_backing
from cloche_server.storage.snapshots import Snapshot, SnapshotCatalog
from cloche_server.storage.templates import TemplateCatalog, TemplateMeta
from kit.fake_engine import FakeClock, FakeEngine, World
from kit.fake_network import FakeNetwork

MIB = 1024 * 1024
#: Files that QEMU's tools have made before, which takes them long.
_made: dict[str, bytes] = {}
SHAPE = Shape(1, 2)
DISK_MB = 8
BASE_PAGES = SHAPE.memory_mb * MIB // PAGE
#: Some that does not compress, many zeros, some more.
BASE_MEMORY = (
    random.Random(1).randbytes(8 * PAGE) + bytes((BASE_PAGES - 16) * PAGE) + random.Random(2).randbytes(8 * PAGE)
)


def qemu(*words: object) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout


def write_disk(path: Path, byte: int, offset: int, length: int) -> None:
    qemu("qemu-io", "-f", "qcow2", "-c", f"write -P {byte} {offset} {length}", path)


def disk_bytes(path: Path) -> bytes:
    """What a machine would read from a disk."""
    raw = path.with_name(path.name + ".raw")
    qemu("qemu-img", "convert", "-U", "-f", "qcow2", "-O", "raw", path, raw)
    content = raw.read_bytes()
    raw.unlink()
    return content


def _make(path: Path, over: list[str], fill: Callable[[Path], None] | None = None) -> None:
    if path.name not in _made:
        qemu("qemu-img", "create", "-q", "-f", "qcow2", *over, path, DISK_MB * MIB)
        if fill is not None:
            fill(path)
        _made[path.name] = path.read_bytes()
    path.write_bytes(_made[path.name])


class Site:
    """A server without machines. `fingerprint` and workspace `w` unless told otherwise."""

    def __init__(self, data: Path, world: World, **changes: Any) -> None:
        self.data = data
        self.world = world
        self.clock = FakeClock()
        self.settings = settings(data, recipes=data, **changes)
        for part in ("templates", "images", "kernels", "sandboxes", "layers", "snapshots", "boot", "zeros", "run"):
            (data / part).mkdir(parents=True)
        self.layers = Layers(data)
        self.engine = FakeEngine(world)
        self.machines = Machines(self.engine, data / "sandboxes", asyncio.Semaphore(4), self.layers, FakeNetwork(world))
        self.templates = TemplateCatalog(data)
        self.snapshots = SnapshotCatalog(data)
        self.snapshots.read()
        self.tool = Confined("qemu-img", data, None)
        stores = (self.machines, self.templates, self.snapshots)
        self.promoter = Promoter(self.settings, *stores, self.clock, self.tool)
        self.exporter = Exporter(self.machines, self.templates, self.snapshots)
        self.importer = Importer(self.settings, *stores, self.clock, self.tool)
        self.numbers = iter(range(10_000_000, 99_999_999))

    def bake(self, name: str = "base", **changes: Any) -> TemplateMeta:
        image = self.data / "images" / "i" / "rootfs.raw"
        if not image.exists():
            image.parent.mkdir()
            image.write_bytes(b"r" * MIB + bytes((DISK_MB - 1) * MIB))
            (self.data / "kernels" / "k").mkdir()
            for part in ("vmlinuz", "initrd"):
                (self.data / "kernels" / "k" / part).write_bytes(part.encode() * 1000)
        template_id = f"{name}-{SHAPE}-{next(self.numbers)}"
        staged = self.data / "templates" / f".staging-{template_id}"
        staged.mkdir()
        over_image = ["-b", "../../images/i/rootfs.raw", "-F", "raw"]
        _make(staged / "disk.qcow2", over_image, lambda path: write_disk(path, 0x42, MIB, 65536))
        _make(staged / "empty", ["-u", "-b", "../../templates/t/disk.qcow2", "-F", "qcow2"])
        make_overlay(
            staged / "empty", staged / "overlay.qcow2", f"../../templates/{template_id}/disk.qcow2", DISK_MB * MIB
        )
        (staged / "empty").unlink()
        (staged / "mem").write_bytes(BASE_MEMORY)
        (staged / "dev").write_bytes(b"device state of the template")
        meta = {
            "id": template_id,
            "name": name,
            "aliases": ["std"] if name == "base" else [],
            "description": "d",
            "defaults": {"env": {}, "cwd": None, "user": None},
            "cpus": SHAPE.cpus,
            "memory_mb": SHAPE.memory_mb,
            "disk_mb": DISK_MB,
            "accel": "tcg",
            "fingerprint": "fake",
            "inputs": "x",
            "boot": {"kernel": "kernels/k/vmlinuz", "initrd": "kernels/k/initrd", "root_image": "images/i/rootfs.raw"},
            "created_at": 1.0,
            **changes,
        }
        return self.templates.publish(staged, meta)

    def layer(self, template: TemplateMeta, below: str | None = None) -> str:
        """A layer with something on it, held once."""
        name = f"layer{next(self.numbers)}"
        path = self.layers.create(name, template.template, below)
        number, backing = len(self.layers.chain(name)), read_header(path).backing
        if f"layer {number}" not in _made:
            write_disk(path, 0x50 + number, number * 2 * MIB, 65536)
            _made[f"layer {number}"] = path.read_bytes()
        path.write_bytes(_made[f"layer {number}"])
        rename_backing(path, backing)
        return name

    def snapshot(self, template: TemplateMeta, depth: int = 2, **changes: Any) -> Snapshot:
        """A snapshot over some layers, of which it is the only holder."""
        top: str | None = None
        for _ in range(depth):
            below, top = top, self.layer(template, top)
            if below is not None:
                self.layers.release(below)
        assert top is not None
        number = next(self.numbers)
        fields: dict[str, Any] = {
            "id": f"snapshot{number}",
            "workspace": "w",
            "sandbox_id": f"sandbox{number}",
            "name": "näme of it",
            "created_at": 5.0,
            "template": "std",
            "template_name": template.template.name,
            "template_id": template.template.id,
            "fingerprint": "fake",
            "shape": SHAPE,
            "disk_mb": DISK_MB,
            "layer_id": top,
            "defaults": ExecDefaults({"A": "1"}, "/srv", "user"),
            "metadata": {"k": "v", "secret.k": "hush"},
            **changes,
        }
        pages = None
        if fields.get("memory", True):
            pages = Pages([(0, 2), (100, 1)], memoryview(bytearray(bytes(PAGE) + b"m" * PAGE + b"n" * PAGE)))
        layers = [self.layers.path(one) for one in self.layers.chain(top)]
        return self.snapshots.publish(Snapshot(**fields), Captured(b"device state", pages, 1.0), layers)

    def memory(self, cold: bool = False) -> bytes:
        """What the memory of such a snapshot is, as a whole."""
        base = bytes(BASE_PAGES * PAGE) if cold else BASE_MEMORY
        whole = bytearray(base)
        whole[0 : 2 * PAGE] = bytes(PAGE) + b"m" * PAGE
        whole[100 * PAGE : 101 * PAGE] = b"n" * PAGE
        return bytes(whole)

    async def archive(self, snapshot: Snapshot, *, template: bool = True) -> bytes:
        export = await self.exporter.export(snapshot.workspace, snapshot.id, template=template)
        try:
            return b"".join([piece async for piece in export.chunks()])
        finally:
            await export.aclose()

    def files(self) -> set[str]:
        """All that is below the data directory, but zeros."""
        found = {str(p.relative_to(self.data)) for p in self.data.rglob("*") if p.is_file()}
        return {name for name in found if not name.startswith(("zeros/", "c.db"))}


async def pieces(raw: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for at in range(0, len(raw), size):
        yield raw[at : at + size]


async def refused(site: Site, raw: bytes, workspace: str = "w") -> ClocheError:
    before = site.files()
    with pytest.raises(ClocheError) as told:
        await site.importer.take_in(workspace, pieces(raw))
    assert site.files() == before, "something is left"
    return told.value


def unpacked(raw: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(raw)


def packed(tar: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(tar)
