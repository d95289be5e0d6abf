"""Archives of trees, down and up, and watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche_server.api.context import FlagQuery, GuestDir, GuestPath, SandboxId, ServicesDep, UserQuery, Workspace, flag
from cloche_server.api.docs import answers, header, sse
from cloche_server.api.errors import error_body
from cloche_server.api.respond import ClientGone, json_response, wait_gone
from cloche_server.api.routes.files import upload
from cloche_server.api.routes.filetools import exact
from cloche_server.api.sse import SseEvent, SseResponse
from cloche_server.api.wire import ErrorAnswer
from cloche_server.api.wire_files import (
    FORMAT,
    ExtractAnswer,
    WatchChange,
    WatchEnd,
    WatchOverflow,
    WatchReady,
)
from cloche_server.app.filetools import OpenArchive, Watch
from cloche_server.core.errors import ClocheError
from cloche_server.core.trees import WatchEvent

router = APIRouter(tags=["files"])

_GUEST = (400, 402, 403, 404, 409, 413, 500, 501, 502, 503, 507)
_TYPES = {"tar": "application/x-tar", "tar.gz": "application/gzip", "zip": "application/zip"}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_PATTERNS = "Patterns of names, as in a search; may be given often."
Patterns = Annotated[list[Annotated[str, Query(min_length=1, max_length=1024)]] | None, Query(max_length=50)]
Format = Annotated[FORMAT, Query(alias="format")]


class ArchiveResponse(Response):
    """Sends an archive as it is made. A failure in the middle cuts the connection."""

    def __init__(self, request: Request, archive: OpenArchive, fmt: str) -> None:
        super().__init__(status_code=200)
        self._request = request
        self._archive = archive
        self._fmt = fmt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        archive = self._archive
        told = {"entries": archive.entries, "bytes": archive.bytes, "skipped": archive.skipped}
        headers = [(b"content-type", _TYPES[self._fmt].encode())]
        headers += [
            (f"x-archive-{name}".encode(), b"%d" % number) for name, number in told.items() if number is not None
        ]
        gone = asyncio.ensure_future(wait_gone(self._request))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in archive:
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClocheError as error:
            # The server cuts the connection of an answer that is not complete.
            scope["cloche.code"] = error.code
        finally:
            gone.cancel()
            await archive.aclose()


@router.get(
    "/sandboxes/{sandbox_id}/fs/archive",
    responses={
        200: {
            "description": "The archive",
            "headers": {
                "X-Archive-Entries": header("So many were found before it was begun", "integer"),
                "X-Archive-Bytes": header("So many they hold", "integer"),
                "X-Archive-Skipped": header("So many are left out: sockets, and what cannot be read", "integer"),
            },
            "content": dict.fromkeys(_TYPES.values(), _BINARY),
        },
        **answers(*_GUEST),
    },
    response_class=Response,
    summary="Download a tree",
)
async def archive(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    path: GuestPath,
    fmt: Format = "tar.gz",
    user: UserQuery = None,
    skip_unreadable: Annotated[FlagQuery, Query(description="Leave out what the user may not read.")] = None,
    include: Patterns = None,
    exclude: Patterns = None,
) -> Response:
    """What a directory holds, or one file, packed while it is sent. What the user may not read is an error before the
    first byte. A connection that is cut means that the archive is not whole."""
    found = await services.file_tools.pack(
        workspace,
        sandbox_id,
        path,
        fmt,
        skip_unreadable=flag(skip_unreadable, False),
        include=include or (),
        exclude=exclude or (),
        user=user,
    )
    return ArchiveResponse(request, found, fmt)


@router.put(
    "/sandboxes/{sandbox_id}/fs/archive",
    response_model=ExtractAnswer,
    responses=answers(*_GUEST),
    openapi_extra={"requestBody": {"required": False, "content": {"application/octet-stream": _BINARY}}},
    summary="Upload a tree",
)
async def extract(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    path: GuestPath,
    fmt: Format = "tar.gz",
    user: UserQuery = None,
    max_bytes: Annotated[int | None, Query(ge=1, le=2**53, description="That come out of it.")] = None,
    max_entries: Annotated[int | None, Query(ge=1, le=10**9)] = None,
    strip: Annotated[int, Query(ge=0, le=64, description="Leading components of names that are left out.")] = 0,
) -> Response:
    """Unpacked while it comes, into a directory that is made if need be. All belongs to the user. Nothing leads out of
    the directory, neither a name nor a link. Devices and FIFOs are left out and told in `notices`. After an error, what
    came before it stays, and `details.done` counts it."""
    options = {"max_bytes": max_bytes, "max_entries": max_entries, "strip": strip or None}
    try:
        done = await services.file_tools.extract(workspace, sandbox_id, path, fmt, upload(request), options, user)
    except ClientDisconnect:
        raise ClientGone from None
    return json_response(
        {
            "path": done.path,
            "files": done.files,
            "dirs": done.dirs,
            "links": done.links,
            "bytes": done.bytes,
            "skipped": done.skipped,
            "notices": [{"name": name, "why": why} for name, why in done.notices],
        }
    )


_CHANGES = dict.fromkeys(("created", "modified", "attributes", "deleted", "moved"), WatchChange)


@router.get(
    "/sandboxes/{sandbox_id}/fs/watch",
    responses={
        200: sse(
            "What happens, from `ready` on",
            {"ready": WatchReady, **_CHANGES, "overflow": WatchOverflow, "end": WatchEnd, "error": ErrorAnswer},
        ),
        **answers(*_GUEST),
    },
    response_class=Response,
    summary="Watch a directory",
)
async def watch(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    path: GuestDir,
    user: UserQuery = None,
    recursive: Annotated[FlagQuery, Query(description="Also all directories below, those that come later too.")] = None,
) -> Response:
    """Events have no ids: a reader that connects again sees what happens from then on, and has to look for itself what
    has happened meanwhile. So it is after `overflow`, which a reader that is too slow gets. The stream goes on until
    the directory goes (`end`) or one side hangs up; it does not keep the sandbox awake."""
    events = await services.file_tools.watch(workspace, sandbox_id, path, recursive=flag(recursive, False), user=user)
    return SseResponse(
        request,
        _events(events),
        events.aclose,
        lambda error: SseEvent("error", error_body(error, request.scope["cloche.request_id"])),
        services.stopping,
        {},
    )


async def _events(events: Watch) -> AsyncIterator[SseEvent]:
    async for event in events:
        yield _shown(event)


def _shown(event: WatchEvent) -> SseEvent:
    if event.kind == "gone":
        return SseEvent("end", {"reason": "gone"})
    if event.kind == "error":
        if event.code == "too_many_watches":
            raise ClocheError(
                "file.too_many_watches",
                "so many directories have come that they may not all be watched; watch fewer, or without `recursive`",
            )
        raise ClocheError("guest.error", "the watch has failed inside the sandbox")
    data: dict[str, Any] = {}
    if event.path is not None:
        data = {**exact(event.path), "is_dir": event.is_dir}
    if event.old is not None:
        data |= exact(event.old, "old_path")
    return SseEvent(event.kind, data)
