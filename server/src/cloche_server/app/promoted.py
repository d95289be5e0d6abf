"""Templates that were promoted from a snapshot: they have one shape, and belong to one workspace."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cloche_server.core.errors import ClocheError
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
    if name is None or newest is None or newest.from_recipe:
        return request
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


def pool_target(catalog: TemplateCatalog, setting: str, fingerprint: str) -> tuple[str | None, TemplateMeta | None]:
    """What `pool_template` names: a name for all workspaces, resolved, or the template of `<workspace>/<name>`."""
    workspace, slash, name = setting.rpartition("/")
    if not slash:
        return catalog.resolve(setting), None
    resolved = catalog.resolve(name, workspace)
    meta = catalog.newest(resolved, fingerprint, workspace) if resolved else None
    return None, meta if meta is not None and meta.workspace == workspace else None
