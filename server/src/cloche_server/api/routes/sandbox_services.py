"""Services of a sandbox: defined, listed, started, stopped, waited for."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from cloche_server.api.context import SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers, header, json_body
from cloche_server.api.errors import termination_fields
from cloche_server.api.present import rfc3339, without_none
from cloche_server.api.respond import json_response, read_model, undone, while_connected
from cloche_server.api.wire_services import HealthBody, ServiceAnswer, ServiceBody, ServiceListAnswer
from cloche_server.app.exec import end_of
from cloche_server.app.sandbox_services import check_names
from cloche_server.core.errors import ClocheError
from cloche_server.core.services import SERVICE_NAME, STATES, HealthCheck, HttpCheck, ServiceSpec

router = APIRouter(tags=["services"])

ServiceNamePath = Annotated[str, Path(description="Name of a service.", pattern=SERVICE_NAME)]
_PATH = "/sandboxes/{sandbox_id}/services/{service_name}"
_HEADERS = {"Location": header("Path of the service")}
_LAST = 253402300799.0
_STATE = "|".join(STATES)
_SETTLED: tuple[str, ...] = ("healthy", "unhealthy", "stopped", "failed")


def _at(ns: int) -> str:
    return rfc3339(min(ns / 1e9, _LAST))


def _shown(one: Any) -> dict[str, Any]:
    last = None
    if one.last_exit is not None:
        end = end_of(one.last_exit)
        last = {"exit_code": end.exit_code, "at": _at(one.last_exit_ns), "duration_ms": round(end.duration_ms)}
        last["termination"] = termination_fields(end)
    return without_none(
        {
            "name": one.name,
            "state": one.state,
            "detail": one.detail or None,
            "waiting_for": list(one.waiting_for),
            "pid": one.pid or None,
            "process_id": one.process_id,
            "started_at": _at(one.started_ns) if one.started_ns else None,
            "restarts": one.restarts,
            "health_failures": one.failures,
            "retry_in_seconds": one.retry if one.state == "backoff" else None,
            "last_exit": last,
            "definition": _definition(one.spec),
        }
    )


def _definition(spec: ServiceSpec) -> dict[str, Any]:
    return without_none(
        {
            "command": spec.shell,
            "argv": None if spec.argv is None else list(spec.argv),
            "env": dict(spec.env),
            "cwd": spec.cwd,
            "user": spec.user,
            "rlimits": dict(spec.rlimits),
            "buffer_kb": spec.buffer_kb,
            "autostart": spec.autostart,
            "restart": spec.restart,
            "backoff_seconds": spec.backoff,
            "max_backoff_seconds": spec.max_backoff,
            "max_restarts": spec.max_restarts,
            "window_seconds": spec.window,
            "stop_signal": spec.stop_signal,
            "stop_grace_seconds": spec.stop_grace,
            "depends_on": list(spec.depends_on),
            "health": None if spec.health is None else _health(spec.health),
        }
    )


def _health(check: HealthCheck) -> dict[str, Any]:
    page = check.http
    return without_none(
        {
            "tcp": check.tcp_port,
            "http": page and without_none({"port": page.port, "path": page.path, "status": page.status}),
            "command": check.shell,
            "argv": None if check.argv is None else list(check.argv),
            "interval_seconds": check.interval,
            "timeout_seconds": check.timeout,
            "retries": check.retries,
            "start_period_seconds": check.start_period,
            "on_unhealthy": "restart" if check.restarts else "report",
        }
    )


def spec_of(body: ServiceBody, name: str) -> ServiceSpec:
    """What a body says. Raises `request.invalid`."""
    if body.cwd is not None and not body.cwd.startswith("/"):
        raise ClocheError("request.invalid", "cwd must be absolute", details={"field": "cwd"})
    check_names(body.depends_on, name)
    return ServiceSpec(
        shell=body.command if isinstance(body.command, str) else None,
        argv=body.argv,
        env=body.env,
        cwd=body.cwd,
        user=body.user,
        rlimits={str(key): value for key, value in body.rlimits.items()},
        buffer_kb=body.buffer_kb,
        autostart=body.autostart,
        restart=body.restart,
        backoff=body.backoff_seconds,
        max_backoff=body.max_backoff_seconds or max(30.0, body.backoff_seconds),
        max_restarts=body.max_restarts,
        window=body.window_seconds,
        stop_signal=body.stop_signal,
        stop_grace=body.stop_grace_seconds,
        depends_on=tuple(dict.fromkeys(body.depends_on)),
        health=None if body.health is None else _check(body.health),
    )


def _check(body: HealthBody) -> HealthCheck:
    page = body.http
    return HealthCheck(
        tcp_port=body.tcp,
        http=None if page is None else HttpCheck(page.port, page.path, page.status),
        shell=body.command if isinstance(body.command, str) else None,
        argv=body.argv,
        interval=body.interval_seconds,
        timeout=body.timeout_seconds,
        retries=body.retries,
        start_period=body.start_period_seconds,
        restarts=body.on_unhealthy == "restart",
    )


@router.get(
    "/sandboxes/{sandbox_id}/services",
    response_model=ServiceListAnswer,
    responses=answers(400, 402, 404, 409, 501, 502, 507),
    name="list",
    summary="Services of a sandbox",
)
async def list_services(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    """By name, as the agent in the sandbox tells it."""
    return json_response({"services": [_shown(one) for one in await services.units.list_all(workspace, sandbox_id)]})


@router.put(
    _PATH,
    response_model=ServiceAnswer,
    responses={
        200: {"description": "It was defined before"},
        201: {"model": ServiceAnswer, "description": "It is new", "headers": _HEADERS},
        **answers(400, 402, 404, 409, 413, 501, 502, 507),
    },
    openapi_extra=json_body(ServiceBody),
    name="put",
    summary="Define a service, and start it",
)
async def put(
    sandbox_id: SandboxId,
    service_name: ServiceNamePath,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
) -> Response:
    """The same definition changes nothing; another one ends what runs and starts it anew. It is kept on the disk of the
    sandbox, so that a boot, a fork and a restore have what belongs to them."""
    spec = spec_of(await read_model(request, ServiceBody), service_name)
    work = services.units.put(workspace, sandbox_id, service_name, spec)
    found, created = await while_connected(request, work, undone)
    headers = {"Location": f"/v1/sandboxes/{sandbox_id}/services/{service_name}"} if created else {}
    return json_response(_shown(found), 201 if created else 200, headers)


@router.get(
    _PATH,
    response_model=ServiceAnswer,
    responses=answers(400, 402, 404, 409, 501, 502, 507),
    name="get",
    summary="One service",
)
async def get(
    sandbox_id: SandboxId, service_name: ServiceNamePath, services: ServicesDep, workspace: Workspace
) -> Response:
    return json_response(_shown(await services.units.get(workspace, sandbox_id, service_name)))


@router.get(
    _PATH + "/wait",
    response_model=ServiceAnswer,
    responses=answers(400, 402, 404, 409, 501, 502, 507),
    name="wait",
    summary="Wait for a state of a service",
)
async def wait(
    sandbox_id: SandboxId,
    service_name: ServiceNamePath,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    state: Annotated[
        str | None,
        Query(
            description="Any of these, with commas between; default: all but `starting` and `backoff`.",
            pattern=f"^({_STATE})(,({_STATE}))*$",
            max_length=100,
        ),
    ] = None,
    timeout: Annotated[float, Query(ge=0, le=3600, allow_inf_nan=False, description="Seconds.")] = 30.0,
) -> Response:
    """Its `state` is another one when that takes longer than `timeout`; ask again then."""
    wanted = _SETTLED if state is None else tuple(state.split(","))
    work = services.units.wait(workspace, sandbox_id, service_name, wanted, timeout)
    return json_response(_shown(await while_connected(request, work, undone)))


async def _act(request: Request, services: ServicesDep, workspace: str, ids: tuple[str, str], verb: str) -> Response:
    work = services.units.act(workspace, *ids, verb)
    return json_response(_shown(await while_connected(request, work, undone)))


@router.post(
    _PATH + "/start",
    response_model=ServiceAnswer,
    responses=answers(400, 402, 404, 409, 501, 502, 507),
    name="start",
    summary="Start a service",
)
async def start(
    sandbox_id: SandboxId,
    service_name: ServiceNamePath,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
) -> Response:
    """And what it depends on. One that runs is left alone; one in `backoff` is started at once."""
    return await _act(request, services, workspace, (sandbox_id, service_name), "start")


@router.post(
    _PATH + "/stop",
    response_model=ServiceAnswer,
    responses=answers(400, 402, 404, 409, 501, 502, 507),
    name="stop",
    summary="Stop a service",
)
async def stop(
    sandbox_id: SandboxId,
    service_name: ServiceNamePath,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
) -> Response:
    """All its processes have ended when this answers. A boot starts it again if it has `autostart`."""
    return await _act(request, services, workspace, (sandbox_id, service_name), "stop")


@router.post(
    _PATH + "/restart",
    response_model=ServiceAnswer,
    responses=answers(400, 402, 404, 409, 501, 502, 507),
    name="restart",
    summary="Stop a service and start it again",
)
async def restart(
    sandbox_id: SandboxId,
    service_name: ServiceNamePath,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
) -> Response:
    return await _act(request, services, workspace, (sandbox_id, service_name), "restart")


@router.delete(
    _PATH,
    status_code=204,
    responses=answers(400, 402, 404, 409, 501, 502, 507),
    name="delete",
    summary="Stop a service and forget it",
)
async def delete(
    sandbox_id: SandboxId,
    service_name: ServiceNamePath,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
) -> Response:
    await while_connected(request, services.units.remove(workspace, sandbox_id, service_name), undone)
    return Response(status_code=204)
