"""The network of a sandbox: policy, log, reasons."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from cloche_server.api import present_network
from cloche_server.api.context import FlagQuery, SandboxId, ServicesDep, Workspace, flag
from cloche_server.api.docs import answers, json_body
from cloche_server.api.errors import error_body
from cloche_server.api.respond import json_response, parse_model, read_body
from cloche_server.api.sse import SseEvent, SseResponse
from cloche_server.api.wire_network import (
    EXPLAIN_HOST,
    ExplainAnswer,
    GrantBody,
    NetworkAnswer,
    NetworkBody,
    NetworkChangedAnswer,
    NetworkLogAnswer,
    ProposalAnswer,
)
from cloche_server.app.network import Page
from cloche_server.core.errors import ClocheError
from cloche_server.core.groups import check_group
from cloche_server.core.network import NetworkPolicy, SecretGrant
from cloche_server.core.policy_input import parse_policy
from cloche_server.core.secrets import parse_grants
from cloche_server.host.clock import random_bytes
from cloche_server.settings import Settings

router = APIRouter(tags=["network"])

#: 2,000 rules with long lists.
MAX_BODY = 4 * 1024 * 1024
_STREAM: dict[str, Any] = {
    "description": "The log; with `follow` or `Accept: text/event-stream` as a stream of `decision`, `gap` and `end`.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def policy_of(body: NetworkBody | None) -> NetworkPolicy | None:
    """The policy that is asked for. Raises `request.invalid`."""
    return None if body is None else parse_policy(body.model_dump(exclude_none=True))


def group_of(name: str | None, settings: Settings) -> str | None:
    """The network group that is asked for. Raises `request.invalid`, `network.off`."""
    if name is not None and settings.network == "off":
        raise ClocheError("network.off", "this server gives its sandboxes no network, so there are no network groups")
    return None if name is None else check_group(name)


def grants_of(bodies: list[GrantBody]) -> tuple[SecretGrant, ...]:
    """The grants that are asked for. Raises `request.invalid`."""
    return parse_grants([body.model_dump(exclude_none=True, by_alias=True) for body in bodies], random_bytes)


@router.get(
    "/sandboxes/{sandbox_id}/network",
    response_model=NetworkAnswer,
    responses=answers(404),
    summary="The network policy of a sandbox",
)
async def get(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    record = await services.network.get(workspace, sandbox_id)
    return json_response(present_network.policy(record.network))


@router.put(
    "/sandboxes/{sandbox_id}/network",
    response_model=NetworkChangedAnswer,
    responses=answers(400, 404, 409, 413, 503),
    openapi_extra=json_body(NetworkBody),
    summary="Give a sandbox another network policy",
)
async def put(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """In force when the answer comes; open connections that are not allowed any more are cut. 503: it is recorded, and
    in force as soon as anything of the sandbox is carried again."""
    wanted = policy_of(parse_model(await read_body(request, MAX_BODY), NetworkBody))
    assert wanted is not None
    record, cut = await services.network.put(workspace, sandbox_id, wanted)
    return json_response({**present_network.policy(record.network), "cut": cut})


@router.get(
    "/sandboxes/{sandbox_id}/network/log",
    response_model=NetworkLogAnswer,
    responses={200: _STREAM, **answers(400, 404, 409, 503)},
    name="log",
    summary="What was decided about names, connections and requests",
)
async def log(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    after: Annotated[int, Query(ge=0, le=2**53, description="Only entries after this `seq`.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    follow: FlagQuery = None,
    last_event_id: Annotated[
        str | None, Header(description="Of a stream that is connected again.", pattern=r"^[0-9]{0,15}$")
    ] = None,
) -> Response:
    """Since the machine of the sandbox was started; the oldest entries go when there are many. A stream ends with `end`
    when the machine does."""
    if last_event_id:
        after = int(last_event_id)
    if not (flag(follow, False) or "text/event-stream" in request.headers.get("accept", "")):
        return json_response(present_network.page(await services.network.log(workspace, sandbox_id, after, limit)))
    await services.network.log(workspace, sandbox_id, after, 1)  # refused before the stream begins

    async def nothing() -> None:
        return None

    return SseResponse(
        request,
        _stream(sandbox_id, services.network.follow(workspace, sandbox_id, after)),
        nothing,
        lambda error: SseEvent("error", error_body(error, request.scope["cloche.request_id"])),
        services.stopping,
        {},
    )


async def _stream(sandbox_id: str, pages: AsyncIterator[Page]) -> AsyncIterator[SseEvent]:
    async for page in pages:
        if page.lost:
            yield SseEvent("gap", {"lost": page.lost})
        for one in page.entries:
            shown = present_network.entry(one)
            yield SseEvent("decision", shown, str(shown["seq"]))
    yield SseEvent("end", {"sandbox_id": sandbox_id})


@router.get(
    "/sandboxes/{sandbox_id}/network/explain",
    response_model=ExplainAnswer,
    responses=answers(400, 404, 409, 503),
    name="explain",
    summary="Whether the policy allows a destination, and why",
)
async def explain(
    sandbox_id: SandboxId,
    services: ServicesDep,
    workspace: Workspace,
    host: Annotated[str, Query(description="A name or an address.", json_schema_extra=EXPLAIN_HOST)],
    port: Annotated[int, Query(ge=1, le=65535)] = 443,
    protocol: Literal["tcp", "udp"] = "tcp",
    method: Annotated[str | None, Query(description="Of one HTTP request.", pattern=r"^[A-Z][A-Z0-9_-]{0,31}$")] = None,
    path: Annotated[str, Query(pattern=r"^/[!-~]*$", max_length=1024)] = "/",
) -> Response:
    """Nothing is sent for it; a name counts with the addresses that the sandbox was told."""
    if not host or len(host) > 254:
        raise ClocheError("request.invalid", "host must have 1 to 254 characters", details={"field": "host"})
    question = {"host": host, "port": port, "protocol": protocol, "method": method or "", "path": path}
    return json_response(await services.network.explain(workspace, sandbox_id, question))


@router.get(
    "/sandboxes/{sandbox_id}/network/proposal",
    response_model=ProposalAnswer,
    responses=answers(404, 409, 503),
    name="proposal",
    summary="The smallest policy that allows what was seen",
)
async def proposal(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """Of what the sandbox asked for while its policy had `learn`, and was not refused as a matter of principle."""
    rules = await services.network.proposal(workspace, sandbox_id)
    return json_response({"mode": "allow-list", "rules": [present_network.rule(one) for one in rules]})
