"""Files: bytes in and out, any size, never gathered in the server."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Mapping
from decimal import Decimal
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche_server.api import present
from cloche_server.api.conditions import check_read, etag, file_headers, read_wish, write_conditions
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
from cloche_server.api.errors import error_response
from cloche_server.api.respond import ClientGone, big_json_response, json_response, read_model, wait_gone
from cloche_server.api.wire import MODE, DirAnswer, FileEntry, MkdirBody, MoveBody, WriteAnswer
from cloche_server.app.files import OpenFile, WriteOptions
from cloche_server.core.errors import ClocheError

router = APIRouter(tags=["files"])

_GUEST = (400, 402, 403, 404, 409, 500, 502, 507)
_BYTES = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
_FILE_HEADERS = {
    "ETag": header("State of the file; absent where it has none, as in /proc"),
    "Accept-Ranges": header("`bytes`, or `none`"),
    "X-File-Mode": header("Permission bits, octal"),
    "X-File-Mtime-Ns": header("Unix nanoseconds", "integer"),
}


class FileResponse(Response):
    """Sends an open file. A failure in mid-file cuts the connection: a short body is never taken for a file."""

    def __init__(self, request: Request, file: OpenFile, more: Mapping[str, str] | None = None) -> None:
        super().__init__(status_code=200)
        self._request = request
        self._file = file
        self._more = [(name.lower().encode(), value.encode("latin-1")) for name, value in (more or {}).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/octet-stream"), *file_headers(self._file.head), *self._more]
        status = 200 if self._file.head.part is None else 206
        if self._file.size is not None:
            headers.append((b"content-length", str(self._file.size).encode()))
        gone = asyncio.ensure_future(wait_gone(self._request))
        try:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            if self._request.method == "HEAD":
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
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


_CONDITION = Header(description="Tags in double quotes with commas between, or `*`.", max_length=4096)
IfMatch = Annotated[str | None, _CONDITION]
IfNoneMatch = Annotated[str | None, _CONDITION]
RangeHeader = Annotated[str | None, Header(alias="range", description="One part, as `bytes=0-99`, `bytes=100-`.")]
IfRange = Annotated[str | None, Header(description="Only while the file has this tag; else all of it comes.")]
PART_HEADERS = {**_FILE_HEADERS, "Content-Range": header("`bytes <first>-<last>/<size>`")}
READ_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The bytes of the file", "headers": _FILE_HEADERS, **_BYTES},
    206: {"description": "A part of the file", "headers": PART_HEADERS, **_BYTES},
    304: {"description": "The file has one of the tags", "headers": _FILE_HEADERS},
    **answers(*_GUEST, 412, 416),
}


async def send_file(request: Request, open_file: OpenFile, more: Mapping[str, str] | None = None) -> Response:
    """An open file as an answer, or that it has not changed. Raises `file.changed`."""
    try:
        if check_read(request, open_file.head):
            return FileResponse(request, open_file, more)
    except BaseException:
        await open_file.aclose()
        raise
    await open_file.aclose()
    headers = {name.decode(): value.decode() for name, value in file_headers(open_file.head)}
    headers.pop("content-range", None)
    return Response(status_code=304, headers=headers)


def no_such_part(request: Request, error: ClocheError) -> Response:
    """The answer that says how large the file is."""
    request.scope["cloche.code"] = error.code
    answer = error_response(error, request.scope["cloche.request_id"])
    size = error.details.get("done", {}).get("size", 0)
    answer.headers["Content-Range"] = f"bytes */{size}"
    return answer


@router.get(
    "/sandboxes/{sandbox_id}/fs",
    responses=READ_ANSWERS,
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
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
    part: RangeHeader = None,
    if_range: IfRange = None,
) -> Response:
    """All of it, or with `Range` one part. Several parts are not sent: all of it comes then."""
    try:
        found = await services.files.read(workspace, sandbox_id, path, user, read_wish(request))
    except ClocheError as error:
        if error.code != "file.range_not_satisfiable":
            raise
        return no_such_part(request, error)
    return await send_file(request, found)


@router.head(
    "/sandboxes/{sandbox_id}/fs",
    responses={200: {"description": "As for a read", "headers": _FILE_HEADERS}, **answers(*_GUEST, 412)},
    response_class=Response,
    summary="Size, mode and state of a file",
)
async def head(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    path: GuestPath,
    user: UserQuery = None,
) -> Response:
    found = await services.files.read(workspace, sandbox_id, path, user, read_wish(request))
    return await send_file(request, found)


def octal(mode: str | None) -> int | None:
    return None if mode is None else int(mode, 8)


def nanoseconds(seconds: float) -> int:
    """As written in decimal: the product of two floats would be off by some hundred."""
    return int(Decimal(repr(seconds)) * 1_000_000_000)


@router.put(
    "/sandboxes/{sandbox_id}/fs",
    response_model=WriteAnswer,
    responses={
        200: {"description": "Written", "headers": {"ETag": header("State of the file as it is now")}},
        **answers(*_GUEST, 412),
    },
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
    if_match: IfMatch = None,
    if_none_match: Annotated[str | None, Header(description="`*`: only when there is nothing yet.")] = None,
) -> Response:
    """Readers see the old or the new content. Missing parents are made. A body that breaks off changes nothing. With a
    condition, of several writers at once one is served and the others get 412."""
    length = request.headers.get("content-length", "")
    match, absent = write_conditions(request)
    options = WriteOptions(
        mode=octal(mode),
        mtime_ns=None if mtime is None else nanoseconds(mtime),
        append=flag(append, False),
        length=int(length) if length.isascii() and length.isdigit() and len(length) < 18 else None,
        if_match=match,
        if_absent=absent,
    )
    try:
        result = await services.files.write(workspace, sandbox_id, path, upload(request), options, user)
    except ClientDisconnect:
        raise ClientGone from None
    return written(result)


def written(result: Any) -> Response:
    body = {"path": result.path, "bytes": result.bytes, "created": result.created}
    if result.tag is None:
        return json_response(body)
    return json_response(body | {"etag": etag(result.tag)}, headers={"ETag": etag(result.tag)})


async def upload(request: Request) -> AsyncIterator[bytes]:
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
        mode=octal(body.mode),
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
