"""Templates: what sandboxes can be made from."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from cloche_server.api import present
from cloche_server.api.context import ServicesDep, Workspace
from cloche_server.api.docs import answers
from cloche_server.api.respond import json_response
from cloche_server.api.wire import TemplateAnswer

router = APIRouter(tags=["templates"])


@router.get(
    "/templates", response_model=list[TemplateAnswer], responses=answers(), name="list", summary="List templates"
)
async def list_templates(services: ServicesDep, _workspace: Workspace) -> Response:
    settings = services.settings
    shape = (settings.default_cpus, settings.default_memory_mb)
    return json_response([present.template(family, shape) for family in services.templates.list()])


@router.get(
    "/templates/{name}", response_model=TemplateAnswer, responses=answers(404), name="get", summary="Get a template"
)
async def get_template(name: str, services: ServicesDep, _workspace: Workspace) -> Response:
    """By name or alias."""
    settings = services.settings
    shape = (settings.default_cpus, settings.default_memory_mb)
    return json_response(present.template(services.templates.get(name), shape))
