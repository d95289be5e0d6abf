"""Sessions as existing clients of other services call them: contexts of the code interpreter under other names."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from cloche_server.api.context import SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers, json_body
from cloche_server.api.keepalive import KEEPALIVE_AGENTS, KeepaliveResponse
from cloche_server.api.present_code import repl_run, repl_session
from cloche_server.api.respond import big_json_response, json_response, killed, read_model, while_connected
from cloche_server.api.routes.code import BODY_BYTES, known_language, outcome
from cloche_server.api.wire_code import (
    ReplAnswer,
    ReplBody,
    ReplRunAnswer,
    ReplRunBody,
    ReplSessionAnswer,
    ReplSessionBody,
)
from cloche_server.app.code import CodeRun
from cloche_server.app.code_result import CodeOutcome
from cloche_server.app.services import Services
from cloche_server.core.code import LANGUAGES
from cloche_server.core.command import Command
from cloche_server.core.errors import ClocheError
from cloche_server.host.clock import random_bytes

router = APIRouter(tags=["repl"])

SessionId = Annotated[str, Path(description="Id of a session, which is a context.")]
_USES = (402, 404, 409, 500, 502, 503, 507)
#: Programs that run a text once, without any state.
PROGRAMS = {
    "python": ("python3", "-c"),
    "py": ("python3", "-c"),
    "node": ("node", "-e"),
    "js": ("node", "-e"),
    "bash": ("bash", "-c"),
    "sh": ("sh", "-c"),
    "ruby": ("ruby", "-e"),
}
#: Seconds that such a program may run.
ONCE_SECONDS = 30.0


@router.get("/repl/languages", response_model=list[str], responses=answers(), summary="Languages of sessions")
async def languages(_workspace: Workspace) -> Response:
    return json_response(list(LANGUAGES))


@router.post(
    "/sandboxes/{sandbox_id}/repl/sessions",
    response_model=ReplSessionAnswer,
    status_code=201,
    responses=answers(400, 413, 429, *_USES),
    openapi_extra=json_body(ReplSessionBody),
    summary="Begin a session",
)
async def create(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, ReplSessionBody)
    making = services.codes.create(workspace, sandbox_id, known_language(body.language), None)
    return json_response(repl_session(await while_connected(request, making, killed), sandbox_id), 201)


@router.get(
    "/sandboxes/{sandbox_id}/repl/sessions",
    response_model=list[ReplSessionAnswer],
    responses=answers(*_USES),
    name="list",
    summary="Sessions of a sandbox",
)
async def list_sessions(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    found = await services.codes.contexts(workspace, sandbox_id)
    return json_response([repl_session(one, sandbox_id) for one in found])


@router.post(
    "/sandboxes/{sandbox_id}/repl/sessions/{session_id}/run",
    response_model=ReplRunAnswer,
    responses=answers(400, 413, 504, *_USES),
    openapi_extra=json_body(ReplRunBody),
    summary="Run code in a session",
)
async def run(
    sandbox_id: SandboxId, session_id: SessionId, request: Request, services: ServicesDep, workspace: Workspace
) -> Response:
    """A timeout is 504. It interrupts the code, and the session is kept unless that did not help. A client that gives
    up after half a minute without a byte is kept by white space, as with a command."""
    body = await read_model(request, ReplRunBody, BODY_BYTES)
    most = services.settings.exec_max_timeout
    wanted = CodeRun(body.code, min(body.timeout_ms / 1000, most), context_id=session_id)
    running = _in_time(services, workspace, sandbox_id, wanted)
    if request.headers.get("user-agent", "").startswith(KEEPALIVE_AGENTS):
        return KeepaliveResponse(request, running, {}, asked=False, show=repl_run)
    return await big_json_response(repl_run(await while_connected(request, running, killed)))


async def _in_time(services: Services, workspace: str, sandbox_id: str, wanted: CodeRun) -> CodeOutcome:
    found = await outcome(services.codes.run(workspace, sandbox_id, wanted))
    if found.end.status == "timeout":
        raise ClocheError(
            "exec.timeout",
            f"cell timeout after {wanted.timeout:g} s: {found.end.detail}",
            details={"timeout_seconds": wanted.timeout, "stdout": found.stdout, "stderr": found.stderr},
        )
    return found


@router.delete(
    "/sandboxes/{sandbox_id}/repl/sessions/{session_id}",
    status_code=204,
    responses=answers(*_USES),
    summary="End a session",
)
async def delete(sandbox_id: SandboxId, session_id: SessionId, services: ServicesDep, workspace: Workspace) -> Response:
    await services.codes.delete(workspace, sandbox_id, session_id)
    return Response(status_code=204)


@router.post(
    "/sandboxes/{sandbox_id}/repl",
    response_model=ReplAnswer,
    responses=answers(400, 413, 504, *_USES),
    openapi_extra=json_body(ReplBody),
    summary="Run code once, without state",
)
async def once(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """By the program of the language, in any sandbox that has it; one that is missing is exit code 127."""
    body = await read_model(request, ReplBody, BODY_BYTES)
    program = PROGRAMS.get(body.language.lower())
    if program is None:
        raise ClocheError(
            "request.invalid", f"language must be one of {', '.join(PROGRAMS)}", details={"field": "language"}
        )
    command = Command("x" + random_bytes(10).hex(), argv=[*program, body.code], timeout=ONCE_SECONDS)
    result = await while_connected(request, services.execs.run(workspace, sandbox_id, command), killed)
    return await big_json_response(
        {
            "language": body.language,
            "stdout": result.stdout,
            "stderr": result.stderr,
            "exit_code": result.end.exit_code,
        }
    )
