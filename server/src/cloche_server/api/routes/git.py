"""Git repositories in a sandbox."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from cloche_server.api.context import SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers, json_body
from cloche_server.api.present import rfc3339, without_none
from cloche_server.api.respond import big_json_response, json_response, killed, read_model, while_connected
from cloche_server.api.routes.filetools import exact
from cloche_server.api.wire_git import (
    CheckoutBody,
    CloneBody,
    GitBody,
    GitBranchBody,
    GitBranches,
    GitCommit,
    GitCommitBody,
    GitDiff,
    GitDiffBody,
    GitHead,
    GitLog,
    GitPull,
    GitPush,
    GitStatus,
    LogBody,
    PullBody,
    PushBody,
    RemoteBody,
)
from cloche_server.app.git import Place
from cloche_server.core import git

router = APIRouter(tags=["git"])

_GIT = (400, 402, 403, 404, 409, 413, 500, 502, 503, 504, 507)
_PATH = "/sandboxes/{sandbox_id}/git"
_T = TypeVar("_T")


def _place(workspace: str, sandbox_id: str, body: GitBody) -> Place:
    return Place(workspace, sandbox_id, body.path, body.user, body.timeout_seconds)


def _access(body: RemoteBody) -> git.Access | None:
    return None if body.secret is None else git.Access(body.secret, body.username)


async def _run(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Git is killed when the client goes away."""
    return await while_connected(request, work, killed)


def _head(status: git.Status) -> dict[str, Any]:
    fields = {"branch": status.branch, "head": status.head, "upstream": status.upstream}
    return without_none(fields | {"ahead": status.ahead, "behind": status.behind})


def _file(one: git.ChangedFile) -> dict[str, Any]:
    shown = exact(one.path) | {"kind": one.kind, "index": one.index, "worktree": one.worktree}
    return shown if one.old_path is None else shown | exact(one.old_path, "old_path")


def _commit(one: git.Commit) -> dict[str, Any]:
    return {
        "hash": one.hash,
        "parents": list(one.parents),
        "author": {"name": one.author, "email": one.author_email, "at": _time(one.authored_at)},
        "committer": {"name": one.committer, "email": one.committer_email, "at": _time(one.committed_at)},
        "message": one.message,
    }


def _time(seconds: int) -> str:
    """What is beyond all calendars is shown as their end."""
    return rfc3339(min(seconds, 253402300799))


@router.post(
    f"{_PATH}/clone",
    status_code=201,
    response_model=GitHead,
    responses=answers(*_GIT),
    openapi_extra=json_body(CloneBody),
    summary="Clone a repository",
)
async def clone(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """With `secret`, its value is the password, put in on the host: git in the sandbox sends a placeholder."""
    body = await read_model(request, CloneBody)
    work = services.git.clone(
        _place(workspace, sandbox_id, body), body.url, branch=body.branch, depth=body.depth, access=_access(body)
    )
    return json_response(_head(await _run(request, work)), 201)


@router.post(
    f"{_PATH}/status",
    response_model=GitStatus,
    responses=answers(*_GIT),
    openapi_extra=json_body(GitBody),
    summary="What has changed",
)
async def status(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, GitBody)
    found = await _run(request, services.git.status(_place(workspace, sandbox_id, body)))
    clean = not found.files and not found.truncated
    files = [_file(one) for one in found.files]
    return json_response(_head(found) | {"files": files, "clean": clean, "truncated": found.truncated})


@router.post(
    f"{_PATH}/diff",
    response_model=GitDiff,
    responses=answers(*_GIT),
    openapi_extra=json_body(GitDiffBody),
    summary="How it has changed",
)
async def diff(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, GitDiffBody)
    work = services.git.diff(
        _place(workspace, sandbox_id, body),
        ref=body.ref,
        staged=body.staged,
        paths=body.paths,
        context=body.context_lines,
    )
    found = await _run(request, work)
    files = []
    for one in found.files:
        shown = exact(one.path) | without_none({"added": one.added, "removed": one.removed})
        files.append(shown if one.old_path is None else shown | exact(one.old_path, "old_path"))
    return await big_json_response({"diff": found.text, "truncated": found.truncated, "files": files})


@router.post(
    f"{_PATH}/commit",
    status_code=201,
    response_model=GitCommit,
    responses=answers(*_GIT),
    openapi_extra=json_body(GitCommitBody),
    summary="Commit",
)
async def commit(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, GitCommitBody)
    author = None if body.author is None else git.Author(body.author.name, body.author.email)
    work = services.git.commit(
        _place(workspace, sandbox_id, body),
        body.message,
        files=body.files,
        everything=body.all,
        author=author,
        empty=body.allow_empty,
    )
    return json_response(_commit(await _run(request, work)), 201)


@router.post(
    f"{_PATH}/log",
    response_model=GitLog,
    responses=answers(*_GIT),
    openapi_extra=json_body(LogBody),
    summary="What was committed",
)
async def log(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, LogBody)
    place = _place(workspace, sandbox_id, body)
    work = services.git.log(place, ref=body.ref, limit=body.limit, skip=body.skip, paths=body.paths)
    return json_response({"commits": [_commit(one) for one in await _run(request, work)]})


async def _all_branches(request: Request, services: ServicesDep, place: Place) -> Response:
    found = await _run(request, services.git.branches(place))
    return json_response(
        {
            "branches": [
                without_none(
                    {
                        "name": one.name,
                        "head": one.head,
                        "upstream": one.upstream,
                        "current": one.current,
                        "remote": one.remote,
                    }
                )
                for one in found
            ]
        }
    )


@router.post(
    f"{_PATH}/branches",
    response_model=GitBranches,
    responses=answers(*_GIT),
    openapi_extra=json_body(GitBody),
    summary="All branches",
)
async def branches(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, GitBody)
    return await _all_branches(request, services, _place(workspace, sandbox_id, body))


@router.post(
    f"{_PATH}/branch",
    response_model=GitBranches,
    responses=answers(*_GIT),
    openapi_extra=json_body(GitBranchBody),
    summary="Make or delete a branch",
)
async def branch(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Answers with all branches as they are then."""
    body = await read_model(request, GitBranchBody)
    place = _place(workspace, sandbox_id, body)
    if body.delete:
        await _run(request, services.git.delete_branch(place, body.name, force=body.force))
    else:
        await _run(request, services.git.make_branch(place, body.name, body.start))
    return await _all_branches(request, services, place)


@router.post(
    f"{_PATH}/checkout",
    response_model=GitHead,
    responses=answers(*_GIT),
    openapi_extra=json_body(CheckoutBody),
    summary="Go to a branch or commit",
)
async def checkout(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    body = await read_model(request, CheckoutBody)
    place = _place(workspace, sandbox_id, body)
    found = await _run(request, services.git.checkout(place, body.ref, create=body.create, force=body.force))
    return json_response(_head(found))


@router.post(
    f"{_PATH}/push",
    response_model=GitPush,
    responses=answers(*_GIT),
    openapi_extra=json_body(PushBody),
    summary="Push",
)
async def push(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """`secret` as with a clone."""
    body = await read_model(request, PushBody)
    work = services.git.push(
        _place(workspace, sandbox_id, body),
        remote=body.remote,
        branch=body.branch,
        upstream=body.set_upstream,
        force=body.force,
        access=_access(body),
    )
    refs = [{"source": one.source, "target": one.target, "status": one.status} for one in await _run(request, work)]
    return json_response({"refs": refs})


@router.post(
    f"{_PATH}/pull",
    response_model=GitPull,
    responses=answers(*_GIT),
    openapi_extra=json_body(PullBody),
    summary="Pull",
)
async def pull(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """`secret` as with a clone. A conflict is left in the work tree, to be resolved there."""
    body = await read_model(request, PullBody)
    work = services.git.pull(
        _place(workspace, sandbox_id, body),
        remote=body.remote,
        branch=body.branch,
        mode=body.mode,
        access=_access(body),
    )
    before, found = await _run(request, work)
    return json_response(_head(found) | without_none({"updated": before != found.head, "before": before}))
