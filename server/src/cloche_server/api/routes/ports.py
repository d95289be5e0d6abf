"""Ports of a sandbox: what listens, who may come in, and links that are signed."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from cloche_server.api.context import SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers, header, json_body
from cloche_server.api.present import rfc3339, without_none
from cloche_server.api.respond import json_response, read_model
from cloche_server.api.wire_ports import PortAnswer, PortBody, PreviewTokenAnswer, PreviewTokenBody
from cloche_server.app.ports import PortView, PortWish
from cloche_server.core.previews import TOKEN_QUERY, HostRule, PortAccess

router = APIRouter(tags=["ports"])

Port = Annotated[int, Path(ge=0, le=2**31, description="TCP port.")]


def _shown(view: PortView) -> dict[str, Any]:
    rule = view.rule
    return without_none(
        {
            "port": rule.port,
            "label": rule.label,
            "listening": view.listening,
            "source": "user" if view.declared else "detected",
            "proxy_url": view.url,
            "access": rule.access.value,
            "domain": rule.domain,
            "username": rule.username,
            "host": rule.host.value,
            "addresses": list(view.addresses),
            "pid": view.pid,
            "process": view.process,
        }
    )


@router.get(
    "/sandboxes/{sandbox_id}/ports",
    response_model=list[PortAnswer],
    responses=answers(404),
    name="list",
    summary="Ports of a sandbox",
)
async def list_ports(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """Those on which something listens, and those about which something was said. Wakes nothing."""
    return json_response([_shown(view) for view in await services.ports.list(workspace, sandbox_id)])


@router.post(
    "/sandboxes/{sandbox_id}/ports",
    status_code=201,
    response_model=PortAnswer,
    responses={
        201: {"description": "It is so now", "headers": {"Location": header("Path of the port")}},
        **answers(400, 404, 409, 413, 500, 507),
    },
    openapi_extra=json_body(PortBody),
    name="declare",
    summary="Say something about a port",
)
async def declare(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """In place of what was said before. Connections of those who may not come in any more are cut."""
    body = await read_model(request, PortBody)
    wish = PortWish(
        body.port,
        body.label,
        body.domain,
        PortAccess(body.access) if body.access is not None else None,
        body.username,
        body.password,
        HostRule(body.host),
    )
    view = await services.ports.declare(workspace, sandbox_id, wish)
    location = f"/v1/sandboxes/{view.rule.sandbox_id}/ports/{body.port}"
    return json_response(_shown(view), 201, {"Location": location})


@router.get(
    "/sandboxes/{sandbox_id}/ports/{port}",
    response_model=PortAnswer,
    responses=answers(400, 404),
    name="get",
    summary="One port",
)
async def get(sandbox_id: SandboxId, port: Port, services: ServicesDep, workspace: Workspace) -> Response:
    """Of any port, also when nothing listens there yet."""
    return json_response(_shown(await services.ports.get(workspace, sandbox_id, port)))


@router.delete(
    "/sandboxes/{sandbox_id}/ports/{port}",
    status_code=204,
    responses=answers(400, 404, 500, 507),
    name="remove",
    summary="Take back what was said about a port",
)
async def remove(sandbox_id: SandboxId, port: Port, services: ServicesDep, workspace: Workspace) -> Response:
    """It is as any other port then, also for who may come in. Connections that lead to it are cut."""
    await services.ports.remove(workspace, sandbox_id, port)
    return Response(status_code=204)


@router.post(
    "/sandboxes/{sandbox_id}/preview-token",
    response_model=PreviewTokenAnswer,
    responses=answers(400, 404, 413),
    openapi_extra=json_body(PreviewTokenBody),
    name="token",
    summary="A signed link to a port",
)
async def token(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Whoever has it may use the port until it expires. It is sent as `X-Preview-Token`, as a bearer token, as
    `preview_token` in the query, as a cookie, or in the path of `url`; the server in the sandbox never sees it."""
    body = await read_model(request, PreviewTokenBody)
    ports = services.ports
    text, made = await ports.token(workspace, sandbox_id, body.port, body.ttl_seconds, body.paths)
    by_host = None if ports.base is None else ports.base.host_url(made.sandbox_id, made.port)
    return json_response(
        without_none(
            {
                "url": ports.token_url(text),
                "host_url": None if by_host is None else f"{by_host}/?{TOKEN_QUERY}={text}",
                "token": text,
                "sandbox_id": made.sandbox_id,
                "port": made.port,
                "paths": list(made.paths),
                "expires_at": rfc3339(made.expires_at),
            }
        )
    )
