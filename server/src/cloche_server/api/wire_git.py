"""Request and answer types of git."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt, StringConstraints

from cloche_server.api.wire_base import Wire
from cloche_server.core.git import MAX_LOG

PathText = Annotated[str, StringConstraints(min_length=1, max_length=4095, pattern=r"^/[^\x00]*$")]
Ref = Annotated[str, StringConstraints(min_length=1, max_length=244, pattern=r"^[^\x00-\x20-][^\x00-\x1f]*$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f<>]+$")]
Paths = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=4095, pattern=r"^[^\x00]+$")]],
    Field(max_length=1000),
]
Timeout = Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False, strict=True)]
User = Annotated[str, StringConstraints(max_length=256)]


class GitBody(Wire):
    path: PathText = Field(description="Absolute path of the repository, or of a directory in it.")
    user: User | None = Field(None, description="Who runs git; default: the sandbox's user.")
    timeout_seconds: Timeout | None = Field(None, description="Default: 120, or 600 with a remote.")


class RemoteBody(GitBody):
    secret: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = Field(
        None,
        description="Name of a secret that the sandbox was granted for the host of the remote: it is the password, and "
        "never enters the sandbox.",
    )
    username: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^:\x00-\x1f\x7f]+$")] = Field(
        "x-access-token", description="What the remote wants beside it."
    )


class CloneBody(RemoteBody):
    url: Annotated[str, StringConstraints(min_length=1, max_length=2048)] = Field(
        description="Where from: `https://…` for a `secret`. Without credentials."
    )
    branch: Ref | None = Field(None, description="Default: that of the remote.")
    depth: Annotated[StrictInt, Field(ge=1, le=10**6)] | None = Field(None, description="So many commits only.")


class GitDiffBody(GitBody):
    ref: Ref | None = Field(None, description="Against this commit, or between two: `a..b`. Default: the index.")
    staged: StrictBool = Field(False, description="What would be committed.")
    paths: Paths = Field(default_factory=list, description="Only these.")
    context_lines: Annotated[StrictInt, Field(ge=0, le=1000)] = Field(3, description="So many around each change.")


class GitAuthor(Wire):
    name: Text
    email: Text


class GitCommitBody(GitBody):
    message: Annotated[str, StringConstraints(min_length=1, max_length=65536, pattern=r"^[^\x00]+$")] = Field(
        description="Its first line is the title."
    )
    files: Paths = Field(default_factory=list, description="Add these first.")
    all: StrictBool = Field(False, description="Add everything first, new files too.")
    author: GitAuthor | None = Field(None, description="Default: as git is configured in the sandbox.")
    allow_empty: StrictBool = Field(False, description="Commit also when nothing has changed.")


class GitBranchBody(GitBody):
    name: Ref = Field(description="Of the branch.")
    start: Ref | None = Field(None, description="Where it begins; default: the present commit.")
    delete: StrictBool = Field(False, description="Delete it instead.")
    force: StrictBool = Field(False, description="Delete it also when it is not merged.")


class CheckoutBody(GitBody):
    ref: Ref = Field(description="A branch, tag or commit.")
    create: StrictBool = Field(False, description="Make a branch of that name.")
    force: StrictBool = Field(False, description="Throw changes of the work tree away.")


class PushBody(RemoteBody):
    remote: Ref = Field("origin", description="Name of a remote of the repository.")
    branch: Ref | None = Field(None, description="Default: the present one.")
    set_upstream: StrictBool = Field(False, description="Later pulls come from there.")
    force: StrictBool = Field(False, description="Replace what the remote has, if that is what was last fetched.")


class PullBody(RemoteBody):
    remote: Ref = Field("origin", description="Name of a remote of the repository.")
    branch: Ref | None = Field(None, description="Default: the upstream of the present one.")
    mode: Literal["ff-only", "merge", "rebase"] = Field("ff-only", description="When both have new commits.")


class LogBody(GitBody):
    ref: Ref | None = Field(None, description="Where it begins; default: the present commit.")
    limit: Annotated[StrictInt, Field(ge=1, le=MAX_LOG)] = Field(50, description="So many at most.")
    skip: Annotated[StrictInt, Field(ge=0, le=10**9)] = Field(0, description="So many of the newest are left out.")
    paths: Paths = Field(default_factory=list, description="Only commits that touch these.")


class GitFile(BaseModel):
    path: str
    path_b64: str | None = Field(None, description="base64url of the raw path when it is not UTF-8.")
    kind: Literal["changed", "renamed", "unmerged", "untracked"]
    index: str = Field(description="One letter as in git-status(1), `.` for no change.")
    worktree: str
    old_path: str | None = None
    old_path_b64: str | None = None


class GitHead(BaseModel):
    branch: str | None = Field(None, description="Absent: detached.")
    head: str | None = Field(None, description="Absent: nothing was committed yet.")
    upstream: str | None = None
    ahead: int
    behind: int


class GitStatus(GitHead):
    files: list[GitFile]
    clean: bool
    truncated: bool = Field(description="There are more files than could be told.")


class GitDiffFile(BaseModel):
    path: str
    path_b64: str | None = None
    added: int | None = Field(None, description="Absent for a binary file.")
    removed: int | None = None
    old_path: str | None = None
    old_path_b64: str | None = None


class GitDiff(BaseModel):
    diff: str
    truncated: bool
    files: list[GitDiffFile]


class GitPerson(BaseModel):
    name: str
    email: str
    at: str


class GitCommit(BaseModel):
    hash: str
    parents: list[str]
    author: GitPerson
    committer: GitPerson
    message: str


class GitLog(BaseModel):
    commits: list[GitCommit]


class GitBranch(BaseModel):
    name: str
    head: str
    upstream: str | None = None
    current: bool
    remote: bool


class GitBranches(BaseModel):
    branches: list[GitBranch]


class GitPushed(BaseModel):
    source: str
    target: str
    status: Literal["up_to_date", "new", "fast_forward", "forced", "deleted", "rejected"]


class GitPush(BaseModel):
    refs: list[GitPushed]


class GitPull(GitHead):
    updated: bool
    before: str | None = None


REQUESTS: Final[tuple[type[BaseModel], ...]] = (
    GitBody, CloneBody, GitDiffBody, GitCommitBody, GitBranchBody, CheckoutBody, PushBody, PullBody, LogBody,
)  # fmt: skip
