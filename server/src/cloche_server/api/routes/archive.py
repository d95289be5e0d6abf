"""Snapshots beyond their sandbox: promotion to a template, export and import."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche_server.api import present
from cloche_server.api.context import FlagQuery, ServicesDep, Workspace, flag
from cloche_server.api.docs import answers, header, json_body
from cloche_server.api.respond import ClientGone, json_response, read_model, wait_gone, while_connected
from cloche_server.api.routes.snapshots import SnapshotId, shown
from cloche_server.api.routes.templates import default_shape
from cloche_server.api.wire_archive import PromoteSnapshotBody
from cloche_server.api.wire_lineage import SnapshotAnswer
from cloche_server.api.wire_service import TemplateAnswer
from cloche_server.app.export import Export
from cloche_server.core.errors import ClocheError

router = APIRouter(tags=["snapshots"])

_BYTES = {"schema": {"type": "string", "format": "binary"}}
_ARCHIVE = {"content": {"application/zstd": _BYTES}}
#: Of what type it is said to be does not matter.
_UPLOAD = {"content": {"application/octet-stream": _BYTES, "application/zstd": _BYTES}}


class ArchiveResponse(Response):
    """Sends an archive as its reader takes it. A failure cuts the connection: no part is ever taken for the whole."""

    def __init__(self, request: Request, archive: Export) -> None:
        super().__init__(status_code=200)
        self._request = request
        self._archive = archive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disposition = f'attachment; filename="{self._archive.filename}"'
        headers = [(b"content-type", b"application/zstd"), (b"content-disposition", disposition.encode("ascii"))]
        gone = asyncio.ensure_future(wait_gone(self._request))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async with contextlib.aclosing(self._archive.chunks()) as chunks:
                async for chunk in chunks:
                    if gone.done():
                        return
                    if chunk:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClocheError as error:
            # The server cuts the connection of an answer that is not complete.
            scope["cloche.code"] = error.code
        finally:
            gone.cancel()
            await self._archive.aclose()


@router.post(
    "/snapshots/{snapshot_id}/promote",
    status_code=201,
    response_model=TemplateAnswer,
    responses=answers(400, 404, 409, 413, 500, 507),
    openapi_extra=json_body(PromoteSnapshotBody),
    name="promote_snapshot",
    summary="Make a template of a snapshot",
)
async def promote(snapshot_id: SnapshotId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Only this workspace sees and uses it: its memory is that of the snapshot. Once more under the same name makes its
    newest version. It has the shape of the snapshot and no other. May take seconds; a hang-up undoes it."""
    body = await read_model(request, PromoteSnapshotBody)
    work = services.promoter.promote(workspace, snapshot_id, body.name, body.aliases, body.description)
    await while_connected(request, work)
    return json_response(present.template(services.templates.get(workspace, body.name), default_shape(services)), 201)


@router.get(
    "/snapshots/{snapshot_id}/export",
    responses={
        200: {
            "description": "A tar file in zstd; one without `end.json` as its last member is not whole",
            "headers": {"Content-Disposition": header("A name for the file")},
            **_ARCHIVE,
        },
        **answers(400, 404, 500),
    },
    response_class=Response,
    name="export_snapshot",
    summary="Get a snapshot as one archive",
)
async def export(
    snapshot_id: SnapshotId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    template: Annotated[
        FlagQuery, Query(description="Default true: with the template below, so that another server can import it.")
    ] = None,
) -> Response:
    """It holds the memory of the sandbox, with every secret in it, and its environment. Removing the snapshot meanwhile
    does no harm."""
    work = services.exporter.export(workspace, snapshot_id, template=flag(template, True))
    return ArchiveResponse(request, await work)


@router.post(
    "/snapshots/import",
    status_code=201,
    response_model=SnapshotAnswer,
    responses=answers(400, 403, 409, 413, 500, 507),
    openapi_extra={"requestBody": {"required": True, **_UPLOAD}},
    name="import_snapshot",
    summary="Make a snapshot of an archive",
)
async def import_(
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    name: Annotated[str | None, Query(description="Default: as it was exported.", max_length=256)] = None,
) -> Response:
    """It has a new id, and whatever it stands on is its own, or was here byte for byte. 409 when another QEMU or CPU
    model has made it. Import only what you trust: its device state is loaded by QEMU. A body that breaks off leaves
    nothing."""
    length = request.headers.get("content-length", "")
    known = int(length) if length.isascii() and length.isdigit() and len(length) < 18 else None
    try:
        made = await services.importer.take_in(workspace, _body(request), name, known)
    except ClientDisconnect:
        raise ClientGone from None
    return json_response((await shown(services, [made]))[0], 201)


async def _body(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        if chunk:
            yield chunk
