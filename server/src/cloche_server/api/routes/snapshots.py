"""Snapshots: take, list, look, check, go back to, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from cloche_server.api import present
from cloche_server.api.context import OnlySandbox, SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers, json_body
from cloche_server.api.respond import json_response, read_model
from cloche_server.api.scopes import narrowed
from cloche_server.api.wire import SandboxAnswer
from cloche_server.api.wire_lineage import (
    LineageAnswer,
    RestoreBody,
    SnapshotAnswer,
    SnapshotBody,
    SnapshotList,
    VerifyAnswer,
)
from cloche_server.app.services import Services
from cloche_server.core.scopes import NOWHERE

router = APIRouter(tags=["snapshots"])

SnapshotId = Annotated[str, Path(description="Id of a snapshot.")]


async def shown(services: Services, found: Sequence[Any]) -> list[dict[str, Any]]:
    """Snapshots as they are answered."""
    sizes = await asyncio.to_thread(lambda: [services.snapshots.disk_bytes(one) for one in found])
    return [present.snapshot(one, size) for one, size in zip(found, sizes, strict=True)]


@router.post(
    "/sandboxes/{sandbox_id}/snapshots",
    status_code=201,
    response_model=SnapshotAnswer,
    responses=answers(400, 402, 404, 409, 413, 500, 502, 507),
    openapi_extra=json_body(SnapshotBody),
    name="take_snapshot",
    summary="Take a durable snapshot, with memory or of the disk only",
)
async def take(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """A running sandbox stands still for a moment and goes on. When this answers, the snapshot is on disk for good, and
    holds all that the guest was told is written."""
    body = await read_model(request, SnapshotBody)
    made = await services.snapshots.take(workspace, sandbox_id, body.name, body.memory)
    return json_response((await shown(services, [made]))[0], 201)


@router.post(
    "/sandboxes/{sandbox_id}/restore",
    response_model=SandboxAnswer,
    responses=answers(400, 402, 404, 409, 413, 500, 502, 503, 507),
    openapi_extra=json_body(RestoreBody),
    summary="Take a sandbox back to a snapshot, in place",
)
async def restore(
    sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace, only: OnlySandbox
) -> Response:
    """It keeps its id, name, labels and environment; memory, processes and disk are those of the snapshot, and what
    came after it is lost. Any snapshot of the workspace will do that has the same size. The TTL is counted anew. When
    it cannot be begun, the sandbox is as before."""
    body = await read_model(request, RestoreBody)
    asked = body.snapshot_id
    if only == sandbox_id and asked is not None and not services.snapshots.is_of(workspace, asked, sandbox_id):
        services.snapshots.get(NOWHERE, asked)
    record = await services.restores.restore(workspace, sandbox_id, asked)
    return json_response(present.sandbox(record))


@router.get("/snapshots", response_model=SnapshotList, responses=answers(400), summary="List snapshots, newest first")
async def snapshots(
    services: ServicesDep,
    workspace: Workspace,
    only: OnlySandbox,
    sandbox_id: Annotated[str | None, Query(description="Only those of this sandbox: its checkpoints.")] = None,
) -> Response:
    one, place = narrowed(only, sandbox_id, workspace)
    return json_response({"snapshots": await shown(services, services.snapshots.list(place, one))})


@router.get("/snapshots/{snapshot_id}", response_model=SnapshotAnswer, responses=answers(404), summary="Get a snapshot")
async def get_snapshot(snapshot_id: SnapshotId, services: ServicesDep, workspace: Workspace) -> Response:
    found = services.snapshots.get(workspace, snapshot_id)
    return json_response((await shown(services, [found]))[0])


@router.get(
    "/snapshots/{snapshot_id}/lineage",
    response_model=LineageAnswer,
    responses=answers(404),
    summary="Where a snapshot comes from, and what came of it",
)
async def lineage(snapshot_id: SnapshotId, services: ServicesDep, workspace: Workspace) -> Response:
    found = services.snapshots.lineage(workspace, snapshot_id)
    bodies = await shown(services, [found.snapshot, *found.ancestors, *found.children])
    above = len(found.ancestors)
    return json_response(
        present.without_none(
            {
                "snapshot": bodies[0],
                "ancestors": bodies[1 : 1 + above],
                "missing_ancestor_id": found.missing,
                "children": bodies[1 + above :],
                "sandboxes": list(found.sandboxes),
            }
        )
    )


@router.post(
    "/snapshots/{snapshot_id}/verify",
    response_model=VerifyAnswer,
    responses=answers(404),
    summary="Compare every byte of a snapshot with what was written",
)
async def verify(snapshot_id: SnapshotId, services: ServicesDep, workspace: Workspace) -> Response:
    """Reads memory and all disk layers, which takes as long as their size asks for. A create looks at the same digests
    once for each state of the files."""
    problems = await services.snapshots.verify(workspace, snapshot_id)
    return json_response({"id": snapshot_id, "ok": not problems, "problems": list(problems)})


@router.delete(
    "/snapshots/{snapshot_id}", status_code=204, responses=answers(404, 500), summary="Delete a snapshot for good"
)
async def delete_snapshot(snapshot_id: SnapshotId, services: ServicesDep, workspace: Workspace) -> Response:
    """Sandboxes that were made from it go on."""
    await services.snapshots.remove(workspace, snapshot_id)
    return Response(status_code=204)
