"""Templates: what sandboxes can be made from."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from cloche_server.api import present
from cloche_server.api.context import ServicesDep, Workspace
from cloche_server.api.docs import answers
from cloche_server.api.respond import json_response
from cloche_server.api.wire_service import TemplateAnswer
from cloche_server.app.services import Services

router = APIRouter(tags=["templates"])


def default_shape(services: Services) -> tuple[int, int]:
    return services.settings.default_cpus, services.settings.default_memory_mb


@router.get(
    "/templates", response_model=list[TemplateAnswer], responses=answers(), name="list", summary="List templates"
)
async def list_templates(services: ServicesDep, workspace: Workspace) -> Response:
    """Those of all workspaces, and those that this one has promoted."""
    shape = default_shape(services)
    return json_response([present.template(family, shape) for family in services.templates.list(workspace)])


@router.get(
    "/templates/{name}", response_model=TemplateAnswer, responses=answers(404), name="get", summary="Get a template"
)
async def get_template(name: str, services: ServicesDep, workspace: Workspace) -> Response:
    """By name or alias."""
    return json_response(present.template(services.templates.get(workspace, name), default_shape(services)))


@router.delete(
    "/templates/{name}",
    status_code=204,
    responses=answers(400, 404, 409, 500),
    name="delete",
    summary="Delete a template that was promoted",
)
async def delete_template(name: str, services: ServicesDep, workspace: Workspace) -> Response:
    """All its versions. 409 while sandboxes or snapshots lie over one; 400 for a template of all workspaces."""
    await services.templates.remove(workspace, name)
    return Response(status_code=204)
