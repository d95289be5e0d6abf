"""`cloche-server template …`"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import click

from cloche_server.app.bake import Baker
from cloche_server.cli.common import data_option, run_async, settings_from
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Shape
from cloche_server.host.clock import SystemClock
from cloche_server.settings import Settings
from cloche_server.storage.locate import find_agent, find_recipe
from cloche_server.storage.recipe import load_recipe
from cloche_server.storage.snapshots import SnapshotCatalog
from cloche_server.storage.templates import TemplateCatalog, TemplateMeta
from cloche_server.store.sandboxes import SandboxStore
from cloche_server.wiring import build_engine, build_network, open_database, prepare_data


@click.group()
def template() -> None:
    """Templates: what sandboxes are restored from."""


@template.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@data_option
def list_(as_json: bool, data: str | None) -> None:
    """List baked templates."""
    metas = TemplateCatalog(settings_from(data=data).data).all()
    rows = [
        {
            "id": m.template.id,
            "workspace": m.workspace,
            "name": m.template.name,
            "aliases": list(m.aliases),
            "cpus": m.template.shape.cpus,
            "memory_mb": m.template.shape.memory_mb,
            "disk_mb": m.template.disk_mb,
            "size_bytes": m.template.size_bytes,
            "accel": m.template.accel,
        }
        for m in metas
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for m in metas:
        shape = m.template.shape
        of = "" if m.workspace is None else f"  of workspace {m.workspace}{', from an archive' if m.hidden else ''}"
        click.echo(
            f"{m.template.id:32} {shape.cpus} vCPU  {shape.memory_mb} MiB  disk {m.template.disk_mb} MiB  "
            f"{m.template.size_bytes >> 20} MiB stored  {m.template.accel}{of}"
        )


@template.command()
@click.argument("name")
@click.option("--cpus", type=int, default=None, help="vCPUs of the baked size.")
@click.option("--memory-mb", type=int, default=None, help="Memory of the baked size.")
@data_option
def bake(name: str, cpus: int | None, memory_mb: int | None, data: str | None) -> None:
    """Bake a template from its recipe. What is baked already, and whole, is left as it is."""
    settings = settings_from(data=data)
    began = time.monotonic()

    def progress(text: str) -> None:
        click.echo(f"[{time.monotonic() - began:6.1f} s] {text}", err=True)

    meta = run_async(_bake(settings, name, cpus, memory_mb, progress))
    click.echo(f"{meta.template.id} is ready ({meta.template.size_bytes >> 20} MiB)")


async def _bake(
    settings: Settings, name: str, cpus: int | None, memory_mb: int | None, progress: Callable[[str], None]
) -> TemplateMeta:
    recipe = load_recipe(find_recipe(settings.recipes, name))
    memory = memory_mb or recipe.memory_mb or settings.default_memory_mb
    if memory < recipe.min_memory_mb:
        raise ClocheError("request.invalid", f"the template {name} needs at least {recipe.min_memory_mb} MiB of memory")
    shape = Shape(cpus or settings.default_cpus, memory)
    agent = find_agent(settings.agent)
    await asyncio.to_thread(prepare_data, settings.data)
    engine, _ = await build_engine(settings)
    catalog = TemplateCatalog(settings.data)
    baker = Baker(settings.data, engine, catalog, SystemClock(), build_network(settings))
    return await baker.bake(await baker.gather(recipe, agent, progress), shape, progress)


@template.command()
@click.argument("name")
@data_option
def rm(name: str, data: str | None) -> None:
    """Remove a baked template, by id, or all sizes of a name. One that was promoted: `<workspace>/<name>`."""
    settings = settings_from(data=data)
    removed = run_async(_remove(settings, name))
    for template_id in removed:
        click.echo(f"removed {template_id}")


async def _remove(settings: Settings, name: str) -> list[str]:
    catalog = TemplateCatalog(settings.data)
    doomed = [m for m in catalog.all() if name in (m.template.id, _name_for_all(m))]
    if not doomed:
        raise ClocheError("template.not_found", f"template {name} not found; `cloche-server template list` shows all")
    await asyncio.to_thread(prepare_data, settings.data)
    snapshots = await asyncio.to_thread(SnapshotCatalog(settings.data).read)
    async with open_database(settings.data) as database:
        store = SandboxStore(database)
        for meta in doomed:
            over = sum(snapshot.template_id == meta.template.id for snapshot in snapshots)
            if over:
                raise ClocheError(
                    "template.in_use", f"{meta.template.id} lies below {over} snapshots; delete them first"
                )
            users = await store.template_users(meta.template.id)
            if users:
                raise ClocheError(
                    "template.in_use", f"{meta.template.id} is used by {users} sandboxes; delete them first"
                )
    for meta in doomed:
        await asyncio.to_thread(catalog.remove, meta)
    return [meta.template.id for meta in doomed]


def _name_for_all(meta: TemplateMeta) -> str:
    """The name of a template where those of all workspaces are told apart."""
    return meta.template.name if meta.workspace is None else f"{meta.workspace}/{meta.template.name}"
