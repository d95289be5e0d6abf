"""Snapshots as templates: what is made of them, for whom, and when it goes."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from app_host import Crew
from archive_site import DISK_MB, MIB, SHAPE, Site, disk_bytes, pieces

from cloche_server.app import promote_template as promote_module
from cloche_server.app.capacity import Capacity
from cloche_server.app.create import CreateRequest, Creator
from cloche_server.app.pools import Pools
from cloche_server.app.promoted import pool_target, with_own_shape
from cloche_server.app.supervisor import Supervisor
from cloche_server.app.template_keeper import TemplateKeeper
from cloche_server.app.templates import Templates
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import BootMode, Sandbox
from cloche_server.store.db import Database
from cloche_server.store.sandboxes import SandboxStore
from kit.fake_engine import World, settle

pytestmark = pytest.mark.usefixtures("quick_disk")


class Shop:
    """A site that makes sandboxes, too."""

    def __init__(self, site: Site, database: Database, crew: Crew, warm: int = 0) -> None:
        self.site = site
        self.store = SandboxStore(database)
        capacity = Capacity(site.settings)
        self.pools = Pools(site.machines, capacity, launched=0, warm=warm)
        supervisor = Supervisor(self.store, site.machines, capacity, site.clock, crew)  # type: ignore[arg-type]
        baker: Any = None  # a promoted template is never baked
        self.creator = Creator(
            site.settings, site.templates, baker, site.machines, self.pools, capacity, supervisor, site.clock
        )
        self.supervisor = supervisor
        self.keeper = TemplateKeeper(site.templates, site.snapshots, self.store, self.pools)
        self.templates = Templates(site.templates, self.keeper)

    async def create(self, template: str, workspace: str = "w", **options: Any) -> Sandbox:
        return await self.creator.create(CreateRequest(workspace, template, **options))


@pytest.fixture
def shop(site: Site, database: Database, crew: Crew) -> Shop:
    return Shop(site, database, crew)


async def refused(site: Site, code: str, *args: Any, **options: Any) -> ClocheError:
    before = site.files()
    with pytest.raises(ClocheError) as told:
        await site.promoter.promote(*args, **options)
    assert told.value.code == code, told.value
    assert site.files() == before
    return told.value


# ---------------------------------------------------------------- what it is


@pytest.mark.parametrize("cold", [False, True])
async def test_memory_disk_and_device_state_are_those_of_the_snapshot(site: Site, cold: bool) -> None:
    one = site.snapshot(site.bake(), 3, cold=cold)
    disk = disk_bytes(site.layers.path(one.layer_id))
    meta = await site.promoter.promote("w", one.id, "mine", ["m", "mine"], "what it is")
    site.templates.check(meta)
    assert (meta.template.shape, meta.template.disk_mb) == (SHAPE, DISK_MB)
    assert (meta.workspace, meta.aliases, meta.description, meta.snapshot_id) == ("w", ("m",), "what it is", one.id)
    assert meta.template.thaw
    assert meta.defaults == one.defaults
    assert site.snapshots.remove(one)
    site.layers.release(one.layer_id)
    assert not list(site.layers.root.iterdir()), "it stands on no layer"
    directory = meta.template.directory
    assert (directory / "mem").read_bytes() == site.memory(cold)
    assert (directory / "dev").read_bytes() == b"device state"
    assert disk_bytes(directory / "disk.qcow2") == disk_bytes(directory / "overlay.qcow2") == disk
    assert (directory / "disk.qcow2").stat().st_size < MIB, "the root image is below it"


async def test_a_name_makes_sandboxes_that_are_thawed(shop: Shop, site: Site, world: World) -> None:
    site.bake()
    one = site.snapshot(site.templates.all()[0])
    meta = await site.promoter.promote("w", one.id, "mine", ["m"])
    for name in ("mine", "m", "mine"):
        record = await shop.create(name)
        assert (record.template_name, record.template_id) == ("mine", meta.template.id)
        assert record.resources.shape == SHAPE
        assert record.defaults.env == {"A": "1"}
        assert not record.cold
        renewal = next(request for machine, request in world.renewals if machine == record.id)
        assert renewal.thaw
        assert renewal.entropy
    shapes = {"cpus": SHAPE.cpus, "memory_mb": SHAPE.memory_mb}
    assert (await shop.create("mine", **shapes)).resources.shape == SHAPE
    for other in ({"cpus": 2}, {"memory_mb": 256}):
        with pytest.raises(ClocheError, match="another size") as told:
            await shop.create("mine", **other)
        assert told.value.code == "request.invalid"


async def test_a_warm_machine_of_it_is_thawed_in_the_pool(
    site: Site, database: Database, crew: Crew, world: World
) -> None:
    shop = Shop(site, database, crew, warm=1)
    meta = await site.promoter.promote("w", site.snapshot(site.bake()).id, "mine")
    assert pool_target(site.templates, "w/mine", "fake") == (None, meta)
    assert pool_target(site.templates, "mine", "fake") == (None, None), "nobody else gets what is in its memory"
    assert pool_target(site.templates, "other/mine", "fake") == (None, None)
    assert pool_target(site.templates, "w/base", "fake") == (None, None)
    assert pool_target(site.templates, "std", "fake") == ("base", None)
    shop.pools.aim(meta.template)
    filling = asyncio.ensure_future(shop.pools.run())
    try:
        await settle(lambda: shop.pools.counts()[BootMode.WARM.value] == 1)
        assert world.renewals[0][1].thaw
        record = await shop.create("mine")
        assert record.boot_mode is BootMode.WARM
    finally:
        filling.cancel()
        await asyncio.wait({filling})
        await shop.pools.drain()


async def test_again_under_the_same_name_is_its_newest_version(shop: Shop, site: Site) -> None:
    base = site.bake()
    first = await site.promoter.promote("w", site.snapshot(base).id, "mine")
    old = await shop.create("mine")
    site.clock.time += 1
    second = await site.promoter.promote("w", site.snapshot(base).id, "mine", ["m"])
    assert (await shop.create("mine")).template_id == second.template.id
    family = shop.templates.get("w", "m")
    assert [m.template.id for m in family.shapes] == [second.template.id]
    for _ in range(3):
        await shop.keeper.prune()
    assert site.templates.get(first.template.id) is not None, f"{old.id} lies over it"
    await shop.supervisor.withdraw(old.id)
    await shop.keeper.prune()
    assert site.templates.get(first.template.id) is not None, "what is being made just now may not be recorded yet"
    await shop.keeper.prune()
    assert {m.template.id for m in site.templates.all()} == {base.template.id, second.template.id}


# ---------------------------------------------------------------- for whom


async def test_only_its_workspace_knows_it(shop: Shop, site: Site) -> None:
    base = site.bake()
    await site.promoter.promote("w", site.snapshot(base).id, "mine")
    assert [(f.name, f.workspace) for f in shop.templates.list("w")] == [("base", None), ("mine", "w")]
    assert [f.name for f in shop.templates.list("other")] == ["base"]
    told = []
    for name in ("mine", "nothing"):
        with pytest.raises(ClocheError) as error:
            await shop.create(name, "other")
        told.append((error.value.code, error.value.message.replace(name, "?")))
        with pytest.raises(ClocheError) as missing:
            shop.templates.get("other", name)
        told.append((missing.value.code, missing.value.message))
        with pytest.raises(ClocheError) as gone:
            await shop.templates.remove("other", name)
        told.append((gone.value.code, gone.value.message))
    assert told[:3] == told[3:], "a foreign name answers like one that does not exist"
    theirs = await site.promoter.promote("other", site.snapshot(base, workspace="other").id, "mine")
    assert (await shop.create("mine", "other")).template_id == theirs.template.id
    assert (await shop.create("mine", "w")).template_id != theirs.template.id
    assert (
        await shop.create("base", "other", cpus=SHAPE.cpus, memory_mb=SHAPE.memory_mb)
    ).template_id == base.template.id


async def test_names_that_cannot_be_had(site: Site) -> None:
    (site.data / "later.toml").write_text("")
    base = site.bake()
    one = site.snapshot(base)
    for name in ("base", "std", "later"):
        assert name in (await refused(site, "template.name_taken", "w", one.id, name)).message
        await refused(site, "template.name_taken", "w", one.id, "mine", [name])
    for name in ("", "A", "a/b", "../a", "a" * 64):
        await refused(site, "request.invalid", "w", one.id, name)
    await refused(site, "snapshot.not_found", "other", one.id, "mine")
    await site.promoter.promote("w", one.id, "mine", ["m"])
    await refused(site, "template.name_taken", "w", one.id, "m")
    await refused(site, "template.name_taken", "w", one.id, "other", ["mine"])
    # One that is baked for all later on does not take the place of what a workspace has.
    site.bake("mine", created_at=1e12)
    found = site.templates.newest("mine", None, "w")
    assert found is not None
    assert found.workspace == "w"


async def test_names_of_two_at_once(site: Site) -> None:
    one, two = site.snapshot(site.bake()), site.snapshot(site.bake())
    made = await asyncio.gather(
        site.promoter.promote("w", one.id, "mine", ["m"]),
        site.promoter.promote("w", two.id, "m"),
        return_exceptions=True,
    )
    (refusal,) = (found for found in made if isinstance(found, BaseException))
    assert isinstance(refusal, ClocheError)
    assert refusal.code == "template.name_taken"


async def test_removal(shop: Shop, site: Site) -> None:
    base = site.bake()
    await site.promoter.promote("w", site.snapshot(base).id, "mine", ["m"])
    with pytest.raises(ClocheError, match="all workspaces") as told:
        await shop.templates.remove("w", "base")
    assert told.value.code == "request.invalid"
    box = await shop.create("mine")
    with pytest.raises(ClocheError) as used:
        await shop.templates.remove("w", "mine")
    assert used.value.code == "template.in_use"
    await shop.supervisor.withdraw(box.id)
    over = site.snapshot(site.templates.all()[-1])
    with pytest.raises(ClocheError, match="snapshots") as used:
        await shop.templates.remove("w", "mine")
    assert used.value.code == "template.in_use"
    assert site.snapshots.remove(over)
    await shop.templates.remove("w", "m")
    assert [m.template.id for m in site.templates.all()] == [base.template.id]
    with pytest.raises(ClocheError):
        await shop.templates.remove("w", "mine")


async def test_what_came_with_an_archive_goes_with_its_last_user(shop: Shop, site: Site, other: Site) -> None:
    raw = await other.archive(other.snapshot(other.bake()))
    one = await site.importer.take_in("w", pieces(raw))
    for _ in range(3):
        await shop.keeper.prune()
    assert site.templates.get(one.template_id) is not None
    assert site.snapshots.remove(one)
    site.layers.release(one.layer_id)
    for _ in range(4):
        await shop.keeper.prune()
    assert site.files() == set()


# ---------------------------------------------------------------- when it fails


@pytest.mark.parametrize("call", ["flatten_memory", "flatten_disk", "empty_overlay", "publish"])
async def test_a_step_that_fails_leaves_nothing(site: Site, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = site.snapshot(site.bake())

    def fail(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(*((site.templates, "publish") if call == "publish" else (promote_module, call)), fail)
    await refused(site, "host.disk_full", "w", one.id, "mine")
    assert site.snapshots.remove(one)
    site.layers.release(one.layer_id)
    assert not list(site.layers.root.iterdir()), "nothing holds its layers"


async def test_what_is_damaged_or_of_another_engine(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    base = site.bake()
    one, two = site.snapshot(base), site.snapshot(base)
    pages = site.snapshots.root / one.id / "pages"
    raw = bytearray(pages.read_bytes())
    raw[-1] ^= 1
    pages.write_bytes(raw)
    await refused(site, "snapshot.corrupt", "w", one.id, "mine")
    with monkeypatch.context() as patched:
        patched.setattr(type(site.engine), "fingerprint", property(lambda _: "other engine"))
        await refused(site, "snapshot.incompatible", "w", two.id, "mine")
        await _incompatible_template(site)
    site.layers.path(two.layer_id).unlink()
    await refused(site, "snapshot.corrupt", "w", two.id, "mine")
    monkeypatch.setattr(promote_module.files, "free_bytes", lambda _: 0)
    await refused(site, "host.disk_full", "w", two.id, "mine")


async def _incompatible_template(site: Site) -> None:
    site.bake("kept", workspace="w")
    with pytest.raises(ClocheError, match="other engine") as told:
        with_own_shape(site.templates, CreateRequest("w", "kept"), "other engine")
    assert told.value.code == "snapshot.incompatible"


async def test_a_caller_that_goes_away(site: Site) -> None:
    one = site.snapshot(site.bake())
    for wait in (0.0, 0.01, 0.03, 0.06, 0.1, 0.2):
        before = site.files()
        task = asyncio.ensure_future(site.promoter.promote("w", one.id, f"mine{wait}"))
        await asyncio.sleep(wait)
        task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            assert site.files() == before
    assert Path(site.layers.path(one.layer_id)).exists()
