"""Templates that were promoted from a snapshot: they have one shape, and belong to one workspace."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Shape
from cloche_server.storage.templates import TemplateCatalog, TemplateMeta

if TYPE_CHECKING:
    from cloche_server.app.create import CreateRequest


def with_own_shape(catalog: TemplateCatalog, request: CreateRequest, fingerprint: str) -> CreateRequest:
    """The request with the shape of the promoted template that it names; others are returned as they are. Raises
    `request.invalid` for another shape, `snapshot.incompatible`."""
    if request.source is not None:
        return request
    name = catalog.resolve(request.template, request.workspace)
    newest = catalog.newest(name, None, request.workspace) if name is not None else None
    if name is None or newest is None:
        return request
    if newest.from_recipe:
        return _with_usual_memory(request, newest)
    meta = catalog.newest(name, fingerprint, request.workspace)
    if meta is None:
        raise ClocheError(
            "snapshot.incompatible",
            f"the template {name} was promoted under {newest.fingerprint}; this host runs {fingerprint}; "
            "promote a snapshot that was taken here",
        )
    shape = meta.template.shape
    for field, asked, has in (("cpus", request.cpus, shape.cpus), ("memory_mb", request.memory_mb, shape.memory_mb)):
        if asked not in {None, has}:
            raise ClocheError(
                "request.invalid",
                f"the template {name} was promoted from a snapshot with {field} {has}; its memory cannot be continued "
                f"with another size, so leave {field} out",
                details={"field": field, "template": has},
            )
    return replace(request, cpus=shape.cpus, memory_mb=shape.memory_mb)


def _with_usual_memory(request: CreateRequest, meta: TemplateMeta) -> CreateRequest:
    """The memory that the recipe names. Raises `request.invalid` when less was asked for than what it needs."""
    usual, least = meta.furnishing.memory_mb, meta.furnishing.min_memory_mb
    if request.memory_mb is None:
        return replace(request, memory_mb=usual) if usual else request
    if request.memory_mb < least:
        raise ClocheError(
            "request.invalid",
            f"memory_mb is {request.memory_mb}, the template {meta.template.name} needs at least {least}; "
            f"leave it out for {usual}",
            details={"field": "memory_mb", "minimum": least},
        )
    return request


def usual_shape(catalog: TemplateCatalog, name: str, shape: Shape) -> Shape:
    """`shape` with the memory that the recipe of the template names, if it names any."""
    newest = catalog.newest(name)
    usual = newest.furnishing.memory_mb if newest is not None else 0
    return replace(shape, memory_mb=usual) if usual else shape


def pool_target(catalog: TemplateCatalog, setting: str, fingerprint: str) -> tuple[str | None, TemplateMeta | None]:
    """What `pool_template` names: a name for all workspaces, resolved, or the template of `<workspace>/<name>`."""
    workspace, slash, name = setting.rpartition("/")
    if not slash:
        return catalog.resolve(setting), None
    resolved = catalog.resolve(name, workspace)
    meta = catalog.newest(resolved, fingerprint, workspace) if resolved else None
    return None, meta if meta is not None and meta.workspace == workspace else None
