"""Archives: what goes out comes in again, here and elsewhere, and nothing else does."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from archive_site import MIB, Site, disk_bytes, packed, pieces, refused, unpacked

from cloche_server.app import archive_import as import_module
from cloche_server.app import export as export_module
from cloche_server.app.archive_import import Importer
from cloche_server.core.errors import ClocheError
from cloche_server.host import files
from cloche_server.host.confined import Confined
from cloche_server.host.process import Completed
from cloche_server.storage.snapshots import Snapshot, SnapshotCatalog
from kit.fake_engine import World

pytestmark = pytest.mark.usefixtures("quick_disk")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("template", [True, False])
async def test_here_again_it_is_the_same(site: Site, depth: int, template: bool) -> None:
    """Over the same template, which is not stored twice, on layers of its own."""
    one = site.snapshot(site.bake(), depth)
    disk = disk_bytes(site.layers.path(one.layer_id))
    raw = await site.archive(one, template=template)
    assert site.snapshots.remove(one)
    site.layers.release(one.layer_id)
    assert not list(site.layers.root.iterdir())
    two = await site.importer.take_in("w", pieces(raw))
    changed = {"id", "layer_id", "layers", "metadata", "parent_snapshot_id", "size_bytes"}
    same = {name: getattr(one, name) for name in one.__slots__ if name not in changed}
    assert {name: getattr(two, name) for name in same} == same
    assert two.metadata == {"k": "v"}, "secrets do not leave the server"
    assert two.id != one.id
    assert list(two.layers) == site.layers.chain(two.layer_id)
    assert site.layers.changed(two.layers) == []
    assert not set(site.layers.chain(two.layer_id)) & {one.layer_id}
    assert disk_bytes(site.layers.path(two.layer_id)) == disk
    assert len(site.layers.chain(two.layer_id)) == depth
    state = site.snapshots.load(two, "fake")
    assert state.pages.runs == ((0, 2), (100, 1))
    assert state.device_state.read_bytes() == b"device state"
    state.pages.close()
    assert len(site.templates.all()) == 1
    assert not list((site.data / "boot").iterdir())


async def test_elsewhere_it_brings_its_template(site: Site, other: Site) -> None:
    one = site.snapshot(site.bake())
    raw = await site.archive(one)
    two = await other.importer.take_in("theirs", pieces(raw), "a name")
    assert (two.workspace, two.name) == ("theirs", "a name")
    assert disk_bytes(other.layers.path(two.layer_id)) == disk_bytes(site.layers.path(one.layer_id))
    meta = other.templates.get(two.template_id)
    assert meta is not None
    other.templates.check(meta)
    assert meta.hidden
    assert meta.workspace == "theirs"
    assert meta.template.id != one.template_id
    for part in ("kernel", "initrd", "root_image"):
        mine = site.templates.all()[0]
        assert getattr(meta.boot, part).read_bytes() == getattr(mine.boot, part).read_bytes()
        assert getattr(meta.boot, part).parent == other.data / "boot"
    for workspace in ("theirs", "w", None):
        assert other.templates.resolve("base", workspace) is None, "nobody finds it by a name"
        assert other.templates.families(workspace) == []


async def test_the_second_of_a_family_uses_the_template_of_the_first(site: Site, other: Site) -> None:
    meta = site.bake()
    first, second = await site.archive(site.snapshot(meta)), await site.archive(site.snapshot(meta), template=False)
    one = await other.importer.take_in("w", pieces(first))
    two = await other.importer.take_in("w", pieces(second))
    three = await other.importer.take_in("w", pieces(first))
    assert one.template_id == two.template_id == three.template_id
    assert (await refused(other, second, "elsewhere")).code == "snapshot.incompatible"
    four = await other.importer.take_in("elsewhere", pieces(first))
    assert four.template_id != one.template_id, "another workspace trusts nothing of this one"
    again = await site.importer.take_in("w", pieces(await other.archive(four)))
    assert disk_bytes(site.layers.path(again.layer_id)) == disk_bytes(other.layers.path(four.layer_id))


async def test_one_that_fails_keeps_the_template_that_another_has_found(
    site: Site, other: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = await site.archive(site.snapshot(site.bake()))
    adopt, loop = other.layers.adopt, asyncio.get_running_loop()
    second: list[Snapshot] = []

    def fail(_: object) -> None:
        monkeypatch.setattr(other.layers, "adopt", adopt)
        taken = asyncio.run_coroutine_threadsafe(other.importer.take_in("w", pieces(raw)), loop)
        second.append(taken.result())
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(other.layers, "adopt", fail)
    with pytest.raises(ClocheError):
        await other.importer.take_in("w", pieces(raw))
    assert other.snapshots.of("w") == second
    assert other.templates.get(second[0].template_id) is not None


async def test_one_that_is_removed_before_it_is_undone(
    site: Site, other: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers are let go of once: something has been made from it."""
    raw = await site.archive(site.snapshot(site.bake()))
    adopt = other.snapshots.adopt
    made: list[Snapshot] = []

    get = other.templates.get
    monkeypatch.setattr(other.snapshots, "adopt", lambda *parts: _then_fail(adopt, parts, made, other))
    monkeypatch.setattr(other.templates, "get", lambda one: None if made else get(one))
    with pytest.raises(ClocheError):
        await other.importer.take_in("w", pieces(raw))
    assert other.layers.path(made[0].layer_id).exists()


def _then_fail(adopt: Any, parts: Any, made: list[Snapshot], other: Site) -> Snapshot:
    """Somebody continues from it, and it is removed."""
    made.append(adopt(*parts))
    other.layers.hold(made[0].layer_id)
    assert other.snapshots.remove(made[0])
    other.layers.release(made[0].layer_id)
    return made[0]


async def test_a_template_of_another_workspace_is_not_opened_by_its_digests(site: Site) -> None:
    meta = site.bake("private", workspace="theirs")
    raw = await site.archive(site.snapshot(meta, workspace="theirs"), template=False)
    assert (await refused(site, raw, "w")).code == "snapshot.incompatible"
    assert (await site.importer.take_in("theirs", pieces(raw))).template_id == meta.template.id


@pytest.mark.parametrize("template", [True, False])
async def test_a_disk_alone_goes_anywhere(
    site: Site, other: Site, template: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It boots, so it is of use under another QEMU or CPU model as well."""
    meta = site.bake()
    one = site.snapshot(meta, memory=False, cold=True)
    raw = await site.archive(one, template=template)
    there = other if template else site
    monkeypatch.setattr(type(there.machines.engine), "fingerprint", "another")
    two = await there.importer.take_in("w", pieces(raw))
    assert (two.memory, two.cold, two.disk_mb) == (False, True, one.disk_mb)
    assert {path.name for path in (there.snapshots.root / two.id).iterdir()} == {"meta.json"}
    assert disk_bytes(there.layers.path(two.layer_id)) == disk_bytes(site.layers.path(one.layer_id))
    assert there.snapshots.verify(two) == []
    assert two.id in {read.id for read in there.snapshots.read()}


async def test_one_that_was_booted_from_its_disk(site: Site, other: Site) -> None:
    two = await other.importer.take_in("w", pieces(await site.archive(site.snapshot(site.bake(), cold=True))))
    assert two.cold
    state = other.snapshots.load(two, "fake")
    assert state.memory is not None
    assert state.memory.stat().st_size == 2 * MIB
    state.pages.close()


async def test_a_start_finds_what_was_imported(site: Site, other: Site) -> None:
    raw = await site.archive(site.snapshot(site.bake()))
    two = await other.importer.take_in("w", pieces(raw))
    catalog = SnapshotCatalog(other.data)
    assert [s.id for s in catalog.read()] == [two.id]
    assert other.layers.take_stock([two.layer_id]) == 0


# ---------------------------------------------------------------- export


async def test_what_is_removed_meanwhile_is_exported_whole(site: Site) -> None:
    one = site.snapshot(site.bake())
    export = await site.exporter.export("w", one.id)
    assert site.snapshots.remove(one)
    site.layers.release(one.layer_id)
    raw = b"".join([piece async for piece in export.chunks()])
    await export.aclose()
    assert (await site.importer.take_in("w", pieces(raw))).name == one.name


async def test_a_reader_that_goes_away_leaves_no_hold_and_no_file_open(site: Site) -> None:
    one = site.snapshot(site.bake())
    before = open_files()
    export = await site.exporter.export("w", one.id)
    assert open_files() > before
    async for _ in export.chunks():
        break
    await export.aclose()
    assert open_files() == before
    assert site.snapshots.remove(one)
    site.layers.release(one.layer_id)
    assert not list(site.layers.root.iterdir())


async def test_what_nobody_reads_is_not_made(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    real = export_module.write_archive

    def counting(*args: Any) -> Iterator[bytes]:
        nonlocal made
        for piece in real(*args):
            made += 1
            yield piece

    monkeypatch.setattr(export_module, "write_archive", counting)
    export = await site.exporter.export("w", site.snapshot(site.bake()).id)
    chunks = export.chunks()
    for number in range(1, 3):
        await anext(chunks)
        await asyncio.sleep(0.05)
        assert made == number
    await chunks.aclose()
    await export.aclose()
    assert made == 2


@pytest.mark.parametrize("file", ["pages", "layer", "mem"])
async def test_what_has_changed_on_disk_is_no_whole_archive(site: Site, other: Site, file: str) -> None:
    meta = site.bake()
    one = site.snapshot(meta)
    raw = await site.archive(one)
    export = await site.exporter.export("w", one.id)
    path = {
        "pages": site.snapshots.root / one.id / "pages",
        "layer": site.layers.path(one.layer_id),
        "mem": meta.template.directory / "mem",
    }[file]
    path.chmod(0o600)
    with path.open("r+b") as damaged:
        damaged.seek(-1, os.SEEK_END)
        damaged.write(b"x")
    sent = bytearray()
    with pytest.raises(ClocheError, match="has changed"):
        async for piece in export.chunks():
            sent += piece
    await export.aclose()
    assert len(sent) < len(raw)
    assert (await refused(other, bytes(sent))).code == "request.invalid"


async def test_of_another_workspace_there_is_none(site: Site) -> None:
    one = site.snapshot(site.bake())
    for workspace, name in (("elsewhere", one.id), ("w", "z" * 20)):
        with pytest.raises(ClocheError) as told:
            await site.exporter.export(workspace, name)
        assert told.value.code == "snapshot.not_found"


# ---------------------------------------------------------------- refusals


async def test_another_engine_is_told_before_anything_large_is_read(
    site: Site, other: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = await site.archive(site.snapshot(site.bake()))
    monkeypatch.setattr(type(other.engine), "fingerprint", property(lambda _: "other engine"))
    taken = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        async for piece in pieces(raw, 200):
            taken += 1
            yield piece

    with pytest.raises(ClocheError) as told:
        await other.importer.take_in("w", body())
    assert told.value.code == "snapshot.incompatible"
    assert "fake" in told.value.message
    assert "other engine" in told.value.message
    assert taken * 200 < len(raw) / 2
    assert other.files() == set()


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"max_import_mb": 0}, "snapshot.import_disabled", "max_import_mb"),
        ({"max_import_mb": 3}, "request.too_large", "3 MiB"),
        ({"max_disk_mb": 7}, "request.invalid", "disk_mb"),
        ({"disk_reserve_mb": 1 << 40}, "host.disk_full", "no room"),
    ],
)
async def test_limits(tmp_path: Path, world: World, site: Site, changes: dict[str, Any], code: str, word: str) -> None:
    raw = await site.archive(site.snapshot(site.bake()))
    error = await refused(Site(tmp_path / "small", world, **changes), raw)
    assert error.code == code
    assert word in error.message


async def test_a_bomb_costs_what_its_manifest_says_at_most(site: Site, other: Site) -> None:
    """Zeros without an end compress to nothing; they are not even buffered."""
    bomb = packed(bytes(64 * MIB))
    assert len(bomb) < 16_000
    assert (await refused(other, bomb)).code == "request.invalid"
    tar = unpacked(await site.archive(site.snapshot(site.bake())))
    error = await refused(other, packed(tar + bytes(64 * MIB)))
    assert "something follows its end" in error.message


async def test_a_disk_that_fills_up(site: Site, other: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = await site.archive(site.snapshot(site.bake()))
    real, calls = os.pwrite, 0

    def pwrite(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(errno.ENOSPC, "no space")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert (await refused(other, raw)).code == "host.disk_full"
    monkeypatch.setattr(files, "free_bytes", lambda _: -1)
    assert (await refused(other, raw)).code == "host.disk_full"


@pytest.mark.parametrize("call", ["adopt", "publish", "layers", "check_disk", "empty_overlay", "read_meta"])
async def test_a_step_that_fails_at_the_end_leaves_nothing(
    site: Site, other: Site, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = await site.archive(site.snapshot(site.bake()))

    def fail(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "no space")

    places: dict[str, tuple[object, str]] = {
        "adopt": (other.snapshots, "adopt"),
        "publish": (other.templates, "publish"),
        "layers": (other.layers, "adopt"),
        "check_disk": (import_module, "check_disk"),
        "empty_overlay": (import_module, "empty_overlay"),
        "read_meta": (import_module.saved, "read_meta"),
    }
    monkeypatch.setattr(*places[call], fail)
    with pytest.raises(ClocheError) as told:
        await other.importer.take_in("w", pieces(raw))
    assert told.value.code == "host.disk_full"
    left = {name for name in other.files() if not name.startswith("boot/")}
    assert left == set(), "boot files are named by their digests, and go with the next prune"
    assert other.layers.take_stock([]) == 0


async def test_a_caller_that_goes_away_at_any_moment(site: Site, other: Site) -> None:
    raw = await site.archive(site.snapshot(site.bake()))

    async def body(until: int) -> AsyncIterator[bytes]:
        async for piece in pieces(raw[:until]):
            yield piece
        await asyncio.Event().wait()

    for until in range(0, len(raw) + 1, max(1, len(raw) // 7)):
        task = asyncio.ensure_future(other.importer.take_in("w", body(until)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert other.files() == set()


async def test_a_caller_that_goes_away_in_the_last_steps(site: Site, other: Site) -> None:
    """Either it is there, or nothing of it."""
    raw = await site.archive(site.snapshot(site.bake()))
    known = 0
    for wait in (0.0, 0.02, 0.05, 0.1, 0.2):
        before = other.files()
        task = asyncio.ensure_future(other.importer.take_in("w", pieces(raw, 1 << 20)))
        await asyncio.sleep(wait)
        task.cancel()
        await asyncio.wait({task})
        left = {name for name in other.files() - before if not name.startswith("boot/")}
        if len(other.snapshots.of("w")) == known:
            assert task.cancelled()
            assert left == set()
        else:
            known += 1
            assert {name.split("/")[0] for name in left} >= {"snapshots", "layers"}


class _Eaten(Confined):
    """What a hostile disk makes of the program: ended by the kernel, or by itself."""

    how: int | type[Exception] = -9

    async def run(self, *_: Any, **__: Any) -> Completed:
        if isinstance(self.how, int):
            return Completed(b"", b"", self.how)
        raise self.how


@pytest.mark.parametrize(
    ("how", "told"),
    [(-9, "takes more"), (-11, "ends the program"), (TimeoutError, "takes more"), (1, "tables")],
)
async def test_a_disk_that_the_check_does_not_survive(
    site: Site, other: Site, how: int | type[Exception], told: str
) -> None:
    raw = await site.archive(site.snapshot(site.bake()))
    tool = _Eaten("qemu-img", other.data, None)
    tool.how = how
    importer = Importer(other.settings, other.machines, other.templates, other.snapshots, other.clock, tool)
    with pytest.raises(ClocheError, match=told) as caught:
        await importer.take_in("w", pieces(raw))
    assert caught.value.code == "request.invalid"
    assert other.files() == set()
