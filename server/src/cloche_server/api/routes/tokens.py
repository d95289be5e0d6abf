"""Tokens: make, list, revoke; and the audit log."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from cloche_server.api.context import Caller, ServicesDep, Workspace
from cloche_server.api.docs import answers, header, json_body
from cloche_server.api.present import rfc3339, without_none
from cloche_server.api.respond import json_response, read_model
from cloche_server.api.wire_tokens import AuditList, TokenBody, TokenList, TokenMade
from cloche_server.app.tokens import Wanted
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import TokenInfo
from cloche_server.core.scopes import Scope

router = APIRouter(tags=["tokens"])

TokenPrefix = Annotated[str, Path(description="Prefix of a token: `pds_` and 8 hex digits.")]


def _shown(token: TokenInfo) -> dict[str, Any]:
    return without_none(
        {
            "prefix": token.prefix,
            "name": token.name,
            "scope": token.scope.value,
            "workspace": token.workspace,
            "sandbox_id": token.sandbox_id,
            "created_at": rfc3339(token.created_at),
            "expires_at": None if token.expires_at is None else rfc3339(token.expires_at),
        }
    )


@router.post(
    "/tokens",
    status_code=201,
    response_model=TokenMade,
    responses={
        201: {"description": "The token, which is told once", "headers": {"Location": header("Its path")}},
        **answers(400, 404, 408, 409, 413, 507),
    },
    openapi_extra=json_body(TokenBody),
    summary="Make a token of this workspace",
)
async def create(request: Request, services: ServicesDep, caller: Caller) -> Response:
    """It can never do more than the token that makes it, nor outlive it."""
    body = await read_model(request, TokenBody)
    if body.sandbox_id is not None and caller.sandbox_id in (None, body.sandbox_id):
        await services.access.find(caller.workspace, body.sandbox_id)
    wanted = Wanted(body.name, Scope(body.scope), body.sandbox_id, body.expires_in_seconds)
    text, made = await services.tokens.create(caller, wanted)
    return json_response({**_shown(made), "token": text}, 201, {"Location": f"/v1/tokens/{made.prefix}"})


@router.get("/tokens", response_model=TokenList, name="list", summary="List tokens that open something, oldest first")
async def list_tokens(services: ServicesDep, caller: Caller) -> Response:
    return json_response({"tokens": [_shown(one) for one in await services.tokens.list(caller)]})


@router.delete("/tokens/{token_prefix}", status_code=204, responses=answers(404, 507), summary="Revoke a token")
async def revoke(token_prefix: TokenPrefix, services: ServicesDep, caller: Caller) -> Response:
    """At once: what still runs by it is ended. A token may revoke itself."""
    await services.tokens.revoke(caller, token_prefix)
    return Response(status_code=204)


@router.get(
    "/audit", response_model=AuditList, responses=answers(400), summary="What was changed, by whom, newest first"
)
async def audit(
    services: ServicesDep,
    workspace: Workspace,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[
        str | None,
        Query(description="`next` of the page before.", json_schema_extra={"pattern": "^[0-9]{1,18}$"}),
    ] = None,
) -> Response:
    """Requests that change something, carried out or refused, as far back as `audit_max_mb` goes."""
    if services.audit is None:
        return json_response({"entries": []})
    try:
        found, following = await services.audit.read(workspace, limit, before)
    except ValueError:
        raise ClocheError(
            "request.invalid", "before is not a cursor of this log", details={"field": "before"}
        ) from None
    return json_response(without_none({"entries": found, "next": following}))
