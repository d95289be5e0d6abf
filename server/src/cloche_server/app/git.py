"""Git in sandboxes: run by its arguments, never by a shell, and read by the forms it has for programs. Credentials stay
on the host: what git in the guest sends is the placeholder of a secret that the sandbox was granted."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cloche_server.app.access import Access as Sandboxes
from cloche_server.app.exec import Execs
from cloche_server.core import git
from cloche_server.core.command import Command
from cloche_server.core.errors import ClocheError
from cloche_server.core.names import matches
from cloche_server.core.network import SecretPlace
from cloche_server.host.clock import random_bytes

OUTPUT_MAX: Final = 4 * 1024 * 1024
LOCAL_SECONDS: Final = 120.0
REMOTE_SECONDS: Final = 600.0
_ENV: Final[Mapping[str, str]] = {
    "LC_ALL": "C",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "GIT_EDITOR": "true",
    "GIT_ASKPASS": "true",
    "SSH_ASKPASS": "true",
    "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A repository, and who works in it. `timeout` in seconds, None: as usual for the call."""

    workspace: str
    sandbox_id: str
    path: str
    user: str | None = None
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class _Said:
    out: bytes
    err: bytes
    cut: bool


@dataclass(frozen=True, slots=True)
class Diff:
    """`text`: a unified diff, `truncated` when it is longer than can be told."""

    text: str
    truncated: bool
    files: Sequence[git.DiffFile] = field(default_factory=tuple)


class Git:
    """Errors: `git.*`, `exec.timeout`, and those of `Execs.run`."""

    def __init__(self, access: Sandboxes, execs: Execs) -> None:
        self._access = access
        self._execs = execs

    async def clone(
        self, at: Place, url: str, *, branch: str | None, depth: int | None, access: git.Access | None
    ) -> git.Status:
        git.check_url(url)
        argv = ["clone", "--no-progress", "--quiet"]
        argv += [f"--branch={git.check_branch(branch)}"] if branch is not None else []
        argv += [f"--depth={depth}"] if depth is not None else []
        env = await self._credentials(at, url, access)
        await self._run(at, [*argv, "--", url, at.path], env=env, seconds=REMOTE_SECONDS, inside=False)
        return await self.status(at, files=False)

    async def status(self, at: Place, *, files: bool = True) -> git.Status:
        argv = ["status", "--porcelain=v2", "--branch", "-z", "--untracked-files=" + ("all" if files else "no")]
        said = await self._run(at, argv, env={"GIT_OPTIONAL_LOCKS": "0"})
        return git.parse_status(said.out, cut=said.cut)

    async def diff(self, at: Place, *, ref: str | None, staged: bool, paths: Sequence[str], context: int) -> Diff:
        what = ["--cached"] if staged else []
        what += [git.check_revision(ref)] if ref is not None else []
        where = ["--", *paths]
        base = ["diff", "--no-color", "--no-ext-diff", "--no-textconv"]
        said = await self._run(at, [*base, f"--unified={context}", *what, *where])
        stat = await self._run(at, [*base, "--numstat", "-z", *what, *where])
        found = [] if stat.cut else git.parse_numstat(stat.out)
        return Diff(said.out.decode("utf-8", "replace"), said.cut or stat.cut, found)

    async def commit(
        self, at: Place, message: str, *, files: Sequence[str], everything: bool, author: git.Author | None, empty: bool
    ) -> git.Commit:
        if everything:
            await self._run(at, ["add", "--all"])
        elif files:
            await self._run(at, ["add", "--all", "--", *files])
        env: dict[str, str] = {}
        if author is not None:
            for who in ("AUTHOR", "COMMITTER"):
                env |= {f"GIT_{who}_NAME": author.name, f"GIT_{who}_EMAIL": author.email}
        argv = ["commit", "--quiet", "--file=-", *(["--allow-empty"] if empty else [])]
        await self._run(at, argv, env=env, stdin=message.encode("utf-8"))
        return (await self.log(at, ref=None, limit=1, skip=0, paths=()))[0]

    async def log(self, at: Place, *, ref: str | None, limit: int, skip: int, paths: Sequence[str]) -> list[git.Commit]:
        argv = ["log", "-z", "--no-color", git.LOG_FORMAT, f"--max-count={limit}", f"--skip={skip}"]
        argv += [git.check_revision(ref)] if ref is not None else []
        said = await self._run(at, [*argv, "--", *paths])
        return git.parse_log(said.out, cut=said.cut)

    async def branches(self, at: Place) -> list[git.Branch]:
        said = await self._run(at, ["for-each-ref", git.BRANCH_FORMAT, "refs/heads", "refs/remotes"])
        if said.cut:
            raise ClocheError("git.failed", "the repository has more branches than can be told")
        return git.parse_branches(said.out)

    async def make_branch(self, at: Place, name: str, start: str | None) -> None:
        more = [git.check_revision(start, "start")] if start is not None else []
        await self._run(at, ["branch", "--no-track", "--", git.check_branch(name, "name"), *more])

    async def delete_branch(self, at: Place, name: str, *, force: bool) -> None:
        await self._run(at, ["branch", "-D" if force else "-d", "--", git.check_branch(name, "name")])

    async def checkout(self, at: Place, ref: str, *, create: bool, force: bool) -> git.Status:
        argv = ["checkout", "--quiet", *(["--force"] if force else [])]
        if create:
            argv += ["-b", git.check_branch(ref, "ref")]
        else:
            argv += [git.check_revision(ref), "--"]
        await self._run(at, argv)
        return await self.status(at, files=False)

    async def push(
        self, at: Place, *, remote: str, branch: str | None, upstream: bool, force: bool, access: git.Access | None
    ) -> list[git.PushedRef]:
        """`force` replaces what the remote has only as long as that is what was last fetched."""
        env = await self._credentials(at, await self._url_of(at, remote, push=True), access)
        argv = ["push", "--porcelain", "--no-progress"]
        argv += (["--set-upstream"] if upstream else []) + (["--force-with-lease"] if force else [])
        what = git.check_branch(branch) if branch is not None else "HEAD"
        said = await self._run(at, [*argv, "--", remote, what], env=env, seconds=REMOTE_SECONDS)
        return git.parse_push(said.out)

    async def pull(
        self, at: Place, *, remote: str, branch: str | None, mode: str, access: git.Access | None
    ) -> tuple[str | None, git.Status]:
        """The head before, and how it is now."""
        env = await self._credentials(at, await self._url_of(at, remote, push=False), access)
        before = (await self.status(at, files=False)).head
        how = {"ff-only": ["--ff-only"], "merge": ["--no-rebase", "--no-edit"], "rebase": ["--rebase"]}[mode]
        argv = ["pull", "--quiet", "--no-progress", *how, "--", remote]
        argv += [git.check_branch(branch)] if branch is not None else []
        await self._run(at, argv, env=env, seconds=REMOTE_SECONDS)
        return before, await self.status(at, files=False)

    # ---------------------------------------------------------------- inside

    async def _url_of(self, at: Place, remote: str, *, push: bool) -> str:
        """As the guest has it: it decides nothing but which grant is looked for."""
        argv = ["remote", "get-url", *(["--push"] if push else []), git.check_remote(remote)]
        said = await self._run(at, argv)
        return said.out.split(b"\n", 1)[0].decode("utf-8", "replace")

    async def _credentials(self, at: Place, url: str, access: git.Access | None) -> dict[str, str]:
        """The environment with the placeholder of a granted secret. Raises `git.no_grant`."""
        if access is None:
            return {}
        host = git.host_of(url)
        if host is None:
            raise ClocheError(
                "git.no_grant", "a secret is sent by https on port 443 only, and the remote has another address"
            )
        entry = await self._access.find(at.workspace, at.sandbox_id)
        for grant in entry.record.grants:
            fits = SecretPlace.HEADER in grant.places and (not grant.headers or "authorization" in grant.headers)
            if grant.secret == access.secret and fits and any(matches(pattern, host) for pattern in grant.hosts):
                return git.auth_env(host, access.username, grant.placeholder)
        raise ClocheError(
            "git.no_grant",
            f"the sandbox has no grant of the secret {access.secret} for the header Authorization of this host",
            details={"secret": access.secret, "host": host[:253]},
        )

    async def _run(
        self,
        at: Place,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        seconds: float = LOCAL_SECONDS,
        inside: bool = True,
    ) -> _Said:
        where = ["-C", at.path] if inside else []
        command = Command(
            exec_id="git-" + random_bytes(10).hex(),
            argv=["git", "-c", "core.quotePath=false", "-c", "color.ui=never", *where, *argv],
            env={**_ENV, **(env or {})},
            cwd="/",
            user=at.user,
            stdin=stdin,
            timeout=at.timeout or seconds,
            encoding="base64",
            max_output=OUTPUT_MAX,
        )
        result = await self._execs.run(at.workspace, at.sandbox_id, command)
        out = base64.b64decode(result.stdout)
        cut = bool(result.stdout_dropped)
        if cut and result.stdout_head_bytes is not None:
            out = out[: result.stdout_head_bytes]
        err = base64.b64decode(result.stderr)
        if result.end.exit_code in {126, 127} and result.end.detail is not None:
            raise ClocheError(
                "git.missing",
                "there is no git in the sandbox: use a template that has it, as `base` does, or install it there",
            )
        if result.end.exit_code != 0:
            raise git.failure(argv[0], result.end.exit_code, out, err)
        return _Said(out, err, cut)
