"""One-shot runs: a program in, its output out, nothing left."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from cloche_server.api.context import ServicesDep, Workspace
from cloche_server.api.docs import answers, header, json_body
from cloche_server.api.errors import error_body
from cloche_server.api.respond import big_json_response, json_response, killed, read_model, while_connected
from cloche_server.api.routes.network import policy_of
from cloche_server.api.wire_runs import (
    LanguageList,
    RunAnswer,
    RunBatchAnswer,
    RunBatchBody,
    RunBody,
    RunRecordAnswer,
)
from cloche_server.app.run_jobs import new_run_id, shown_result, told
from cloche_server.app.services import Services
from cloche_server.core.command import check_size
from cloche_server.core.errors import ClocheError
from cloche_server.core.languages import LANGUAGES, find_language
from cloche_server.core.runs import MAX_INPUT, Compare, RunFile, RunRequest, relative_path
from cloche_server.core.webhooks import SECRET_PREFIX, check_url

router = APIRouter(tags=["run"])

RunId = Annotated[str, Path(description="Id of a run.")]
#: Base64 and the JSON around it.
MAX_BODY: Final = 2 * MAX_INPUT
_RUN_ERRORS: Final = (400, 402, 404, 413, 422, 429, 500, 502, 503, 507)


def _invalid(field: str, message: str) -> ClocheError:
    return ClocheError("request.invalid", f"{field}: {message}", details={"field": field})


def _bytes(text: str, encoded: bool, field: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True) if encoded else text.encode()
    except (binascii.Error, ValueError):
        raise _invalid(field, "this is not base64") from None


def run_request(body: RunBody) -> RunRequest:
    """What is asked for. Raises `run.unknown_language`, `request.invalid`, `request.too_large`, `exec.too_large`."""
    language = find_language(body.language)
    if language is None:
        raise ClocheError(
            "run.unknown_language",
            "the language is not known; `GET /v1/run/languages` lists what there is",
            details={"languages": sorted(LANGUAGES)},
        )
    files = tuple(
        RunFile(_path(one.path), _bytes(one.content, one.encoding == "base64", "files")) for one in body.files
    )
    stdin = _bytes(body.stdin or "", body.stdin_base64, "stdin")
    size = len(body.source.encode()) + len(stdin) + sum(len(one.data) for one in files)
    if size > MAX_INPUT:
        raise ClocheError(
            "request.too_large",
            f"source, files and input together have {size} bytes, {MAX_INPUT} is the limit",
            details={"limit_bytes": MAX_INPUT},
        )
    check_size((*body.args, *body.compiler_options), None, body.env)
    return RunRequest(
        language=language,
        source=body.source,
        files=files,
        stdin=stdin,
        args=tuple(body.args),
        flags=tuple(body.compiler_options),
        env=body.env,
        timeout=body.timeout_seconds,
        compile_timeout=body.compile_timeout_seconds,
        template=body.template,
        cpus=body.cpus,
        memory_mb=body.memory_mb,
        network=policy_of(body.network),
        expected=body.expected_output,
        compare=Compare(body.compare),
        max_output=body.max_output_bytes,
        encoding=body.encoding,
    )


def _path(path: str) -> str:
    try:
        return relative_path(path)
    except ValueError as error:
        raise _invalid("files", str(error)) from None


def _check_callback(body: RunBody, services: Services) -> None:
    if body.callback_url is None:
        return
    if body.wait:
        raise _invalid("callback_url", "it goes with `wait` false; a caller who waits has the result in the answer")
    try:
        check_url(body.callback_url, private=services.settings.webhook_private)
    except ValueError as error:
        raise _invalid("callback_url", str(error)) from None
    secret = body.callback_secret
    if secret is not None:
        if not secret.startswith(SECRET_PREFIX):
            raise _invalid("callback_secret", f"it begins with {SECRET_PREFIX}")
        _bytes(secret.removeprefix(SECRET_PREFIX), True, "callback_secret")


@router.post(
    "/run",
    response_model=RunAnswer,
    responses={
        200: {"description": "The program has ended, or could not be compiled"},
        202: {
            "model": RunRecordAnswer,
            "description": "With `wait` false: it waits for its turn",
            "headers": {"Location": header("Path of the run")},
        },
        **answers(*_RUN_ERRORS),
    },
    openapi_extra=json_body(RunBody),
    summary="Run a program once",
    name="run",
)
async def run(request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """In a fresh sandbox of its own, which is gone afterwards. How the program has ended is data: `status` says it. A
    client that hangs up ends the run. Runs that find no room wait for it."""
    body = await read_model(request, RunBody, MAX_BODY)
    wanted = run_request(body)
    _check_callback(body, services)
    if not body.wait:
        record = await services.run_jobs.submit(workspace, wanted, body.callback_url, body.callback_secret)
        return json_response(told(record), 202, {"Location": f"/v1/run/{record.id}"})
    result = await while_connected(request, services.runs.run(workspace, new_run_id(), wanted), killed)
    return await big_json_response(shown_result(result))


@router.post(
    "/run/batch",
    response_model=RunBatchAnswer,
    responses=answers(400, 413, 500, 503),
    openapi_extra=json_body(RunBatchBody),
    summary="Run several programs, each by itself",
    name="batch",
)
async def batch(request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Answers when all have ended. One that cannot be run does not stop the others; its place holds the error."""
    body = await read_model(request, RunBatchBody, MAX_BODY)
    request_id = request.scope["cloche.request_id"]

    async def one(item: RunBody) -> dict[str, Any]:
        try:
            result = await services.runs.run(workspace, new_run_id(), run_request(item))
        except ClocheError as error:
            return {"failure": error_body(error, request_id)}
        return {"result": shown_result(result)}

    async def everyone() -> list[dict[str, Any]]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in body.runs]
        return [task.result() for task in tasks]

    results = await while_connected(request, everyone(), killed)
    return await asyncio.to_thread(json_response, {"results": results})


@router.get("/run/languages", response_model=LanguageList, summary="Languages of runs", name="languages")
async def languages(services: ServicesDep, workspace: Workspace) -> Response:
    """All that this release knows; `available` says whether the template that has it was baked here."""
    shown = [
        {
            "name": one.name,
            "title": one.title,
            "aliases": list(one.aliases),
            "file": one.file,
            "compiled": one.is_compiled,
            "template": one.template,
            "available": services.runs.is_available(workspace, one),
        }
        for one in LANGUAGES.values()
    ]
    return json_response({"languages": shown})


@router.get(
    "/run/{run_id}",
    response_model=RunRecordAnswer,
    responses=answers(404),
    summary="A run nobody waited for",
    name="get",
)
async def get(run_id: RunId, services: ServicesDep, workspace: Workspace) -> Response:
    """Its state, and its result when it has one."""
    return json_response(told(await services.run_jobs.get(workspace, run_id)))


@router.delete(
    "/run/{run_id}", status_code=204, responses=answers(404, 507), summary="End and forget a run", name="delete"
)
async def delete(run_id: RunId, services: ServicesDep, workspace: Workspace) -> Response:
    """If it goes on it is ended, and nothing is left of it."""
    await services.run_jobs.delete(workspace, run_id)
    return Response(status_code=204)
