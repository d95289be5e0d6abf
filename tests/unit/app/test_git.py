"""Git: its arguments and its output, with the real git of this machine in place of the guest's."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloche_server.app.git import Git, Place
from cloche_server.core import git
from cloche_server.core.command import Command, CommandEnd, CommandResult
from cloche_server.core.errors import ClocheError
from cloche_server.core.network import SecretGrant

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on this machine")

HASH = "a" * 40


class LocalRuns:
    """Runs what the guest would run, and keeps how it was asked."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    async def run(self, _workspace: str, _sandbox_id: str, command: Command) -> CommandResult:
        self.commands.append(command)
        assert command.argv is not None
        env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **command.env}
        process = await asyncio.create_subprocess_exec(
            *command.argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=env, cwd=command.cwd,
        )  # fmt: skip
        out, err = await process.communicate(command.stdin or b"")
        end = CommandEnd(process.returncode or 0, "exited", 1.0)
        texts = (base64.b64encode(raw).decode() for raw in (out, err))
        return CommandResult(command.exec_id, end, *texts, "base64")


class NoGit:
    async def run(self, _workspace: str, _sandbox_id: str, command: Command) -> CommandResult:
        return CommandResult(command.exec_id, CommandEnd(127, "exited", 1.0, detail="not found"), "", "", "base64")


class OneSandbox:
    def __init__(self, *grants: SecretGrant) -> None:
        self.grants = grants

    async def find(self, _workspace: str, _sandbox_id: str) -> Any:
        return SimpleNamespace(record=SimpleNamespace(grants=self.grants))


@contextlib.contextmanager
def refused(code: str) -> Iterator[pytest.ExceptionInfo[ClocheError]]:
    with pytest.raises(ClocheError) as caught:
        yield caught
    assert caught.value.code == code, caught.value


AUTHOR = git.Author("Ann", "ann@example.com")


def made(runs: Any, *grants: SecretGrant) -> Git:
    return Git(OneSandbox(*grants), runs)  # type: ignore[arg-type]


async def test_from_an_empty_repository_to_a_push_and_back(tmp_path: Path) -> None:
    runs = LocalRuns()
    verbs = made(runs)
    for name in ("origin", "one"):
        bare = ["--bare"] if name == "origin" else []
        await verbs._run(Place("w", "s", "/"), ["init", "-q", "-b", "main", *bare, str(tmp_path / name)], inside=False)
    at = Place("w", "s", str(tmp_path / "one"))
    empty = await verbs.status(at)
    assert (empty.branch, empty.head, empty.files) == ("main", None, [])
    with refused("git.nothing_to_commit"):
        await verbs.commit(at, "none", files=[], everything=False, author=AUTHOR, empty=False)
    names = ["a b.txt", "new\nline", "é", "-rf", "old"]
    for name in names:
        (tmp_path / "one" / name).write_text("one\ntwo\n")
    Path(os.fsdecode(os.fsencode(tmp_path / "one") + b"/bad\xff")).write_text("x")
    found = await verbs.status(at)
    assert {one.path for one in found.files} == {*(name.encode() for name in names), b"bad\xff"}
    first = await verbs.commit(
        at, "first\n\nwith a body", files=["-rf", "old"], everything=False, author=AUTHOR, empty=False
    )
    assert (first.author, first.message, first.parents) == ("Ann", "first\n\nwith a body", [])
    second = await verbs.commit(at, "-second", files=[], everything=True, author=AUTHOR, empty=False)
    assert [one.hash for one in await verbs.log(at, ref=None, limit=9, skip=0, paths=[])] == [second.hash, first.hash]
    (tmp_path / "one/old").rename(tmp_path / "one/new")
    await verbs._run(at, ["add", "--all"])
    changed = await verbs.status(at)
    assert [(one.kind, one.path, one.old_path) for one in changed.files] == [("renamed", b"new", b"old")]
    diff = await verbs.diff(at, ref=None, staged=True, paths=[], context=0)
    assert "rename to new" in diff.text
    assert [(one.path, one.old_path) for one in diff.files] == [(b"new", b"old")]
    await verbs.commit(at, "third", files=[], everything=False, author=AUTHOR, empty=False)
    await verbs._run(at, ["remote", "add", "origin", str(tmp_path / "origin")])
    pushed = await verbs.push(at, remote="origin", branch="main", upstream=True, force=False, access=None)
    assert [one.status for one in pushed] == ["new"]
    two = Place("w", "s", str(tmp_path / "two"))
    cloned = await verbs.clone(two, str(tmp_path / "origin"), branch=None, depth=None, access=None)
    assert (cloned.branch, cloned.upstream, cloned.ahead) == ("main", "origin/main", 0)
    (tmp_path / "two/more").write_text("x")
    await verbs.commit(two, "fourth", files=["more"], everything=False, author=AUTHOR, empty=False)
    await verbs.push(two, remote="origin", branch=None, upstream=False, force=False, access=None)
    before, after = await verbs.pull(at, remote="origin", branch=None, mode="ff-only", access=None)
    assert before != after.head
    assert (tmp_path / "one/more").exists()


async def test_branches_conflicts_and_what_is_missing(tmp_path: Path) -> None:
    verbs = made(LocalRuns())
    at = Place("w", "s", str(tmp_path / "r"))
    await verbs._run(Place("w", "s", "/"), ["init", "-q", "-b", "main", at.path], inside=False)
    (tmp_path / "r/f").write_text("1")
    await verbs.commit(at, "1", files=[], everything=True, author=AUTHOR, empty=False)
    await verbs.make_branch(at, "side", None)
    assert (await verbs.checkout(at, "new/one", create=True, force=False)).branch == "new/one"
    assert [(one.name, one.current) for one in await verbs.branches(at)] == [
        ("main", False), ("new/one", True), ("side", False),
    ]  # fmt: skip
    (tmp_path / "r/f").write_text("2")
    await verbs.commit(at, "2", files=[], everything=True, author=AUTHOR, empty=False)
    (tmp_path / "r/f").write_text("3")
    with refused("git.conflict"):
        await verbs.checkout(at, "main", create=False, force=False)
    await verbs.checkout(at, "main", create=False, force=True)
    with refused("git.conflict"):
        await verbs.delete_branch(at, "new/one", force=False)
    await verbs.delete_branch(at, "new/one", force=True)
    with refused("git.exists"):
        await verbs.make_branch(at, "side", None)
    with refused("git.not_found"):
        await verbs.checkout(at, "nope", create=False, force=False)
    with refused("git.not_found"):
        await verbs.push(at, remote="origin", branch=None, upstream=False, force=False, access=None)
    with refused("git.not_a_repository"):
        await verbs.status(Place("w", "s", str(tmp_path)))
    with refused("git.exists"):
        await verbs.clone(at, str(tmp_path / "r"), branch=None, depth=None, access=None)
    with refused("git.missing"):
        await made(NoGit()).status(at)


async def test_nothing_becomes_an_option(tmp_path: Path) -> None:
    verbs = made(LocalRuns())
    at = Place("w", "s", str(tmp_path))
    calls = [
        lambda: verbs.checkout(at, "--orphan=x", create=False, force=False),
        lambda: verbs.checkout(at, "-f", create=True, force=False),
        lambda: verbs.make_branch(at, "-D", None),
        lambda: verbs.make_branch(at, "x", "--force"),
        lambda: verbs.log(at, ref="--output=/tmp/x", limit=1, skip=0, paths=[]),
        lambda: verbs.diff(at, ref="--no-index", staged=False, paths=[], context=3),
        lambda: verbs.push(at, remote="--receive-pack=x", branch=None, upstream=False, force=False, access=None),
        lambda: verbs.pull(at, remote="ext::sh", branch=None, mode="merge", access=None),
        lambda: verbs.clone(at, "--upload-pack=x", branch=None, depth=None, access=None),
        lambda: verbs.clone(at, "ext::sh -c x", branch=None, depth=None, access=None),
        lambda: verbs.clone(at, "https://u:p@example.com/x", branch=None, depth=None, access=None),
        lambda: verbs.clone(at, "https://example.com/x", branch="..", depth=None, access=None),
    ]
    for call in calls:
        with refused("request.invalid"):
            await call()


async def test_credentials_are_the_placeholder_and_only_for_the_granted_host(tmp_path: Path) -> None:
    grant = SecretGrant("GH", "cloche-secret-gh-0123456789", ("example.com",))
    runs = LocalRuns()
    verbs = made(runs, grant)
    at = Place("w", "s", str(tmp_path / "x"))
    access = git.Access("GH", "ann")
    for url in ("https://other.example/x", "http://example.com/x", "https://example.com:8443/x", "/local"):
        with refused("git.no_grant"):
            await verbs.clone(at, url, branch=None, depth=None, access=access)
    assert not runs.commands
    env = await verbs._credentials(at, "https://example.com/a/b.git", access)
    assert env["GIT_CONFIG_KEY_0"] == "http.https://example.com/.extraHeader"
    pair = base64.b64decode(env["GIT_CONFIG_VALUE_0"].removeprefix("Authorization: Basic "))
    assert pair == b"ann:cloche-secret-gh-0123456789"


@pytest.mark.parametrize(
    "raw",
    [b"", b"1 .M N...\0", b"2 R. x\0", b"# branch.oid zz\0# branch.head x\0", b"\xff\xff\0", b"# branch.ab +x -1\0"],
)
def test_output_of_another_form_is_refused(raw: bytes) -> None:
    with refused("guest.protocol"):
        git.parse_status(raw, cut=False)


def test_a_status_that_is_cut_says_so() -> None:
    raw = f"# branch.oid {HASH}\0# branch.head main\0? one\0? tw".encode()
    found = git.parse_status(raw, cut=True)
    assert (found.truncated, [one.path for one in found.files]) == (True, [b"one"])
