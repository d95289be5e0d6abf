"""Sandboxes: create, list, get, change, delete, lifecycle, logs, load."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from cloche_server.api import present
from cloche_server.api.context import OnlySandbox, SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers, header, json_body
from cloche_server.api.keepalive import KEEPALIVE_AGENTS
from cloche_server.api.respond import json_response, parse_model, read_body, read_model, while_connected
from cloche_server.api.routes.created import created, services_of
from cloche_server.api.routes.network import grants_of, group_of, policy_of
from cloche_server.api.routes.usage import budget_of
from cloche_server.api.wire import (
    LifecycleAnswer,
    LifecycleBody,
    LoadAnswer,
    SandboxAnswer,
    SandboxPatch,
)
from cloche_server.api.wire_create import CreateBody, CreatedAnswer
from cloche_server.app.create import CreateRequest
from cloche_server.app.names import IfExists
from cloche_server.app.services import Services
from cloche_server.core.code import TEMPLATE
from cloche_server.core.command import check_env
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import LISTED
from cloche_server.core.records import ExecDefaults, IdleAction, Sandbox
from cloche_server.settings import Settings

router = APIRouter(tags=["sandboxes"])

#: `?metadata.<key>=<value>`, any number of times: an object whose names are those of the parameters.
_METADATA_QUERY = {
    "name": "metadata",
    "in": "query",
    "style": "form",
    "explode": True,
    "description": "Each as `metadata.<key>=<value>`: only sandboxes that carry all of these labels.",
    "schema": {
        "type": "object",
        "propertyNames": {"pattern": r"^metadata\..+$"},
        "additionalProperties": {"type": "string"},
    },
}


_STATES = "|".join(sorted(one.value for one in LISTED))
#: The states that can be waited for, one or several.
_WAITED = f"^({_STATES})(,({_STATES}))*$"


def check_ttl(ttl: int | None, persistent: bool | None, settings: Settings) -> None:
    """Of everything that sets a TTL: a server with a longest one has no sandboxes that go on without."""
    most = settings.max_ttl_seconds
    if ttl is not None and most and (ttl == 0 or ttl > most):
        # Existing clients look for these words and try again without a TTL.
        raise ClocheError(
            "request.invalid",
            f"ttl_seconds exceeds tier maximum of {most} seconds",
            details={"field": "ttl_seconds", "maximum": most},
        )
    if persistent and most:
        raise ClocheError(
            "request.invalid",
            "persistent sandboxes are not allowed on this server",
            details={"field": "persistent"},
        )


def check_lifetime(seconds: int, settings: Settings) -> None:
    most = settings.max_lifetime_seconds
    if most and seconds > most:
        raise ClocheError(
            "request.invalid",
            f"max_lifetime_seconds is {seconds}, this server allows at most {most}",
            details={"field": "max_lifetime_seconds", "maximum": most},
        )


def _create_request(body: CreateBody, workspace: str, settings: Settings) -> CreateRequest:
    if body.volumes:
        raise ClocheError("not_implemented", "volumes are not available in this release")
    check_ttl(body.ttl_seconds, body.persistent, settings)
    check_lifetime(body.max_lifetime_seconds, settings)
    check_env(body.env)
    if body.cwd is not None and not body.cwd.startswith("/"):
        raise ClocheError("request.invalid", "cwd must be absolute", details={"field": "cwd"})
    disk = body.disk_mb if body.disk_mb is not None else (body.disk_gb * 1024 if body.disk_gb is not None else None)
    return CreateRequest(
        workspace=workspace,
        template=body.template,
        cpus=body.cpus,
        memory_mb=body.memory_mb,
        disk_mb=disk,
        ttl_seconds=body.ttl_seconds,
        persistent=body.persistent,
        metadata=body.metadata,
        defaults=ExecDefaults(body.env, body.cwd, body.user),
        minimum_boundary=body.isolation.minimum if body.isolation is not None else body.minimum_boundary,
        name=body.name,
        idle_seconds=body.idle_seconds,
        idle_action=IdleAction(body.idle_action),
        max_lifetime_seconds=body.max_lifetime_seconds,
        budget=budget_of(body.budget),
        network=policy_of(body.network),
        grants=grants_of(body.secrets),
        network_group=group_of(body.network_group, settings),
        services=services_of(body),
    )


async def _continue(
    services: Services, body: CreateBody, wanted: CreateRequest, key: str | None, raw: bytes
) -> tuple[Sandbox, bool]:
    """A create from a snapshot: clients send their default template with it, which does not count; sizes do."""
    assert body.from_snapshot is not None
    async with services.snapshots.source(wanted.workspace, body.from_snapshot) as (snapshot, source):
        sizes = {"cpus": snapshot.shape.cpus, "memory_mb": snapshot.shape.memory_mb}
        for name, has in sizes.items():
            if name in body.model_fields_set and getattr(wanted, name) not in {None, has}:
                raise ClocheError(
                    "request.invalid",
                    f"the snapshot {snapshot.id} has {name} {has}; its memory cannot be continued with another size",
                    details={"field": name, "snapshot": has},
                )
        before = snapshot.defaults
        defaults = ExecDefaults(
            {**before.env, **wanted.defaults.env},
            wanted.defaults.cwd or before.cwd,
            wanted.defaults.user or before.user,
        )
        request = replace(
            wanted,
            template=snapshot.template,
            source=source,
            cold=snapshot.cold,
            snapshot_id=snapshot.id,
            defaults=defaults,
            network=wanted.network or snapshot.network,
            grants=wanted.grants if "secrets" in body.model_fields_set else snapshot.grants,
        )
        return await services.creates.create(request, key, raw, IfExists(body.if_exists))


@router.post(
    "/sandboxes",
    status_code=201,
    response_model=CreatedAnswer,
    responses={
        200: {"description": "A sandbox of that name was there and runs", "model": SandboxAnswer},
        201: {"description": "The sandbox runs", "headers": {"Location": header("Path of the sandbox")}},
        **answers(400, 402, 404, 409, 413, 422, 500, 501, 502, 503, 507),
    },
    openapi_extra=json_body(CreateBody),
    summary="Create a sandbox",
)
async def create(
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    idempotency_key: Annotated[str | None, Header(description="Same key, same sandbox, for a day.")] = None,
) -> Response:
    """Answers when the sandbox runs commands. 503 and 507: nothing was made. A hang-up undoes the create."""
    raw = await read_body(request)
    body = parse_model(raw, CreateBody)
    if_exists = IfExists(body.if_exists)
    wanted = _create_request(body, workspace, services.settings)
    if body.template == TEMPLATE and request.headers.get("user-agent", "").startswith(KEEPALIVE_AGENTS):
        # These clients name it without being told to, and most of their users want commands and files.
        wanted = replace(wanted, stand_in="base")
    if body.from_snapshot is None:
        work = services.creates.create(wanted, idempotency_key, raw, if_exists)
    else:
        work = _continue(services, body, wanted, idempotency_key, raw)
    if body.services:
        return await while_connected(request, created(services, body, wanted, work))
    record, made = await while_connected(request, work)
    return json_response(present.sandbox(record), 201 if made else 200, {"Location": f"/v1/sandboxes/{record.id}"})


@router.get(
    "/sandboxes",
    response_model=list[SandboxAnswer],
    responses=answers(400),
    openapi_extra={"parameters": [_METADATA_QUERY]},
    name="list",
    summary="List sandboxes, oldest first",
)
async def list_sandboxes(
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    only: OnlySandbox,
    status: Annotated[
        Literal[
            "creating",
            "running",
            "paused",
            "hibernating",
            "hibernated",
            "waking",
            "stopping",
            "stopped",
            "starting",
            "failed",
        ]
        | None,
        Query(description="Only sandboxes in this state."),
    ] = None,
    name: Annotated[str | None, Query(description="Only the sandbox of this name.")] = None,
    network_group: Annotated[str | None, Query(description="Only the members of this network group.")] = None,
    limit: Annotated[int | None, Query(ge=1, le=10000)] = None,
    after: Annotated[str | None, Query(description="Only what follows this id.")] = None,
) -> Response:
    """`metadata.<key>=<value>` (any number) keeps those that carry all of these labels."""
    wanted = {
        key.removeprefix("metadata."): value
        for key, value in request.query_params.multi_items()
        if key.startswith("metadata.")
    }
    records = [one for one in services.access.list(workspace) if only in (None, one.id)]
    if after is not None:
        ids = [record.id for record in records]
        if after not in ids:
            raise ClocheError("request.invalid", "after is not the id of a listed sandbox", details={"field": "after"})
        records = records[ids.index(after) + 1 :]
    found = [
        record
        for record in records
        if (status is None or record.status.value == status)
        and (name is None or record.name == name)
        and (network_group is None or record.network_group == network_group)
        and all(not k.startswith("secret.") and record.metadata.get(k) == v for k, v in wanted.items())
    ]
    return json_response([present.sandbox(record) for record in found[:limit]])


@router.get("/sandboxes/{sandbox_id}", response_model=SandboxAnswer, responses=answers(404), summary="Get a sandbox")
async def get(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    return json_response(present.sandbox((await services.access.find(workspace, sandbox_id)).record))


@router.patch(
    "/sandboxes/{sandbox_id}",
    response_model=SandboxAnswer,
    responses=answers(400, 404, 409, 413, 500),
    openapi_extra=json_body(SandboxPatch),
    summary="Change metadata, TTL, idle action or network group",
)
async def patch(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, SandboxPatch)
    check_ttl(body.ttl_seconds, body.persistent, services.settings)
    group = group_of(body.network_group or None, services.settings)
    record = (await services.access.find(workspace, sandbox_id)).record
    if body.network_group is not None:
        record = await services.network.regroup(workspace, sandbox_id, group)
    if body.metadata:
        record = await services.lifecycle.set_metadata(workspace, sandbox_id, body.metadata)
    if body.ttl_seconds is not None or body.persistent is not None:
        _, record = await services.lifecycle.set_ttl(workspace, sandbox_id, body.ttl_seconds, body.persistent)
    if body.idle_seconds is not None or body.idle_action is not None:
        action = IdleAction(body.idle_action) if body.idle_action is not None else None
        record = await services.lifecycle.set_idle(workspace, sandbox_id, body.idle_seconds, action)
    return json_response(present.sandbox(record))


@router.get(
    "/sandboxes/{sandbox_id}/wait",
    response_model=SandboxAnswer,
    responses=answers(400, 404),
    summary="Wait for a state",
)
async def wait(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    status: Annotated[
        str,
        Query(description="States, separated by commas.", json_schema_extra={"pattern": _WAITED}),
    ] = "running",
    timeout: Annotated[float, Query(ge=0, le=600, description="Seconds.")] = 60,
) -> Response:
    """The sandbox as soon as it is in one of the states, or has failed, or when the time is up: see its `status`. 404
    with the reason when it ends meanwhile."""
    known = {one.value: one for one in LISTED}
    wanted = [known.get(name) for name in status.split(",")]
    if None in wanted:
        raise ClocheError(
            "request.invalid",
            f"status must be among {', '.join(sorted(known))}, separated by commas",
            details={"field": "status"},
        )
    found = frozenset(one for one in wanted if one is not None)
    record = await while_connected(request, services.lifecycle.wait(workspace, sandbox_id, found, timeout))
    return json_response(present.sandbox(record))


@router.delete("/sandboxes/{sandbox_id}", status_code=204, responses=answers(404, 500), summary="Delete a sandbox")
async def delete(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """In any state. Nothing of it is left when the answer comes."""
    await services.lifecycle.delete(workspace, sandbox_id)
    return Response(status_code=204)


@router.get("/sandboxes/{sandbox_id}/lifecycle", response_model=LifecycleAnswer, responses=answers(404), summary="TTL")
async def get_lifecycle(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    entry = await services.access.find(workspace, sandbox_id)
    return json_response(present.lifecycle(entry.record, services.access.idle_seconds(entry)))


@router.patch(
    "/sandboxes/{sandbox_id}/lifecycle",
    response_model=LifecycleAnswer,
    responses=answers(400, 404, 413, 500),
    openapi_extra=json_body(LifecycleBody),
    summary="Set the TTL, counted from now",
)
async def set_lifecycle(
    sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace
) -> Response:
    body = await read_model(request, LifecycleBody)
    check_ttl(body.ttl_seconds, body.persistent, services.settings)
    entry, record = await services.lifecycle.set_ttl(workspace, sandbox_id, body.ttl_seconds, body.persistent)
    return json_response(present.lifecycle(record, services.access.idle_seconds(entry)))


@router.get(
    "/sandboxes/{sandbox_id}/load",
    response_model=LoadAnswer,
    responses=answers(402, 404, 409, 502, 507),
    summary="Load of the machine, as its guest tells",
)
async def load(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    _, guest = await services.access.serving(workspace, sandbox_id)
    now = await guest.usage()
    return json_response({name: getattr(now, name) for name in LoadAnswer.model_fields})
