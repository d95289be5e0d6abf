"""What has happened, as lists and as streams that go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from cloche_server.api.context import FlagQuery, OnlySandbox, SandboxId, ServicesDep, Workspace, flag
from cloche_server.api.docs import answers, header, sse
from cloche_server.api.errors import error_body
from cloche_server.api.respond import json_response
from cloche_server.api.scopes import narrowed
from cloche_server.api.sse import SseEvent, SseResponse
from cloche_server.api.wire import ErrorAnswer
from cloche_server.api.wire_events import TYPES, EventAnswer, EventList, MissingAnswer, StreamEnd
from cloche_server.app.events import Item, Missing, Question
from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError
from cloche_server.core.happenings import Told, shown

router = APIRouter(tags=["events"])

_NUMBER = r"^[0-9]{1,18}$"
_ONE = "|".join(kind.replace(".", r"\.").replace("*", r"\*") for kind in TYPES)
_TYPES = f"^({_ONE})(,({_ONE}))*$"

Tail = Annotated[int, Query(ge=0, le=1000, description="The newest so many; with `since` the oldest so many after it.")]
Types = Annotated[
    str | None,
    Query(
        alias="type",
        description="Only these, separated by commas; `sandbox.*` means all of one family.",
        json_schema_extra={"pattern": _TYPES},
    ),
]
Since = Annotated[
    str | None,
    Query(description="The id of an event: only what came after it.", json_schema_extra={"pattern": _NUMBER}),
]
LastEventId = Annotated[
    str | None,
    Header(
        description="As `since`, and before it: browsers send it when they connect again. An empty one is none.",
        json_schema_extra={"pattern": f"^$|{_NUMBER}"},
    ),
]
Follow = Annotated[FlagQuery, Query(description="Go on as server-sent events. So does `Accept: text/event-stream`.")]


_STREAM = sse(
    "Events, oldest first",
    {"event": EventAnswer, "gap": MissingAnswer, "end": StreamEnd, "error": ErrorAnswer},
    {"X-Events-After": header("With `follow`: the id after which the stream begins")},
)


@router.get(
    "/sandboxes/{sandbox_id}/events",
    response_model=EventList,
    responses={200: _STREAM, **answers(400, 404)},
    name="of_sandbox",
    summary="What has happened to a sandbox",
)
async def of_sandbox(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    tail: Tail = 50,
    follow: Follow = None,
    types: Types = None,
    since: Since = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Also of one that has ended, for as long as events are kept. A stream ends with `end` after `sandbox.deleted`."""
    await services.events.check(workspace, sandbox_id)
    question = Question(workspace, sandbox_id, _types(types))
    return await _answer(request, services, question, tail, flag(follow, False), _since(since, last_event_id))


@router.get(
    "/events",
    response_model=EventList,
    responses={200: _STREAM, **answers(400, 404)},
    name="of_workspace",
    summary="What has happened to all sandboxes",
)
async def of_workspace(
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    only: OnlySandbox,
    tail: Tail = 50,
    follow: Follow = None,
    types: Types = None,
    sandbox_id: Annotated[str | None, Query(description="Only of this sandbox.", max_length=256)] = None,
    since: Since = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Of this workspace. A stream goes on until one side hangs up, or with `sandbox_id` until that one is deleted; the
    id of the last event leads back to its place."""
    sandbox_id, workspace = narrowed(only, sandbox_id, workspace)
    if sandbox_id is not None:
        await services.events.check(workspace, sandbox_id)
    question = Question(workspace, sandbox_id, _types(types))
    return await _answer(request, services, question, tail, flag(follow, False), _since(since, last_event_id))


async def _answer(
    request: Request, services: Services, question: Question, tail: int, follow: bool, since: int | None
) -> Response:
    if not (follow or "text/event-stream" in request.headers.get("accept", "")):
        if since is None:
            return json_response({"events": [shown(told) for told in await services.events.last(question, tail)]})
        found, missing = await services.events.since(question, since, tail)
        gap = {} if missing is None else {"gap": _missing(missing)}
        return json_response({"events": [shown(told) for told in found], **gap})
    begin, items = await services.events.follow(question, since, tail)

    async def nothing() -> None:
        return None

    return SseResponse(
        request,
        _events(items),
        nothing,
        lambda error: SseEvent("error", error_body(error, request.scope["cloche.request_id"])),
        services.stopping,
        {"X-Events-After": str(begin)},
    )


async def _events(items: AsyncIterator[Item]) -> AsyncIterator[SseEvent]:
    async for item in items:
        if isinstance(item, Told):
            yield SseEvent("event", shown(item), str(item.seq))
        elif isinstance(item, Missing):
            yield SseEvent("gap", _missing(item), str(item.last))
        else:
            yield SseEvent("end", {"sandbox_id": item.sandbox_id})


def _missing(missing: Missing) -> dict[str, str]:
    return {"first_id": str(missing.first), "last_id": str(missing.last)}


def _types(text: str | None) -> tuple[str, ...]:
    chosen = tuple(text.split(",")) if text is not None else ()
    unknown = [kind for kind in chosen if kind not in TYPES]
    if unknown:
        raise ClocheError(
            "request.invalid",
            f"type must be among {', '.join(TYPES)}, separated by commas",
            details={"field": "type"},
        )
    return chosen


def _since(query: str | None, last_event_id: str | None) -> int | None:
    """The header stands for where the reader really is; a client that connects again repeats its first query."""
    field, text = ("Last-Event-ID", last_event_id) if last_event_id else ("since", query)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ClocheError(
            "request.invalid",
            f"{field} must be the id of an event, which is a decimal number",
            details={"field": field.lower()},
        )
    return int(text)
