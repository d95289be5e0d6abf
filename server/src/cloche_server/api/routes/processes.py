"""Processes: started, listed, waited for, signalled, written to, read."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from starlette.responses import Response

from cloche_server.api.context import FlagQuery, SandboxId, ServicesDep, Workspace, flag
from cloche_server.api.docs import answers, header, json_body, sse
from cloche_server.api.errors import error_body, termination_fields
from cloche_server.api.present import rfc3339, without_none
from cloche_server.api.raw_output import RawOutput
from cloche_server.api.respond import (
    json_response,
    killed,
    parse_model,
    read_body,
    read_model,
    undone,
    while_connected,
)
from cloche_server.api.sse import SseEvent, SseResponse
from cloche_server.api.wire import ErrorAnswer, GapEvent
from cloche_server.api.wire_process import (
    InputBody,
    OutputEndEvent,
    ProcessAnswer,
    ProcessBody,
    ProcessExitEvent,
    ProcessListAnswer,
    ProcessOutputEvent,
    SignalBody,
    SizeBody,
    WrittenAnswer,
)
from cloche_server.app.exec import end_of
from cloche_server.app.process_output import Loss, ProcessStream, SoFar, TextChunk
from cloche_server.core.errors import ClocheError
from cloche_server.core.process import ProcessWish, Size, parse_tag

router = APIRouter(tags=["processes"])

ProcessId = Annotated[str, Path(description="Id of a process, or the pid of one that runs.")]
Encoding = Annotated[str, Query(pattern="^(utf-8|base64)$", description="`utf-8` or `base64`.")]
_HEADERS = {"Location": header("Path of the process")}
_OUTPUT = sse(
    "Events as the process writes, then exactly one `exit`, `end` or `error`",
    {
        "stdout": ProcessOutputEvent,
        "stderr": ProcessOutputEvent,
        "gap": GapEvent,
        "exit": ProcessExitEvent,
        "end": OutputEndEvent,
        "error": ErrorAnswer,
    },
)
_OUTPUT["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
#: Bytes that one call may write.
_INPUT_MAX = 8 * 1024 * 1024
_LAST = 253402300799.0


def _shown(info: Any, is_lost: bool = False) -> dict[str, Any]:
    tag = parse_tag(info.tag)
    end = None if info.exit is None else end_of(info.exit)
    return without_none(
        {
            "process_id": info.id,
            "name": tag.name,
            "command": tag.command or None,
            "pid": info.pid,
            "status": "lost" if is_lost else "running" if info.running else "exited",
            "started_at": rfc3339(min(info.started_ns / 1e9, _LAST)),
            "stdin": info.stdin,
            "pty": None if info.pty is None else {"cols": info.pty[0], "rows": info.pty[1]},
            "output_bytes": info.offset,
            "kept_from": info.first,
            "stdout_bytes": info.stdout_bytes,
            "stderr_bytes": info.stderr_bytes,
            "exit_code": None if end is None else end.exit_code,
            "duration_ms": None if end is None else round(end.duration_ms),
            "termination": None if end is None else termination_fields(end),
        }
    )


def _guest(one: Any) -> dict[str, Any]:
    return without_none(
        {
            "pid": one.pid,
            "ppid": one.ppid,
            "uid": one.uid,
            "user": one.user,
            "state": one.state,
            "cpu_ms": one.cpu_ms,
            "rss_kb": one.rss_kb,
            "started_at": rfc3339(min(one.started_ns / 1e9, _LAST)),
            "name": one.name,
            "command": one.command,
            "process_id": one.exec_id,
        }
    )


def _wish(body: ProcessBody) -> ProcessWish:
    if body.cwd is not None and not body.cwd.startswith("/"):
        raise ClocheError("request.invalid", "cwd must be absolute", details={"field": "cwd"})
    return ProcessWish(
        shell=body.command if isinstance(body.command, str) else None,
        argv=body.argv,
        env=body.env,
        cwd=body.cwd,
        user=body.user,
        pipe=body.stdin == "pipe",
        pty=None if body.pty is None else Size(body.pty.cols, body.pty.rows),
        timeout=body.timeout_seconds or None,
        rlimits={str(name): value for name, value in body.rlimits.items()},
        name=body.name,
        record_kb=body.buffer_kb,
    )


@router.post(
    "/sandboxes/{sandbox_id}/processes",
    status_code=201,
    response_model=ProcessAnswer,
    responses={
        201: {"description": "It runs, or its program could not be started", "headers": _HEADERS},
        **answers(400, 402, 404, 409, 413, 500, 502, 507),
    },
    openapi_extra=json_body(ProcessBody),
    name="start",
    summary="Start a process",
)
async def start(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    key: Annotated[
        str | None,
        Header(alias="Idempotency-Key", min_length=1, max_length=255, description="The same: the same process."),
    ] = None,
) -> Response:
    """It runs until it ends or is killed: nobody has to stay connected. A second call with the same `Idempotency-Key`
    answers with the process of the first one."""
    raw = await read_body(request, services.settings.max_exec_body_mb * 1024 * 1024)
    wish = _wish(parse_model(raw, ProcessBody))
    work = services.processes.start(workspace, sandbox_id, wish, key, raw)
    info = await while_connected(request, work, killed)
    return json_response(_shown(info), 201, {"Location": f"/v1/sandboxes/{sandbox_id}/processes/{info.id}"})


@router.get(
    "/sandboxes/{sandbox_id}/processes",
    response_model=ProcessListAnswer,
    responses=answers(400, 402, 404, 409, 502, 507),
    name="list",
    summary="Processes of a sandbox",
)
async def list_processes(
    sandbox_id: SandboxId,
    services: ServicesDep,
    workspace: Workspace,
    everything: Annotated[FlagQuery, Query(alias="all", description="And all else that runs in it.")] = None,
) -> Response:
    """Those that run, those that have ended and are remembered, and those that a stop has taken away, oldest first.
    Commands that were started in the background are processes too."""
    found = await services.processes.list_all(workspace, sandbox_id)
    body: dict[str, Any] = {"processes": [_shown(info, is_lost) for info, is_lost in found]}
    if flag(everything, False):
        guest, more = await services.processes.guest_processes(workspace, sandbox_id)
        body |= {"guest": [_guest(one) for one in guest], "truncated": more}
    return json_response(body)


@router.get(
    "/sandboxes/{sandbox_id}/processes/{process_id}",
    response_model=ProcessAnswer,
    responses=answers(400, 402, 404, 409, 502, 507),
    name="get",
    summary="One process",
)
async def get(sandbox_id: SandboxId, process_id: ProcessId, services: ServicesDep, workspace: Workspace) -> Response:
    return json_response(_shown(*await services.processes.get(workspace, sandbox_id, process_id)))


@router.get(
    "/sandboxes/{sandbox_id}/processes/{process_id}/wait",
    response_model=ProcessAnswer,
    responses=answers(400, 402, 404, 409, 502, 507),
    name="wait",
    summary="Wait for the end of a process",
)
async def wait(
    sandbox_id: SandboxId,
    process_id: ProcessId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    timeout: Annotated[float, Query(ge=0, le=3600, allow_inf_nan=False, description="Seconds.")] = 30.0,
) -> Response:
    """Its `status` is `running` when that takes longer than `timeout`; ask again then."""
    work = services.processes.wait(workspace, sandbox_id, process_id, timeout)
    return json_response(_shown(*await while_connected(request, work, undone)))


@router.post(
    "/sandboxes/{sandbox_id}/processes/{process_id}/signal",
    status_code=204,
    responses=answers(400, 402, 404, 409, 413, 502, 507),
    openapi_extra=json_body(SignalBody),
    name="signal",
    summary="Send a signal to a process",
)
async def signal(
    sandbox_id: SandboxId, process_id: ProcessId, request: Request, services: ServicesDep, workspace: Workspace
) -> Response:
    body = await read_model(request, SignalBody)
    await services.processes.signal(workspace, sandbox_id, process_id, body.signal, body.target)
    return Response(status_code=204)


@router.post(
    "/sandboxes/{sandbox_id}/processes/{process_id}/resize",
    status_code=204,
    responses=answers(400, 402, 404, 409, 413, 502, 507),
    openapi_extra=json_body(SizeBody),
    name="resize",
    summary="Give the terminal of a process another size",
)
async def resize(
    sandbox_id: SandboxId, process_id: ProcessId, request: Request, services: ServicesDep, workspace: Workspace
) -> Response:
    """Its foreground processes get SIGWINCH."""
    body = await read_model(request, SizeBody)
    await services.processes.resize(workspace, sandbox_id, process_id, body.cols, body.rows)
    return Response(status_code=204)


_INPUT = json_body(InputBody)
_INPUT["requestBody"]["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
_INPUT["requestBody"]["required"] = False


@router.post(
    "/sandboxes/{sandbox_id}/processes/{process_id}/stdin",
    response_model=WrittenAnswer,
    responses=answers(400, 402, 404, 409, 413, 502, 507),
    openapi_extra=_INPUT,
    name="write",
    summary="Write to the input of a process",
)
async def write(
    sandbox_id: SandboxId,
    process_id: ProcessId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    close: Annotated[FlagQuery, Query(description="End the input behind what is written.")] = None,
    timeout: Annotated[
        float, Query(ge=0, le=600, allow_inf_nan=False, description="Seconds that the process has to take it.")
    ] = 30.0,
) -> Response:
    """The body as it is, or with the type `application/json` as `InputBody`. A process that does not read takes no more
    than its pipe holds: `bytes` says how many were taken, and the input is ended only if that is all."""
    raw = await read_body(request, 2 * _INPUT_MAX)
    ending = flag(close, False)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        body = parse_model(raw, InputBody)
        raw, ending = _data(body), ending or body.close
    if len(raw) > _INPUT_MAX:
        raise ClocheError(
            "request.too_large",
            f"at most {_INPUT_MAX} bytes can be written at once; send the rest in another call",
            details={"limit_bytes": _INPUT_MAX},
        )
    work = services.processes.write(workspace, sandbox_id, process_id, raw, timeout, close=ending)
    written = await while_connected(request, work, undone)
    return json_response({"bytes": written.bytes, "closed": written.closed})


def _data(body: InputBody) -> bytes:
    if body.encoding == "utf-8":
        return body.data.encode()
    try:
        return base64.b64decode(body.data, validate=True)
    except (binascii.Error, ValueError):
        raise ClocheError("request.invalid", "data is not base64", details={"field": "data"}) from None


@router.delete(
    "/sandboxes/{sandbox_id}/processes/{process_id}/stdin",
    status_code=204,
    responses=answers(402, 404, 409, 502, 507),
    name="close_stdin",
    summary="End the input of a process",
)
async def close_stdin(
    sandbox_id: SandboxId, process_id: ProcessId, services: ServicesDep, workspace: Workspace
) -> Response:
    """A terminal has no end of its input: write the character 4 to it."""
    await services.processes.write(workspace, sandbox_id, process_id, b"", 30.0, close=True)
    return Response(status_code=204)


@router.delete(
    "/sandboxes/{sandbox_id}/processes/{process_id}",
    status_code=204,
    responses=answers(402, 404, 409, 502, 507),
    name="delete",
    summary="Kill a process with all its processes, and forget it",
)
async def delete(sandbox_id: SandboxId, process_id: ProcessId, services: ServicesDep, workspace: Workspace) -> Response:
    await services.processes.forget(workspace, sandbox_id, process_id)
    return Response(status_code=204)


@router.get(
    "/sandboxes/{sandbox_id}/processes/{process_id}/output",
    responses={200: _OUTPUT, **answers(400, 402, 404, 409, 502, 507)},
    response_class=Response,
    name="output",
    summary="Read what a process has written, and go on as it writes",
)
async def output(
    sandbox_id: SandboxId,
    process_id: ProcessId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    from_: Annotated[int | None, Query(alias="from", ge=0, le=2**62, description="Offset to begin at.")] = None,
    stream: Annotated[Literal["stdout", "stderr"] | None, Query(description="That one alone.")] = None,
    follow: Annotated[FlagQuery, Query(description="False: what there is now.")] = None,
    encoding: Encoding = "utf-8",
    last_event_id: Annotated[str | None, Header(description="The `id` of the last event seen.")] = None,
) -> Response:
    """Any number of readers, each at its own pace. What is not kept any more is stated in a `gap` event. With
    `Accept: application/octet-stream` the bytes themselves: then `X-Output-From` is where they begin, and an answer
    that would have to leave something out later is broken off."""
    offset = from_ or 0
    if from_ is None and last_event_id and last_event_id.isascii() and last_event_id.isdigit():
        offset = min(int(last_event_id[:20]), 2**62)
    work = services.processes.output(workspace, sandbox_id, process_id, offset, stream, encoding, flag(follow, True))
    running = await while_connected(request, work, undone)
    if "application/octet-stream" in request.headers.get("accept", ""):
        return RawOutput(request, running, services.stopping)
    return _events_response(request, services.stopping, running, process_id, encoding)


def _events_response(
    request: Request, stopping: asyncio.Event, running: ProcessStream, process_id: str, encoding: str
) -> SseResponse:
    def failed(error: ClocheError) -> SseEvent:
        return SseEvent("error", error_body(error, request.scope["cloche.request_id"]))

    return SseResponse(request, _events(running, process_id, encoding), running.aclose, failed, stopping, {})


async def _events(running: ProcessStream, process_id: str, encoding: str) -> AsyncIterator[SseEvent]:
    async for item in running.texts():
        if isinstance(item, TextChunk):
            told = "base64" if encoding == "base64" else None
            data = without_none({"chunk": item.text, "offset": item.at, "encoding": told})
            yield SseEvent(item.stream, data, None if item.next is None else str(item.next))
        elif isinstance(item, Loss):
            yield SseEvent("gap", {"bytes": item.count, "stream": item.stream}, str(item.next))
        elif isinstance(item, SoFar):
            yield SseEvent("end", {"offset": item.next}, str(item.next))
        else:
            end = {"exit_code": item.exit_code, "duration_ms": round(item.duration_ms)}
            yield SseEvent("exit", {**end, "termination": termination_fields(item), "process_id": process_id})
