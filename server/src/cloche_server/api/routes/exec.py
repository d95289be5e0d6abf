"""Commands: blocking, streamed, in the background, and what is known of them afterwards."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from cloche_server.api import present
from cloche_server.api.context import ExecId, SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers, header, json_body, sse
from cloche_server.api.errors import error_body, result_fields, termination_fields
from cloche_server.api.keepalive import KEEPALIVE_AGENTS, KeepaliveResponse
from cloche_server.api.respond import big_json_response, json_response, killed, read_model, while_connected
from cloche_server.api.sse import SseEvent, SseResponse
from cloche_server.api.wire import (
    ErrorAnswer,
    ExecAnswer,
    ExecBody,
    ExecInfoAnswer,
    ExecListAnswer,
    ExecStarted,
    ExitEvent,
    GapEvent,
    OutputEvent,
)
from cloche_server.app.exec import ExecStream, StreamChunk, StreamGap
from cloche_server.core.command import Command, timeout_told
from cloche_server.core.errors import ClocheError
from cloche_server.host.clock import random_bytes
from cloche_server.settings import Settings

router = APIRouter(tags=["exec"])

_EXEC_HEADERS = {"X-Exec-Id": header("Id of the command")}
_SSE = sse(
    "Events as the command runs: output, then exactly one `exit` or `error`",
    {"stdout": OutputEvent, "stderr": OutputEvent, "gap": GapEvent, "exit": ExitEvent, "error": ErrorAnswer},
    _EXEC_HEADERS,
)
Encoding = Annotated[str, Query(pattern="^(utf-8|base64)$", description="`utf-8` or `base64`.")]


def _command(body: ExecBody, settings: Settings) -> Command:
    timeout = body.timeout_seconds or settings.exec_default_timeout
    if timeout > settings.exec_max_timeout:
        raise ClocheError(
            "request.invalid",
            f"timeout_seconds is {timeout:g}, this server allows at most {settings.exec_max_timeout}",
            details={"field": "timeout_seconds", "maximum": settings.exec_max_timeout},
        )
    if body.cwd is not None and not body.cwd.startswith("/"):
        raise ClocheError("request.invalid", "cwd must be absolute", details={"field": "cwd"})
    stdin = None
    if body.stdin is not None:
        try:
            stdin = base64.b64decode(body.stdin, validate=True) if body.stdin_base64 else body.stdin.encode()
        except (binascii.Error, ValueError):
            raise ClocheError("request.invalid", "stdin is not base64", details={"field": "stdin"}) from None
    return Command(
        exec_id=body.exec_id or "x" + random_bytes(10).hex(),
        shell=body.cmd if isinstance(body.cmd, str) else None,
        argv=body.argv,
        env=body.env,
        cwd=body.cwd,
        user=body.user,
        stdin=stdin,
        timeout=timeout,
        encoding=body.encoding,
        max_output=body.max_output_bytes,
        kill_on_limit=body.on_output_limit == "kill",
        detach=body.detach or body.background,
    )


@router.post(
    "/sandboxes/{sandbox_id}/exec",
    response_model=ExecAnswer,
    responses={
        200: {"description": "The command has ended", "headers": _EXEC_HEADERS},
        202: {
            "model": ExecStarted,
            "description": "The command runs in the background",
            "headers": _EXEC_HEADERS,
        },
        **answers(400, 402, 404, 409, 413, 500, 502, 504, 507),
    },
    openapi_extra=json_body(ExecBody),
    summary="Run a command",
)
async def run(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Non-zero exit codes are 200. A timeout is 504 with the partial output in `details`; a client that hangs up
    cancels its command unless `detach`."""
    body = await read_model(request, ExecBody, services.settings.max_exec_body_mb * 1024 * 1024)
    command = _command(body, services.settings)
    headers = {"X-Exec-Id": command.exec_id}
    if body.background:
        pid = await while_connected(request, services.execs.start(workspace, sandbox_id, command), killed)
        return json_response({"exec_id": command.exec_id, "status": "running", "pid": pid}, 202, headers)
    running = services.execs.run(workspace, sandbox_id, command)
    if body.keepalive or request.headers.get("user-agent", "").startswith(KEEPALIVE_AGENTS):
        return KeepaliveResponse(request, running, headers, asked=body.keepalive)
    result = await while_connected(request, running, killed)
    return await big_json_response(result_fields(result), 200, headers)


@router.post(
    "/sandboxes/{sandbox_id}/exec/stream",
    responses={200: _SSE, **answers(400, 402, 404, 409, 413, 500, 502, 507)},
    openapi_extra=json_body(ExecBody),
    response_class=Response,
    summary="Run a command and stream its output",
)
async def stream(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, ExecBody, services.settings.max_exec_body_mb * 1024 * 1024)
    command = _command(body, services.settings)
    running = await while_connected(request, services.execs.stream(workspace, sandbox_id, command), killed)
    return _sse(request, services.stopping, running, command.encoding, command.exec_id, command.timeout)


def _sse(
    request: Request,
    stopping: asyncio.Event,
    running: ExecStream,
    encoding: str,
    exec_id: str,
    timeout: float | None,
) -> SseResponse:
    def failed(error: ClocheError) -> SseEvent:
        return SseEvent("error", error_body(error, request.scope["cloche.request_id"]))

    return SseResponse(
        request,
        _events(running, encoding, exec_id, timeout, failed),
        running.aclose,
        failed,
        stopping,
        {"X-Exec-Id": exec_id},
    )


async def _events(
    running: ExecStream, encoding: str, exec_id: str, timeout: float | None, failed: Any
) -> AsyncIterator[SseEvent]:
    async for item in running:
        if isinstance(item, StreamChunk):
            data = {"chunk": item.text} if encoding == "utf-8" else {"chunk": item.text, "encoding": encoding}
            yield SseEvent(item.stream, data, None if item.offset is None else str(item.offset))
        elif isinstance(item, StreamGap):
            yield SseEvent("gap", {"bytes": item.count, "stream": item.stream}, str(item.offset))
        elif item.reason == "timeout":
            error = ClocheError(
                "exec.timeout",
                timeout_told(timeout, item),
                details={
                    "exec_id": exec_id,
                    "exit_code": item.exit_code,
                    "termination": termination_fields(item),
                    **({"timeout_seconds": timeout} if timeout else {}),
                },
            )
            yield failed(error)
        else:
            yield SseEvent(
                "exit",
                {
                    "exit_code": item.exit_code,
                    "duration_ms": round(item.duration_ms),
                    "termination": termination_fields(item),
                    "exec_id": exec_id,
                },
            )


@router.get(
    "/sandboxes/{sandbox_id}/exec",
    response_model=ExecListAnswer,
    responses=answers(402, 404, 409, 502, 507),
    name="list",
    summary="Running commands, and finished detached ones",
)
async def list_execs(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    found = await services.execs.list(workspace, sandbox_id)
    return json_response({"execs": [present.exec_info(info, None) for info in found]})


@router.get(
    "/sandboxes/{sandbox_id}/exec/{exec_id}",
    response_model=ExecInfoAnswer,
    responses=answers(400, 402, 404, 409, 502, 507),
    name="get",
    summary="One command, with its recorded output when it was detached and has ended",
)
async def get_exec(
    sandbox_id: SandboxId, exec_id: ExecId, services: ServicesDep, workspace: Workspace, encoding: Encoding = "utf-8"
) -> Response:
    info, result = await services.execs.get(workspace, sandbox_id, exec_id, encoding)
    return await big_json_response(present.exec_info(info, result))


@router.get(
    "/sandboxes/{sandbox_id}/exec/{exec_id}/stream",
    responses={200: _SSE, **answers(400, 402, 404, 409, 502, 507)},
    response_class=Response,
    summary="Follow a detached command from an output offset",
)
async def attach(
    sandbox_id: SandboxId,
    exec_id: ExecId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    from_: Annotated[int | None, Query(alias="from", ge=0, le=2**62)] = None,
    encoding: Encoding = "utf-8",
    last_event_id: Annotated[str | None, Header(description="The `id` of the last event seen.")] = None,
) -> Response:
    """What retention has lost is stated in a `gap` event. Hanging up leaves the command running."""
    offset = from_ or 0
    if from_ is None and last_event_id and last_event_id.isascii() and last_event_id.isdigit():
        offset = min(int(last_event_id[:20]), 2**62)
    running = await services.execs.attach(workspace, sandbox_id, exec_id, offset, encoding)
    return _sse(request, services.stopping, running, encoding, exec_id, None)


@router.delete(
    "/sandboxes/{sandbox_id}/exec/{exec_id}",
    status_code=204,
    responses=answers(402, 404, 409, 502, 507),
    summary="Kill a command and all its processes",
)
async def kill(sandbox_id: SandboxId, exec_id: ExecId, services: ServicesDep, workspace: Workspace) -> Response:
    await services.execs.kill(workspace, sandbox_id, exec_id)
    return Response(status_code=204)
