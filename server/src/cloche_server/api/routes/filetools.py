"""Trees of files: copies, attributes, links, searches and what they take up."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cloche_server.api import present
from cloche_server.api.context import GuestDir, GuestPath, SandboxId, ServicesDep, UserQuery, Workspace, guest_path
from cloche_server.api.docs import answers, json_body
from cloche_server.api.respond import dump, json_response, read_model, while_connected
from cloche_server.api.routes.files import nanoseconds, octal
from cloche_server.api.wire import FileEntry
from cloche_server.api.wire_files import (
    AttributesAnswer,
    AttributesBody,
    CopyBody,
    DiskUseAnswer,
    FileUrlAnswer,
    FileUrlBody,
    GlobAnswer,
    GlobBody,
    GrepAnswer,
    GrepBody,
    LinkBody,
    OnePath,
    ReadlinkAnswer,
    ReplaceAnswer,
    ReplaceBody,
    TouchBody,
    TreeUseAnswer,
)
from cloche_server.core.errors import ClocheError
from cloche_server.core.filelinks import PREFIX
from cloche_server.core.trees import Found, Match, Use

router = APIRouter(tags=["files"])

_GUEST = (400, 402, 403, 404, 409, 413, 500, 501, 502, 503, 507)
#: What one failed file of a replacement is called in the answer.
_REPLACE_ERRORS = {
    "not_found": "file.not_found",
    "permission_denied": "file.permission_denied",
    "is_directory": "file.is_directory",
    "not_a_directory": "file.not_a_directory",
    "not_a_regular_file": "file.not_a_regular_file",
    "changed": "file.changed",
    "too_large": "request.too_large",
    "no_space": "file.no_space",
}


def path_of(body: OnePath, default: str | None = None) -> str | bytes:
    return guest_path(body.path, body.path_b64, default)


def exact(raw: bytes, name: str = "path") -> dict[str, str]:
    """A path as text, and as base64url where that is not exact."""
    text = raw.decode("utf-8", "replace")
    return {name: text} if text.encode() == raw else {name: text, f"{name}_b64": present.b64url(raw)}


@router.post(
    "/sandboxes/{sandbox_id}/fs/copy",
    response_model=FileEntry,
    responses=answers(*_GUEST),
    openapi_extra=json_body(CopyBody),
    summary="Copy a file or a tree",
)
async def copy(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """The copy is there as a whole or not at all. Links stay links, holes stay holes; modes, times and, where the user
    may, owners are kept. Ends when the client goes away."""
    body = await read_model(request, CopyBody)
    source, to = guest_path(body.source, body.from_b64), guest_path(body.to, body.to_b64)
    work = services.file_tools.do(
        workspace,
        sandbox_id,
        body.user,
        lambda guest, who: guest.copy(source, to, overwrite=body.overwrite, recursive=body.recursive, user=who),
    )
    return json_response(present.file_entry(await while_connected(request, work)))


@router.post(
    "/sandboxes/{sandbox_id}/fs/attributes",
    response_model=AttributesAnswer,
    responses=answers(*_GUEST),
    openapi_extra=json_body(AttributesBody),
    summary="Change mode, owner, group or time",
)
async def attributes(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """A failure in a tree leaves what was changed before it."""
    body = await read_model(request, AttributesBody)
    path = path_of(body)
    if body.mode is None and body.owner is None and body.group is None and body.mtime is None:
        raise ClocheError("request.invalid", "name one of mode, owner, group and mtime", details={"field": "mode"})
    work = services.file_tools.do(
        workspace,
        sandbox_id,
        body.user,
        lambda guest, who: guest.set_attributes(
            path,
            mode=octal(body.mode),
            owner=body.owner,
            group=body.group,
            mtime_ns=None if body.mtime is None else nanoseconds(body.mtime),
            recursive=body.recursive,
            user=who,
        ),
    )
    changed, entry = await while_connected(request, work)
    return json_response({"changed": changed, "entry": present.file_entry(entry)})


@router.post(
    "/sandboxes/{sandbox_id}/fs/touch",
    response_model=FileEntry,
    responses=answers(*_GUEST),
    openapi_extra=json_body(TouchBody),
    summary="Make an empty file, or set its time",
)
async def touch(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, TouchBody)
    path, at = path_of(body), None if body.mtime is None else nanoseconds(body.mtime)
    entry = await services.file_tools.do(
        workspace, sandbox_id, body.user, lambda guest, who: guest.touch(path, mtime_ns=at, user=who)
    )
    return json_response(present.file_entry(entry))


@router.post(
    "/sandboxes/{sandbox_id}/fs/link",
    status_code=201,
    response_model=FileEntry,
    responses=answers(*_GUEST),
    openapi_extra=json_body(LinkBody),
    summary="Make a symbolic or a hard link",
)
async def link(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, LinkBody)
    path = path_of(body)
    target = guest_path(body.target, None) if body.hard else body.target
    entry = await services.file_tools.do(
        workspace,
        sandbox_id,
        body.user,
        lambda guest, who: guest.link(path, target, hard=body.hard, overwrite=body.overwrite, user=who),
    )
    return json_response(present.file_entry(entry), 201)


@router.get(
    "/sandboxes/{sandbox_id}/fs/readlink",
    response_model=ReadlinkAnswer,
    responses=answers(*_GUEST),
    summary="Where a link leads",
)
async def readlink(
    sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace, path: GuestPath, user: UserQuery = None
) -> Response:
    raw = await services.file_tools.do(workspace, sandbox_id, user, lambda guest, who: guest.readlink(path, user=who))
    return json_response(exact(raw, "target"))


@router.post(
    "/sandboxes/{sandbox_id}/fs/glob",
    response_model=GlobAnswer,
    responses=answers(*_GUEST),
    openapi_extra=json_body(GlobBody),
    summary="Find files by their names",
)
async def glob(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Links are told and not followed. Ends when the client goes away."""
    body = await read_model(request, GlobBody)
    asked = {"pattern": body.pattern, "exclude": body.exclude, "limit": body.max_results, "type": body.type or ""}
    work = services.file_tools.search(workspace, sandbox_id, "glob", path_of(body, "/"), asked, body.user)
    found = await while_connected(request, work)
    entries = [present.file_entry(one.entry) | exact(one.raw_path) for one in found.found if isinstance(one, Found)]
    return await _large({"entries": entries, "truncated": found.truncated, "unreadable": found.end.unreadable})


@router.post(
    "/sandboxes/{sandbox_id}/fs/grep",
    response_model=GrepAnswer,
    responses=answers(*_GUEST),
    openapi_extra=json_body(GrepBody),
    summary="Find lines in files",
)
async def grep(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """In one file, or in all below a directory. Ends when the client goes away."""
    body = await read_model(request, GrepBody)
    asked = {
        "pattern": body.pattern,
        "literal": body.literal,
        "ignore_case": body.ignore_case,
        "include": body.include,
        "exclude": body.exclude,
        "context": body.context_lines,
        "limit": body.max_results,
        "per_file": body.max_per_file,
    }
    work = services.file_tools.search(workspace, sandbox_id, "grep", path_of(body, "/"), asked, body.user)
    found = await while_connected(request, work)
    return await _large(
        {
            "matches": [_match(one) for one in found.found if isinstance(one, Match)],
            "truncated": found.truncated,
            "files": found.end.files,
            "skipped_binary": found.end.skipped_binary,
            "unreadable": found.end.unreadable,
        }
    )


def _match(one: Match) -> dict[str, Any]:
    shown = exact(one.raw_path) | {"line": one.line, "column": one.column, "text": one.text}
    return shown | ({"cut": True} if one.cut else {}) | {"before": list(one.before), "after": list(one.after)}


async def _large(body: dict[str, Any]) -> Response:
    """Made on a thread, so that other requests go on meanwhile."""
    return Response(await asyncio.to_thread(dump, body), media_type="application/json")


@router.post(
    "/sandboxes/{sandbox_id}/fs/replace",
    response_model=ReplaceAnswer,
    responses=answers(*_GUEST),
    openapi_extra=json_body(ReplaceBody),
    summary="Replace text in files",
)
async def replace(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Each file is changed in one step or left as it is; the answer says which. One that somebody else has changed
    meanwhile is left. At most 16 MiB each."""
    body = await read_model(request, ReplaceBody)
    asked = body.model_dump(exclude={"user"})
    work = services.file_tools.do(workspace, sandbox_id, body.user, lambda guest, who: guest.replace(asked, user=who))
    done = await while_connected(request, work)
    files = []
    for one in done:
        problem = {} if one.error is None else {"error": _REPLACE_ERRORS.get(one.error, "guest.error")}
        files.append({"path": one.path, "count": one.count} | problem)
    return json_response({"files": files, "count": sum(one.count for one in done)})


@router.get(
    "/sandboxes/{sandbox_id}/fs/du",
    response_model=TreeUseAnswer,
    responses=answers(*_GUEST),
    summary="What a tree takes up",
)
async def tree_use(
    sandbox_id: SandboxId,
    request: Request,
    services: ServicesDep,
    workspace: Workspace,
    path: GuestDir,
    user: UserQuery = None,
    depth: Annotated[int, Query(ge=0, le=64, description="Directories so deep are listed by themselves.")] = 1,
) -> Response:
    """A file with several names counts once. `/proc` and the like do not count."""
    work = services.file_tools.do(
        workspace, sandbox_id, user, lambda guest, who: guest.tree_use(path, depth=depth, user=who)
    )
    found = await while_connected(request, work)
    more = {"truncated": found.truncated, "unreadable": found.unreadable}
    return await _large({**_use(found.whole), "parts": [_use(part) for part in found.parts], **more})


def _use(one: Use) -> dict[str, Any]:
    return exact(one.raw_path) | {"bytes": one.bytes, "disk_bytes": one.disk_bytes, "entries": one.entries}


@router.get(
    "/sandboxes/{sandbox_id}/fs/df",
    response_model=DiskUseAnswer,
    responses=answers(*_GUEST),
    summary="What a file system holds",
)
async def disk_use(
    sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace, path: GuestDir, user: UserQuery = None
) -> Response:
    found = await services.file_tools.do(workspace, sandbox_id, user, lambda guest, who: guest.disk_use(path, user=who))
    return json_response(
        {
            "bytes": found.bytes,
            "used_bytes": found.used_bytes,
            "available_bytes": found.available_bytes,
            "files": found.files,
            "files_free": found.files_free,
            "read_only": found.read_only,
        }
    )


@router.post(
    "/sandboxes/{sandbox_id}/fs/url",
    response_model=FileUrlAnswer,
    responses=answers(400, 404, 413),
    openapi_extra=json_body(FileUrlBody),
    summary="A link to a file that needs no token",
)
async def url(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Good for this file, this method and this time only, for whoever has it; it ends with the sandbox, and cannot be
    taken back before. Wakes nothing."""
    body = await read_model(request, FileUrlBody)
    token, made = await services.file_links.make(
        workspace,
        sandbox_id,
        path_of(body),
        body.method,
        seconds=body.expires_seconds,
        max_bytes=body.max_bytes,
        user=body.user,
    )
    base = str(request.base_url).rstrip("/")
    answer = {"url": f"{base}{PREFIX}{token}", "method": made.method, "expires_at": present.rfc3339(made.expires_at)}
    return json_response(answer)
