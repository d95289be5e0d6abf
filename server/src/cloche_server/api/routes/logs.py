"""Logs of a sandbox: console, agent, processes, services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from cloche_server.api.context import Caller, FlagQuery, SandboxId, ServicesDep, Workspace, flag
from cloche_server.api.docs import answers, header, sse
from cloche_server.api.errors import error_body
from cloche_server.api.keepalive import KEEPALIVE_AGENTS
from cloche_server.api.respond import json_response, undone, while_connected
from cloche_server.api.sse import SseEvent, SseResponse
from cloche_server.api.wire import ErrorAnswer
from cloche_server.api.wire_logs import CURSOR, LineEvent, LogEndEvent, LogGapEvent
from cloche_server.app.logs import Log, LogPage
from cloche_server.core.errors import ClocheError
from cloche_server.core.logs import Cursor, LogEnd, LogItem, LogLine, check_source, parse_cursor
from cloche_server.core.records import TokenInfo
from cloche_server.core.scopes import Scope

router = APIRouter(tags=["sandboxes"])

#: Lines of an answer that is made at once; a longer one is made on a thread, and holds nobody up.
_SHORT: Final = 1000

_LOGS = sse(
    "Lines as text, as JSON with `format=json`, or as events with `follow`",
    {"line": LineEvent, "gap": LogGapEvent, "end": LogEndEvent, "error": ErrorAnswer},
    {
        "X-Log-Next": header(CURSOR + " Not with `follow`."),
        "X-Log-Gap": header("Bytes that were not kept and are missing; not with `follow`.", "integer"),
        "X-Log-More": header("`true`: there is more already; not with `follow`."),
    },
)
_LOGS["content"]["text/plain"] = {"schema": {"type": "string"}}
_LOGS["content"]["application/json"] = {"schema": {"$ref": "#/components/schemas/LogsAnswer"}}


@router.get(
    "/sandboxes/{sandbox_id}/logs",
    responses={200: _LOGS, **answers(400, 402, 403, 404, 409, 502, 507)},
    response_class=Response,
    summary="Logs of a sandbox: console, agent, processes, services",
)
async def logs(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    caller: Caller,
    source: Annotated[
        str,
        Query(
            description="`console`, `agent` (what the agent says there), `process:<id>` or `service:<name>`; the last "
            "two need a token of scope `exec`.",
            pattern="^(console|agent|(process|service):[a-z0-9-]{1,64})$",
        ),
    ] = "console",
    follow: Annotated[FlagQuery, Query(description="Go on as server-sent events.")] = None,
    tail: Annotated[int | None, Query(ge=0, le=100000, description="Only the last lines.")] = None,
    from_: Annotated[
        str | None, Query(alias="from", description=CURSOR, pattern=r"^[0-9]{1,18}(\.[0-9a-z]{1,32})?$")
    ] = None,
    format_: Annotated[
        Literal["text", "json"], Query(alias="format", description="Of an answer without `follow`.")
    ] = "text",
    stream: Annotated[str | None, Query(description="Ignored: a console has one stream.", deprecated=True)] = None,
    last_event_id: Annotated[str | None, Header(description="The `id` of the last event seen.")] = None,
) -> Response:
    """An answer without `follow` ends behind about 1 MiB, or 50,000 lines; `next` (`X-Log-Next`) is where to go on.
    Without `from` and `tail` a console begins with its last MiB (with `follow`: its last 4 KiB), all else with the
    oldest that is kept."""
    _check_scope(caller, source)
    cursor = _cursor(from_, last_event_id)
    log = await while_connected(request, services.logs.open(workspace, sandbox_id, source), undone)
    if flag(follow, False):
        return _events(request, services.stopping, log, cursor, tail)
    page = await while_connected(request, log.page(cursor, tail), undone)
    make = partial(_page, page, source) if format_ == "json" else partial(_text, page)
    return make() if len(page.lines) < _SHORT else await asyncio.to_thread(make)


def _check_scope(caller: TokenInfo, source: str) -> None:
    """What runs in the sandbox is for those who may run something there. Raises `auth.forbidden`."""
    kind, _ = check_source(source)
    if kind in {"process", "service"} and not caller.scope.holds(Scope.EXEC):
        raise ClocheError(
            "auth.forbidden",
            f"logs of processes and services need a token of scope exec, and this one has {caller.scope.value}",
            details={"scope": Scope.EXEC.value, "has": caller.scope.value},
        )


def _cursor(from_: str | None, last_event_id: str | None) -> Cursor | None:
    """Raises `request.invalid`. What is no id of ours is no place."""
    if from_ is None:
        return parse_cursor(last_event_id or "")
    if (cursor := parse_cursor(from_)) is None:
        raise ClocheError("request.invalid", "from is not a place in a log", details={"field": "from"})
    return cursor


def _page(page: LogPage, source: str) -> Response:
    # Not by way of the model: so many lines would be checked one by one, and everybody else would wait.
    told = {
        "source": source,
        "lines": [{"line": one.text, "stream": one.stream} for one in page.lines],
        "gap_bytes": page.gap_bytes,
        "restarted": page.restarted,
        "next": str(page.next),
        "more": page.more,
        "final": page.final,
    }
    return json_response(told)


def _text(page: LogPage) -> Response:
    text = "".join(one.text + ("\n" if one.whole else "") for one in page.lines)
    told = {"X-Log-Next": str(page.next), "X-Log-Gap": str(page.gap_bytes), "X-Log-More": str(page.more).lower()}
    return Response(text.encode("utf-8"), media_type="text/plain; charset=utf-8", headers=told)


def _events(request: Request, stopping: object, log: Log, cursor: Cursor | None, tail: int | None) -> Response:
    items = log.follow(cursor, tail)
    # These clients print whatever comes as a line, and take the end of the stream for the end.
    prints_all = request.headers.get("user-agent", "").startswith(KEEPALIVE_AGENTS)

    async def events() -> AsyncIterator[SseEvent]:
        async for item in items:
            if not (prints_all and isinstance(item, LogEnd)):
                yield _event(item)

    def failed(error: ClocheError) -> SseEvent:
        return SseEvent("error", error_body(error, request.scope["cloche.request_id"]))

    return SseResponse(request, events(), items.aclose, failed, stopping, {})  # type: ignore[arg-type]


def _event(item: LogItem) -> SseEvent:
    place = None if item.next is None else str(item.next)
    if isinstance(item, LogLine):
        told = {} if item.stream == "console" else {"stream": item.stream}
        return SseEvent("line", {"line": item.text, **told}, place)
    if isinstance(item, LogEnd):
        return SseEvent("end", {"next": str(item.next)}, place)
    return SseEvent("gap", {"bytes": item.bytes, "restarted": item.restarted}, place)
