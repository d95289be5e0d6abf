"""Code in kernels that keep their state, and the contexts that they keep it in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel
from starlette.responses import Response

from cloche_server.api.context import SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers, json_body, sse
from cloche_server.api.errors import error_body
from cloche_server.api.present_code import code_context, code_end, code_error, code_outcome, code_result
from cloche_server.api.respond import big_json_response, json_response, killed, read_model, while_connected
from cloche_server.api.sse import SseEvent, SseResponse
from cloche_server.api.wire import ErrorAnswer
from cloche_server.api.wire_code import (
    CodeAnswer,
    CodeBody,
    CodeEndEvent,
    CodeErrorItem,
    CodeGapEvent,
    CodeInputBody,
    CodeInputEvent,
    CodeResultItem,
    CodeStartedEvent,
    CodeTextEvent,
    ContextAnswer,
    ContextBody,
    ContextListAnswer,
    InterruptAnswer,
)
from cloche_server.app.code import CodeRun, CodeStream
from cloche_server.app.code_result import CodeOutcome, collect
from cloche_server.core.code import (
    LANGUAGES,
    CodeEnd,
    CodeError,
    CodeEvent,
    CodeGap,
    CodeInput,
    CodeResult,
    CodeStarted,
    CodeText,
    language_of,
)
from cloche_server.core.errors import ClocheError
from cloche_server.settings import Settings

router = APIRouter(tags=["code"])

#: A program of 1 MiB may be six times as long in JSON.
BODY_BYTES = 8 * 1024 * 1024
ContextId = Annotated[str, Path(description="Id of a context.")]
_EVENTS: dict[str, type[BaseModel]] = {
    "started": CodeStartedEvent,
    "stdout": CodeTextEvent,
    "stderr": CodeTextEvent,
    "gap": CodeGapEvent,
    "result": CodeResultItem,
    "error": CodeErrorItem,
    "input_requested": CodeInputEvent,
    "end": CodeEndEvent,
    "failed": ErrorAnswer,
}
_TERMINAL = frozenset({"end", "failed"})
#: What can stand in the way of any use of a sandbox.
_USES = (402, 404, 409, 500, 502, 503, 507)


def known_language(name: str) -> str:
    """Raises `request.invalid`."""
    found = language_of(name)
    if found is None:
        raise ClocheError(
            "request.invalid",
            f"there is no kernel for this language; there are {', '.join(LANGUAGES)}; "
            "POST /v1/run runs whole programs of more languages",
            details={"field": "language"},
        )
    return found


def _wanted(body: CodeBody, settings: Settings) -> CodeRun:
    timeout = body.timeout_seconds or settings.exec_default_timeout
    if timeout > settings.exec_max_timeout:
        raise ClocheError(
            "request.invalid",
            f"timeout_seconds is {timeout:g}, this server allows at most {settings.exec_max_timeout}",
            details={"field": "timeout_seconds", "maximum": settings.exec_max_timeout},
        )
    if body.context is not None and body.language is not None:
        raise ClocheError(
            "request.invalid", "a context has a language of its own; give one of both", details={"field": "language"}
        )
    language = known_language(body.language) if body.language is not None else None
    return CodeRun(body.code, timeout, language, body.context, body.env, body.cwd, body.input)


@router.post(
    "/sandboxes/{sandbox_id}/code",
    response_model=CodeAnswer,
    responses={
        200: {"description": "The code has ended, well or not; with `stream` its events"}
        | sse(
            "Events; the last one is `end`, or `failed` when it is not known how the code ended",
            _EVENTS,
        ),
        **answers(400, 413, *_USES),
    },
    openapi_extra=json_body(CodeBody),
    summary="Run code in a kernel that keeps its state",
)
async def run(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """An exception, a timeout and the end of a kernel are 200: `status` tells. Who hangs up interrupts the code.
    Runs of one context wait for each other."""
    body = await read_model(request, CodeBody, BODY_BYTES)
    wanted = _wanted(body, services.settings)
    stream = services.codes.run(workspace, sandbox_id, wanted)
    if body.stream:
        running = await while_connected(request, stream, killed)

        def failed(error: ClocheError) -> SseEvent:
            return SseEvent("failed", error_body(error, request.scope["cloche.request_id"]))

        return SseResponse(
            request,
            _events(running),
            running.aclose,
            failed,
            services.stopping,
            {},
            terminal=_TERMINAL,
        )
    return await big_json_response(code_outcome(await while_connected(request, outcome(stream), killed)))


async def outcome(stream: Awaitable[CodeStream]) -> CodeOutcome:
    return await collect(await stream)


async def _events(running: CodeStream) -> AsyncIterator[SseEvent]:
    async for event in running:
        if (found := _TOLD.get(type(event))) is not None:
            name, data = found(event)
            yield SseEvent(name, data)


_TOLD: dict[type[CodeEvent], Callable[[Any], tuple[str, dict[str, Any]]]] = {
    CodeStarted: lambda e: ("started", {"context_id": e.context_id, "language": e.language}),
    CodeText: lambda e: (e.stream, {"text": e.text}),
    CodeGap: lambda e: ("gap", {"stream": e.stream, "count": e.count}),
    CodeResult: lambda e: ("result", code_result(e)),
    CodeError: lambda e: ("error", code_error(e)),
    CodeInput: lambda e: ("input_requested", {"prompt": e.prompt, "password": e.password}),
    CodeEnd: lambda e: ("end", code_end(e)),
}


@router.get(
    "/sandboxes/{sandbox_id}/code/contexts",
    response_model=ContextListAnswer,
    responses=answers(*_USES),
    name="list_contexts",
    summary="Contexts of a sandbox",
)
async def list_contexts(sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> Response:
    found = await services.codes.contexts(workspace, sandbox_id)
    return json_response({"contexts": [code_context(one) for one in found]})


@router.post(
    "/sandboxes/{sandbox_id}/code/contexts",
    response_model=ContextAnswer,
    status_code=201,
    responses=answers(400, 413, 429, *_USES),
    openapi_extra=json_body(ContextBody),
    name="create_context",
    summary="Make a context with a kernel of its own",
)
async def create_context(
    sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace
) -> Response:
    """At most 24 in a sandbox, those that languages have by themselves included; one more is 429."""
    body = await read_model(request, ContextBody)
    making = services.codes.create(workspace, sandbox_id, known_language(body.language), body.cwd)
    return json_response(code_context(await while_connected(request, making, killed)), 201)


@router.delete(
    "/sandboxes/{sandbox_id}/code/contexts/{context_id}",
    status_code=204,
    responses=answers(*_USES),
    name="delete_context",
    summary="End a context and its kernel",
)
async def delete_context(
    sandbox_id: SandboxId, context_id: ContextId, services: ServicesDep, workspace: Workspace
) -> Response:
    """What runs in it ends with `killed`."""
    await services.codes.delete(workspace, sandbox_id, context_id)
    return Response(status_code=204)


@router.post(
    "/sandboxes/{sandbox_id}/code/contexts/{context_id}/interrupt",
    response_model=InterruptAnswer,
    responses=answers(*_USES),
    name="interrupt_context",
    summary="Interrupt what runs in a context",
)
async def interrupt_context(
    sandbox_id: SandboxId, context_id: ContextId, services: ServicesDep, workspace: Workspace
) -> Response:
    """As Ctrl-C does: the state is kept."""
    return json_response({"interrupted": await services.codes.interrupt(workspace, sandbox_id, context_id)})


@router.post(
    "/sandboxes/{sandbox_id}/code/contexts/{context_id}/restart",
    status_code=204,
    responses=answers(*_USES),
    name="restart_context",
    summary="Start the kernel of a context anew",
)
async def restart_context(
    sandbox_id: SandboxId, context_id: ContextId, services: ServicesDep, workspace: Workspace
) -> Response:
    """The state is lost; what runs in it ends with `killed`."""
    await services.codes.restart(workspace, sandbox_id, context_id)
    return Response(status_code=204)


@router.post(
    "/sandboxes/{sandbox_id}/code/contexts/{context_id}/input",
    status_code=204,
    responses=answers(400, 413, *_USES),
    openapi_extra=json_body(CodeInputBody),
    name="answer_input",
    summary="Answer code that asks for input",
)
async def answer_input(
    sandbox_id: SandboxId, context_id: ContextId, request: Request, services: ServicesDep, workspace: Workspace
) -> Response:
    """409 `code.not_waiting` when nothing asks."""
    body = await read_model(request, CodeInputBody)
    await services.codes.answer(workspace, sandbox_id, context_id, body.text)
    return Response(status_code=204)
