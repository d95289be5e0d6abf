"""Git repositories in the sandbox. Credentials never enter it: name a `secret` that it was granted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from .. import _call, _paths, _wire, _wire_trees
from .._call import SLOW, Call
from .._paths import RemotePath
from ..git import GitBranch, GitCommit, GitDiff, GitHead, GitStatus
from .transport import AsyncTransport


class AsyncGit:
    """Git in one sandbox; a sandbox has it as `sandbox.git`. Failures are `GitError`."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = _call.path("sandboxes", sandbox_id, "git")

    async def _post(self, verb: str, path: RemotePath, **fields: Any) -> Any:
        body = {**_paths.text_field(path, "path"), **_wire.given(**fields)}
        # The server is silent until git is done, for as long as it was given.
        silence = max(SLOW, float(fields.get("timeout_seconds") or 600) + 30)
        return _wire.record(
            await self._transport.json(Call("POST", f"{self._path}/{verb}", json=body, silence=silence))
        )

    async def clone(
        self,
        url: str,
        path: RemotePath,
        *,
        branch: str | None = None,
        depth: int | None = None,
        secret: str | None = None,
        username: str | None = None,
        user: str | None = None,
        timeout_seconds: float | None = None,
    ) -> GitHead:
        """Clone a repository into `path`. `secret`: its value is the password, put in outside of the sandbox."""
        fields = {"branch": branch, "depth": depth, "secret": secret, "username": username}
        answer = await self._post("clone", path, url=url, **fields, user=user, timeout_seconds=timeout_seconds)
        return _wire_trees.git_head(answer)

    async def status(self, path: RemotePath, *, user: str | None = None) -> GitStatus:
        """What has changed."""
        return _wire_trees.git_status(await self._post("status", path, user=user))

    async def diff(
        self,
        path: RemotePath,
        *,
        ref: str | None = None,
        staged: bool = False,
        paths: Sequence[str] = (),
        user: str | None = None,
    ) -> GitDiff:
        """How the work tree differs from the index, or with `ref` from a commit; `staged`: what would be committed."""
        answer = await self._post("diff", path, ref=ref, staged=staged, paths=list(paths) or None, user=user)
        return _wire_trees.git_diff(answer)

    async def commit(
        self,
        path: RemotePath,
        message: str,
        *,
        files: Sequence[str] = (),
        all: bool = False,
        author: tuple[str, str] | None = None,
        allow_empty: bool = False,
        user: str | None = None,
    ) -> GitCommit:
        """Commit what was added; `files` are added first, with `all` everything. `author`: name and address."""
        who = None if author is None else {"name": author[0], "email": author[1]}
        fields = {"files": list(files) or None, "all": all, "author": who, "allow_empty": allow_empty, "user": user}
        return _wire_trees.git_commit(await self._post("commit", path, message=message, **fields))

    async def log(
        self,
        path: RemotePath,
        *,
        ref: str | None = None,
        limit: int | None = None,
        skip: int | None = None,
        paths: Sequence[str] = (),
        user: str | None = None,
    ) -> Sequence[GitCommit]:
        """What was committed, the newest first."""
        answer = await self._post("log", path, ref=ref, limit=limit, skip=skip, paths=list(paths) or None, user=user)
        return [_wire_trees.git_commit(one) for one in _wire.records(_wire.required(answer, "commits"))]

    async def branches(self, path: RemotePath, *, user: str | None = None) -> Sequence[GitBranch]:
        """All branches, and what was fetched of remotes."""
        return _wire_trees.git_branches(await self._post("branches", path, user=user))

    async def create_branch(
        self, path: RemotePath, name: str, *, start: str | None = None, user: str | None = None
    ) -> Sequence[GitBranch]:
        """Make a branch and return all of them; the work tree stays where it is."""
        return _wire_trees.git_branches(await self._post("branch", path, name=name, start=start, user=user))

    async def delete_branch(
        self, path: RemotePath, name: str, *, force: bool = False, user: str | None = None
    ) -> Sequence[GitBranch]:
        """Delete a branch; with `force` also one that is not merged."""
        return _wire_trees.git_branches(
            await self._post("branch", path, name=name, delete=True, force=force, user=user)
        )

    async def checkout(
        self, path: RemotePath, ref: str, *, create: bool = False, force: bool = False, user: str | None = None
    ) -> GitHead:
        """Go to a branch, tag or commit; with `create` to a new branch of that name."""
        return _wire_trees.git_head(await self._post("checkout", path, ref=ref, create=create, force=force, user=user))

    async def push(
        self,
        path: RemotePath,
        *,
        remote: str | None = None,
        branch: str | None = None,
        set_upstream: bool = False,
        force: bool = False,
        secret: str | None = None,
        username: str | None = None,
        user: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Sequence[tuple[str, str]]:
        """Push a branch, the present one unless named. Name on the remote and what became of it."""
        fields = {"remote": remote, "branch": branch, "set_upstream": set_upstream, "force": force, "secret": secret}
        answer = await self._post("push", path, **fields, username=username, user=user, timeout_seconds=timeout_seconds)
        return [(str(one.get("target")), str(one.get("status"))) for one in _wire.records(answer.get("refs") or [])]

    async def pull(
        self,
        path: RemotePath,
        *,
        remote: str | None = None,
        branch: str | None = None,
        mode: Literal["ff-only", "merge", "rebase"] | None = None,
        secret: str | None = None,
        username: str | None = None,
        user: str | None = None,
        timeout_seconds: float | None = None,
    ) -> GitHead:
        """Fetch and join. A conflict is a `GitError` with the code `git.conflict`, left in the work tree."""
        fields = {"remote": remote, "branch": branch, "mode": mode, "secret": secret, "username": username}
        answer = await self._post("pull", path, **fields, user=user, timeout_seconds=timeout_seconds)
        return _wire_trees.git_head(answer)
