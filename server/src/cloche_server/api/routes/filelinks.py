"""Where signed links to files lead. No token: the link itself is what is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Path, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cloche_server.api.conditions import read_wish, write_conditions
from cloche_server.api.context import ServicesDep
from cloche_server.api.docs import answers
from cloche_server.api.respond import ClientGone
from cloche_server.api.routes.files import READ_ANSWERS, no_such_part, send_file, upload, written
from cloche_server.api.wire import WriteAnswer
from cloche_server.app.files import WriteOptions
from cloche_server.core.errors import ClocheError
from cloche_server.core.filelinks import FileLink

public = APIRouter(tags=["files"])

_GUEST = (400, 402, 403, 404, 409, 500, 502, 503, 507)
#: Told, not checked by the framework: what is no token is refused as any token that is not good.
_FORM = {"pattern": r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+$"}
Token = Annotated[str, Path(alias="token", description="As it was made.", json_schema_extra=_FORM)]
_BINARY = {"schema": {"type": "string", "format": "binary"}}


def _link(request: Request) -> FileLink:
    """What the middleware has found the link to be good for."""
    found = request.scope["cloche.link"]
    assert isinstance(found, FileLink)
    return found


@public.get("/f/{token}", responses=READ_ANSWERS, response_class=Response, name="link_read", summary="Follow a link")
async def link_read(token: Token, request: Request, services: ServicesDep) -> Response:
    """The file, as a read gives it."""
    link = _link(request)
    try:
        found = await services.files.read(
            link.workspace, link.sandbox_id, link.path, link.user or None, read_wish(request)
        )
    except ClocheError as error:
        if error.code != "file.range_not_satisfiable":
            raise
        return no_such_part(request, error)
    name = quote(link.path.rsplit(b"/", 1)[-1], safe="")
    return await send_file(request, found, {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"})


@public.head(
    "/f/{token}", responses=answers(*_GUEST, 412), response_class=Response, name="link_head", summary="What is there"
)
async def link_head(token: Token, request: Request, services: ServicesDep) -> Response:
    return await link_read(token, request, services)


@public.put(
    "/f/{token}",
    response_model=WriteAnswer,
    responses=answers(*_GUEST, 412, 413),
    openapi_extra={"requestBody": {"required": False, "content": {"application/octet-stream": _BINARY}}},
    name="link_write",
    summary="Upload by a link",
)
async def link_write(token: Token, request: Request, services: ServicesDep) -> Response:
    """As a write does. More than the link allows is refused, and changes nothing."""
    link = _link(request)
    text = request.headers.get("content-length", "")
    length = int(text) if text.isascii() and text.isdigit() and len(text) < 18 else None
    if link.max_bytes and length is not None and length > link.max_bytes:
        raise _too_large(link.max_bytes)
    match, absent = write_conditions(request)
    options = WriteOptions(length=length, if_match=match, if_absent=absent)
    body = _bounded(upload(request), link.max_bytes)
    try:
        result = await services.files.write(
            link.workspace, link.sandbox_id, link.path, body, options, link.user or None
        )
    except ClientDisconnect:
        raise ClientGone from None
    return written(result)


async def _bounded(body: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in body:
        size += len(chunk)
        if limit and size > limit:
            raise _too_large(limit)
        yield chunk


def _too_large(limit: int) -> ClocheError:
    return ClocheError("request.too_large", f"the link allows {limit} bytes at most", details={"limit_bytes": limit})
