"""What git tells of repositories in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GitHead:
    """Where a repository stands. `branch` None: detached; `head` None: nothing was committed yet."""

    branch: str | None
    head: str | None
    upstream: str | None
    ahead: int
    behind: int


@dataclass(frozen=True, slots=True)
class GitFile:
    """`kind`: changed, renamed, unmerged or untracked; `index`, `worktree`: one letter as in git-status(1)."""

    path: str
    kind: str
    index: str
    worktree: str
    old_path: str | None = None


@dataclass(frozen=True, slots=True)
class GitStatus:
    """`truncated`: there are more files."""

    head: GitHead
    files: Sequence[GitFile]
    clean: bool
    truncated: bool


@dataclass(frozen=True, slots=True)
class GitCommit:
    """Times are RFC 3339."""

    hash: str
    parents: Sequence[str]
    author: str
    author_email: str
    authored_at: str
    message: str


@dataclass(frozen=True, slots=True)
class GitDiff:
    """`text`: a unified diff. `files`: path, lines added and removed (None for a binary file)."""

    text: str
    truncated: bool
    files: Sequence[tuple[str, int | None, int | None]]


@dataclass(frozen=True, slots=True)
class GitBranch:
    """`remote`: it is what was last fetched of one."""

    name: str
    head: str
    upstream: str | None
    current: bool
    remote: bool
