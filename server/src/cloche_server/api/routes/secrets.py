"""Secrets of a workspace: written, never read."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from cloche_server.api.context import ServicesDep, Workspace
from cloche_server.api.docs import answers, json_body
from cloche_server.api.present import rfc3339, without_none
from cloche_server.api.respond import json_response, read_model
from cloche_server.api.wire_secrets import SecretAnswer, SecretBody, SecretList
from cloche_server.core.secrets import NAME, SecretInfo

router = APIRouter(tags=["secrets"])

SecretName = Annotated[
    str, Path(description="Name of a secret.", json_schema_extra={"pattern": f"^{NAME.pattern}$", "maxLength": 128})
]
_PEM: dict[str, Any] = {"content": {"application/x-pem-file": {"schema": {"type": "string"}}}}


def _shown(info: SecretInfo) -> dict[str, Any]:
    return without_none(
        {
            "name": info.name,
            "description": info.description or None,
            "version": info.version,
            "created_at": rfc3339(info.created_at),
            "updated_at": rfc3339(info.updated_at),
        }
    )


@router.put(
    "/secrets/{name}",
    response_model=SecretAnswer,
    responses={
        200: {"description": "It has a new value, which counts from the next request of a sandbox on"},
        201: {"description": "There was none of this name", "model": SecretAnswer},
        **answers(400, 409, 413, 500, 507),
    },
    openapi_extra=json_body(SecretBody),
    summary="Write a secret",
)
async def put(name: SecretName, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Makes it or rotates it. Sandboxes never get the value: it is put into their requests on the way, for the hosts
    that their grant names."""
    body = await read_model(request, SecretBody)
    info, made = await services.secrets.put(workspace, name, body.value, body.description)
    return json_response(_shown(info), 201 if made else 200)


@router.get("/secrets", response_model=SecretList, summary="List secrets by name", name="list")
async def list_all(services: ServicesDep, workspace: Workspace) -> Response:
    """Without their values, which no call gives out."""
    return json_response({"secrets": [_shown(info) for info in await services.secrets.all(workspace)]})


@router.get("/secrets/{name}", response_model=SecretAnswer, responses=answers(404), summary="Get a secret", name="get")
async def get(name: SecretName, services: ServicesDep, workspace: Workspace) -> Response:
    """What may be known of it: not its value."""
    return json_response(_shown(await services.secrets.get(workspace, name)))


@router.delete("/secrets/{name}", status_code=204, responses=answers(404, 507), summary="Delete a secret")
async def delete(name: SecretName, services: ServicesDep, workspace: Workspace) -> Response:
    """Requests of sandboxes that need it are answered with 403 from now on."""
    await services.secrets.delete(workspace, name)
    return Response(status_code=204)


@router.get(
    "/network/ca",
    responses={200: {"description": "PEM", **_PEM}, **answers(500, 507)},
    response_class=Response,
    summary="The certificate authority of the workspace",
)
async def ca(services: ServicesDep, workspace: Workspace) -> Response:
    """It signs what programs in a sandbox see as the certificate of a host that a secret is granted for. Sandboxes
    trust it already."""
    return Response(await services.secrets.ca(workspace), media_type="application/x-pem-file")
