"""Forks, pause and hibernation, stop and start."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from cloche_server.api import present
from cloche_server.api.context import SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers, json_body
from cloche_server.api.respond import json_response, read_model, while_connected
from cloche_server.api.routes.sandboxes import check_lifetime, check_ttl
from cloche_server.api.wire_lineage import (
    ForkAnswer,
    ForkBody,
    ForkTreeAnswer,
    ForkTreeBody,
    PromoteAnswer,
    PromoteBody,
    StatusAnswer,
    StopBody,
)
from cloche_server.app.fork import ForkRequest
from cloche_server.core.command import check_env
from cloche_server.core.errors import ClocheError

router = APIRouter(tags=["lineage"])

_MADE = answers(400, 402, 404, 409, 413, 500, 502, 503, 507)
_MOVED = answers(404, 409, 500, 502)


def _fork_request(body: ForkBody, services: ServicesDep) -> ForkRequest:
    check_ttl(body.ttl_seconds, body.persistent, services.settings)
    check_env(body.env)
    check_lifetime(body.max_lifetime_seconds, services.settings)
    if body.name is not None and body.count != 1:
        raise ClocheError(
            "request.invalid",
            f"name is for one child, and count is {body.count}; fork one at a time to name them",
            details={"field": "name"},
        )
    return ForkRequest(
        count=body.count,
        ttl_seconds=body.ttl_seconds,
        persistent=body.persistent,
        metadata=body.metadata,
        env=body.env,
        name=body.name,
        budget=body.budget,
        max_lifetime_seconds=body.max_lifetime_seconds,
    )


@router.post(
    "/sandboxes/{sandbox_id}/fork",
    status_code=201,
    response_model=ForkAnswer,
    responses=_MADE,
    openapi_extra=json_body(ForkBody),
    summary="Fork a running sandbox, memory and processes included",
)
async def fork(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """The parent stands still for a moment and goes on. Answers when the children run commands, with the first one as
    the object itself. 503 and 507: nothing was made."""
    body = await read_model(request, ForkBody)
    wanted = _fork_request(body, services)
    made = await while_connected(request, services.forks.make(workspace, sandbox_id, wanted))
    tree = present.fork_tree(sandbox_id, made, services.clock.now())
    return json_response({**tree["children"][0], **{k: v for k, v in tree.items() if k != "at"}}, 201)


@router.post(
    "/sandboxes/{sandbox_id}/fork-tree",
    status_code=201,
    response_model=ForkTreeAnswer,
    responses=_MADE,
    openapi_extra=json_body(ForkTreeBody),
    name="fork_tree",
    summary="Fork a running sandbox into several children of one moment",
)
async def fork_tree(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, ForkTreeBody)
    wanted = _fork_request(body, services)
    made = await while_connected(request, services.forks.make(workspace, sandbox_id, wanted))
    return json_response(present.fork_tree(sandbox_id, made, services.clock.now()), 201)


@router.post(
    "/sandboxes/{sandbox_id}/promote",
    response_model=PromoteAnswer,
    responses=answers(400, 404, 413, 500),
    openapi_extra=json_body(PromoteBody),
    summary="Keep one child of a fork",
)
async def promote(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """May be repeated. Siblings that could not be deleted are in `failures`."""
    body = await read_model(request, PromoteBody)
    done = await services.forks.promote(workspace, sandbox_id, body.tree_id, body.cleanup_siblings)
    return json_response(
        {
            "winner": sandbox_id,
            "tree_id": done.tree_id,
            "deleted": list(done.deleted),
            "failures": dict(done.failures),
        }
    )


@router.post("/sandboxes/{sandbox_id}/pause", status_code=204, responses=_MOVED, summary="Stop the vCPUs")
async def pause(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """Memory stays where it is. Time does not pass for what runs in it. A paused sandbox is left as it is."""
    await services.sleep.pause(workspace, sandbox_id)
    return Response(status_code=204)


@router.post(
    "/sandboxes/{sandbox_id}/resume",
    status_code=204,
    responses=answers(402, 404, 409, 500, 502),
    summary="Start the vCPUs again",
)
async def resume(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """The TTL is counted anew, as it was set. A running sandbox is left as it is."""
    await services.sleep.resume(workspace, sandbox_id)
    return Response(status_code=204)


@router.post(
    "/sandboxes/{sandbox_id}/hibernate",
    response_model=StatusAnswer,
    responses=answers(404, 409, 500, 502, 507),
    summary="Save memory on disk and end the VMM",
)
async def hibernate(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """Any command or file call wakes it; reading the object does not."""
    record = await services.sleep.hibernate(workspace, sandbox_id)
    return json_response({"status": record.status.value})


@router.post(
    "/sandboxes/{sandbox_id}/wake",
    response_model=StatusAnswer,
    responses=answers(402, 404, 409, 500, 502, 503, 507),
    summary="Go on from saved memory",
)
async def wake(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """A running sandbox is left as it is. The TTL is counted anew, as it was set."""
    record = await services.sleep.wake(workspace, sandbox_id)
    return json_response({"status": record.status.value})


@router.post(
    "/sandboxes/{sandbox_id}/stop",
    response_model=StatusAnswer,
    responses=answers(400, 402, 404, 409, 413, 500, 502, 503, 504),
    openapi_extra=json_body(StopBody),
    summary="Shut the guest down, keep its disk",
)
async def stop(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """A stopped sandbox is left as it is. 504 when the guest takes too long: it was not killed, and may still end."""
    body = await read_model(request, StopBody)
    record = await services.power.stop(workspace, sandbox_id, body.timeout_seconds, force=body.force)
    return json_response({"status": record.status.value})


@router.post(
    "/sandboxes/{sandbox_id}/start",
    response_model=StatusAnswer,
    responses=answers(402, 404, 409, 500, 502, 503, 507),
    summary="Boot it from its disk",
)
async def start(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """For one that is stopped or has failed. A running one is left as it is. The TTL is counted anew, as it was set."""
    record = await services.power.start(workspace, sandbox_id)
    return json_response({"status": record.status.value})


@router.post(
    "/sandboxes/{sandbox_id}/restart",
    response_model=StatusAnswer,
    responses=answers(400, 402, 404, 409, 413, 500, 502, 503, 504, 507),
    openapi_extra=json_body(StopBody),
    summary="Stop and start",
)
async def restart(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, StopBody)
    record = await services.power.restart(workspace, sandbox_id, body.timeout_seconds, force=body.force)
    return json_response({"status": record.status.value})
