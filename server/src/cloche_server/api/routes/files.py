"""Files: bytes in and out, any size, never gathered in the server."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche_server.api import present
from cloche_server.api.context import (
    FlagQuery,
    GuestDir,
    GuestPath,
    SandboxId,
    ServicesDep,
    UserQuery,
    Workspace,
    flag,
    guest_path,
)
from cloche_server.api.docs import answers, header, json_body
from cloche_server.api.respond import ClientGone, big_json_response, json_response, read_model, wait_gone
from cloche_server.api.wire import MODE, DirAnswer, FileEntry, MkdirBody, MoveBody, WriteAnswer
from cloche_server.app.files import OpenFile, WriteOptions
from cloche_server.core.errors import ClocheError

router = APIRouter(tags=["files"])

_GUEST = (400, 402, 403, 404, 409, 500, 502, 507)
_BYTES = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
_FILE_HEADERS = {
    "X-File-Mode": header("Permission bits, octal"),
    "X-File-Mtime-Ns": header("Unix nanoseconds", "integer"),
}


class FileResponse(Response):
    """Sends an open file. A failure in mid-file cuts the connection: a short body is never taken for a file."""

    def __init__(self, request: Request, file: OpenFile) -> None:
        super().__init__(status_code=200)
        self._request = request
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"x-file-mode", f"{self._file.mode:04o}".encode()),
            (b"x-file-mtime-ns", str(self._file.mtime_ns).encode()),
        ]
        if self._file.size is not None:
            headers.append((b"content-length", str(self._file.size).encode()))
        gone = asyncio.ensure_future(wait_gone(self._request))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in self._file:
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClocheError as error:
            # The server cuts the connection of an answer that is not complete.
            scope["cloche.code"] = error.code
        finally:
            gone.cancel()
            await self._file.aclose()


@router.get(
    "/sandboxes/{sandbox_id}/fs",
    responses={200: {"description": "The bytes of the file", "headers": _FILE_HEADERS, **_BYTES}, **answers(*_GUEST)},
    response_class=Response,
    summary="Read a file",
)
async def read(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    path: GuestPath,
    user: UserQuery = None,
) -> Response:
    file = await services.files.read(workspace, sandbox_id, path, user)
    return FileResponse(request, file)


def _mode(mode: str | None) -> int | None:
    return None if mode is None else int(mode, 8)


def _nanoseconds(seconds: float) -> int:
    """As written in decimal: the product of two floats would be off by some hundred."""
    return int(Decimal(repr(seconds)) * 1_000_000_000)


@router.put(
    "/sandboxes/{sandbox_id}/fs",
    response_model=WriteAnswer,
    responses=answers(*_GUEST),
    openapi_extra={"requestBody": {"required": False, **_BYTES}},
    summary="Write a file",
)
async def write(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    path: GuestPath,
    user: UserQuery = None,
    mode: Annotated[str | None, Query(pattern=MODE, description="Octal; default: as it was, else 0644.")] = None,
    mtime: Annotated[float | None, Query(ge=0, le=9e9, allow_inf_nan=False, description="Unix seconds.")] = None,
    append: Annotated[FlagQuery, Query(description="Add to the end, in place.")] = None,
) -> Response:
    """Readers see the old or the new content. Missing parents are made. A body that breaks off changes nothing."""
    length = request.headers.get("content-length", "")
    options = WriteOptions(
        mode=_mode(mode),
        mtime_ns=None if mtime is None else _nanoseconds(mtime),
        append=flag(append, False),
        length=int(length) if length.isascii() and length.isdigit() and len(length) < 18 else None,
    )
    try:
        result = await services.files.write(workspace, sandbox_id, path, _body(request), options, user)
    except ClientDisconnect:
        raise ClientGone from None
    return json_response({"path": result.path, "bytes": result.bytes, "created": result.created})


async def _body(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        if chunk:
            yield chunk


@router.delete("/sandboxes/{sandbox_id}/fs", status_code=204, responses=answers(*_GUEST), summary="Delete")
async def delete(
    sandbox_id: SandboxId,
    services: ServicesDep,
    workspace: Workspace,
    path: GuestPath,
    user: UserQuery = None,
    recursive: Annotated[FlagQuery, Query(description="Default true: directories with all they hold.")] = None,
    must_exist: Annotated[FlagQuery, Query(description="A missing path is 404.")] = None,
) -> Response:
    await services.files.delete(
        workspace,
        sandbox_id,
        path,
        recursive=flag(recursive, True),
        must_exist=flag(must_exist, False),
        user=user,
    )
    return Response(status_code=204)


@router.get(
    "/sandboxes/{sandbox_id}/fs/dir",
    response_model=DirAnswer,
    responses=answers(*_GUEST),
    summary="List a directory",
)
async def list_dir(
    sandbox_id: SandboxId,
    services: ServicesDep,
    workspace: Workspace,
    path: GuestDir,
    user: UserQuery = None,
    limit: Annotated[int, Query(ge=1, le=10000)] = 10000,
    after: Annotated[str | None, Query(description="`next` of the page before.", max_length=1024)] = None,
) -> Response:
    """Sorted by name. `truncated` says that there are more: go on with `after` = `next`."""
    cursor = None
    if after is not None:
        try:
            cursor = base64.b64decode(after + "=" * (-len(after) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise ClocheError("request.invalid", "after is not a cursor", details={"field": "after"}) from None
    found = await services.files.list(workspace, sandbox_id, path, limit=limit, after=cursor, user=user)
    body = {
        "path": found.path,
        "entries": [present.file_entry(entry) for entry in found.entries],
        "truncated": found.truncated,
    }
    if found.next is not None:
        body["next"] = present.b64url(found.next)
    return await big_json_response(body)


@router.get("/sandboxes/{sandbox_id}/fs/stat", response_model=FileEntry, responses=answers(*_GUEST), summary="Stat")
async def stat(
    sandbox_id: SandboxId,
    services: ServicesDep,
    workspace: Workspace,
    path: GuestPath,
    user: UserQuery = None,
    follow: Annotated[FlagQuery, Query(description="Follow a link.")] = None,
) -> Response:
    entry = await services.files.stat(workspace, sandbox_id, path, follow=flag(follow, False), user=user)
    return json_response(present.file_entry(entry))


@router.post(
    "/sandboxes/{sandbox_id}/fs/mkdir",
    status_code=201,
    response_model=FileEntry,
    responses=answers(*_GUEST, 413),
    openapi_extra=json_body(MkdirBody),
    summary="Make a directory",
)
async def mkdir(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, MkdirBody)
    entry = await services.files.mkdir(
        workspace,
        sandbox_id,
        guest_path(body.path, None),
        parents=body.parents,
        mode=_mode(body.mode),
        user=body.user,
    )
    return json_response(present.file_entry(entry), 201)


@router.post(
    "/sandboxes/{sandbox_id}/fs/move",
    response_model=FileEntry,
    responses=answers(*_GUEST, 413),
    openapi_extra=json_body(MoveBody),
    summary="Rename or move",
)
async def move(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, MoveBody)
    entry = await services.files.move(
        workspace,
        sandbox_id,
        guest_path(body.source, None),
        guest_path(body.to, None),
        overwrite=body.overwrite,
        user=body.user,
    )
    return json_response(present.file_entry(entry))
