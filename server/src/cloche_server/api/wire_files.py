"""Request and answer types of what is done to trees of files."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt, StringConstraints

from cloche_server.api.wire import MODE, FileEntry
from cloche_server.api.wire_base import Wire
from cloche_server.core.filelinks import MAX_SECONDS, SECONDS

MAX_RESULTS: Final = 10_000
FORMAT = Literal["tar", "tar.gz", "zip"]

PathText = Annotated[str, StringConstraints(min_length=1, max_length=4095, pattern=r"^/[^\x00]*$")]
PathB64 = Annotated[str, StringConstraints(min_length=1, max_length=8192, pattern=r"^[A-Za-z0-9_-]+=*$")]
User = Annotated[str, StringConstraints(max_length=256)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^:\x00]+$")]
Glob = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Globs = Annotated[list[Glob], Field(max_length=100)]
Expression = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Mtime = Annotated[float, Field(ge=0, le=9e9, allow_inf_nan=False, strict=True)]

_B64 = "Instead of `path`: base64url of the raw bytes."
_USER = "Whose rights apply: name or number; default: the sandbox's user."
_GLOBS = "Patterns with `*`, `?`, `[a-z]`, `{a,b}` and `**`; one without `/` is for the last component."


class OnePath(Wire):
    path: PathText | None = Field(None, description="Absolute path. One of `path` and `path_b64`.")
    path_b64: PathB64 | None = Field(None, description=_B64)
    user: User | None = Field(None, description=_USER)


class CopyBody(Wire):
    source: PathText | None = Field(
        None,
        validation_alias="from",
        serialization_alias="from",
        description="Absolute path. One of `from` and `from_b64`.",
    )
    from_b64: PathB64 | None = Field(None, description="Instead of `from`: base64url of the raw bytes.")
    to: PathText | None = Field(None, description="Absolute path. One of `to` and `to_b64`.")
    to_b64: PathB64 | None = Field(None, description="Instead of `to`: base64url of the raw bytes.")
    recursive: StrictBool = Field(True, description="Directories with all they hold; links stay links.")
    overwrite: StrictBool = Field(False, description="Replace what is there; an existing directory only when empty.")
    user: User | None = Field(None, description=_USER)


class AttributesBody(OnePath):
    mode: Annotated[str, StringConstraints(pattern=MODE)] | None = Field(None, description="Octal.")
    owner: Name | None = Field(None, description="Name or number.")
    group: Name | None = Field(None, description="Name or number.")
    mtime: Mtime | None = Field(None, description="Unix seconds.")
    recursive: StrictBool = Field(False, description="With all below; of links only owner and group.")


class TouchBody(OnePath):
    mtime: Mtime | None = Field(None, description="Unix seconds; default: now.")


class LinkBody(OnePath):
    target: Annotated[str, StringConstraints(min_length=1, max_length=4095, pattern=r"^[^\x00]+$")] = Field(
        description="The text of the link, or with `hard` the absolute path of the file."
    )
    hard: StrictBool = Field(False, description="Another name for the same file.")
    overwrite: StrictBool = Field(False, description="Replace what is there, in one step.")


class GlobBody(OnePath):
    pattern: Glob = Field(description=f"Relative to `path`. {_GLOBS}")
    exclude: Globs = Field(default_factory=list, description="What matches is neither told nor entered.")
    type: Literal["file", "dir", "symlink"] | None = Field(None, description="Only entries of this kind.")
    max_results: Annotated[StrictInt, Field(ge=1, le=MAX_RESULTS)] = Field(
        1000, description="More is told with `truncated`."
    )


class GrepBody(OnePath):
    pattern: Expression = Field(description="A regular expression (RE2), or with `literal` a text, within one line.")
    literal: StrictBool = Field(False, description="The pattern is a text, not an expression.")
    ignore_case: StrictBool = Field(False, description="Upper and lower case are the same.")
    include: Globs = Field(default_factory=list, description=f"Only files that match one. {_GLOBS}")
    exclude: Globs = Field(default_factory=list, description="What matches is not looked into.")
    context_lines: Annotated[StrictInt, Field(ge=0, le=20)] = Field(0, description="So many before and after.")
    max_results: Annotated[StrictInt, Field(ge=1, le=MAX_RESULTS)] = Field(
        1000, description="More is told with `truncated`."
    )
    max_per_file: Annotated[StrictInt, Field(ge=0, le=MAX_RESULTS)] = Field(0, description="0: no limit.")


class ReplaceBody(Wire):
    paths: Annotated[list[PathText], Field(min_length=1, max_length=1000)] = Field(description="The files.")
    pattern: Expression = Field(description="A regular expression (RE2), or with `literal` a text.")
    replacement: Annotated[str, StringConstraints(max_length=65536)] = Field(
        description="Without `literal`, `$1` or `${name}` is what a group has found, and `$$` a dollar sign."
    )
    literal: StrictBool = Field(False, description="The pattern is a text, not an expression.")
    ignore_case: StrictBool = Field(False, description="Upper and lower case are the same.")
    max_count: Annotated[StrictInt, Field(ge=0, le=200_000)] = Field(0, description="In each file; 0: all.")
    dry_run: StrictBool = Field(False, description="Only count.")
    user: User | None = Field(None, description=_USER)


class FileUrlBody(OnePath):
    method: Literal["GET", "PUT"] = Field("GET", description="What the link is good for; `GET` for `HEAD` too.")
    expires_seconds: Annotated[StrictInt, Field(ge=1, le=MAX_SECONDS)] = Field(SECONDS, description="Good so long.")
    max_bytes: Annotated[StrictInt, Field(ge=1, le=2**53)] | None = Field(None, description="Of an upload.")


class FoundEntry(FileEntry):
    path_b64: str | None = Field(None, description="base64url of the raw path when it is not UTF-8.")


class AttributesAnswer(BaseModel):
    changed: int = Field(description="So many entries.")
    entry: FileEntry


class ReadlinkAnswer(BaseModel):
    target: str
    target_b64: str | None = Field(None, description="base64url of the raw text when it is not UTF-8.")


class SearchAnswer(BaseModel):
    truncated: bool = Field(description="There is more than was asked for.")
    unreadable: int = Field(description="So many directories or files could not be looked into.")


class GlobAnswer(SearchAnswer):
    entries: list[FoundEntry]


class MatchAnswer(BaseModel):
    path: str
    path_b64: str | None = Field(None, description="base64url of the raw path when it is not UTF-8.")
    line: int = Field(description="From 1.")
    column: int = Field(description="In bytes, from 1.")
    text: str = Field(description="The line, or of a long one the part around the match.")
    cut: bool | None = Field(None, description="True: the line is longer than `text`.")
    before: list[str]
    after: list[str]


class GrepAnswer(SearchAnswer):
    matches: list[MatchAnswer]
    files: int = Field(description="So many were looked into.")
    skipped_binary: int = Field(description="So many were not, because they hold no text.")


class ReplacedFile(BaseModel):
    path: str
    count: int
    error: str | None = Field(None, description="The code for which the file was left as it is.")


class ReplaceAnswer(BaseModel):
    files: list[ReplacedFile]
    count: int = Field(description="Of all files together.")


class UseAnswer(BaseModel):
    path: str
    path_b64: str | None = None
    bytes: int = Field(description="Of content.")
    disk_bytes: int = Field(description="Of blocks on the disk.")
    entries: int


class TreeUseAnswer(UseAnswer):
    parts: list[UseAnswer]
    truncated: bool
    unreadable: int


class DiskUseAnswer(BaseModel):
    bytes: int
    used_bytes: int
    available_bytes: int
    files: int
    files_free: int
    read_only: bool


class NoticeAnswer(BaseModel):
    name: str
    why: str


class ExtractAnswer(BaseModel):
    path: str
    files: int
    dirs: int
    links: int
    bytes: int
    skipped: int
    notices: list[NoticeAnswer] = Field(description="What was left out, at most 100 of it.")


class FileUrlAnswer(BaseModel):
    url: str = Field(description="Good without a token.")
    method: Literal["GET", "PUT"]
    expires_at: str


class WatchReady(BaseModel):
    """`ready`: from now on nothing is missed."""


class WatchChange(BaseModel):
    """`created`, `modified`, `attributes`, `deleted`, `moved`."""

    path: str
    path_b64: str | None = None
    is_dir: bool
    old_path: str | None = Field(None, description="Of `moved`.")
    old_path_b64: str | None = None


class WatchOverflow(BaseModel):
    """`overflow`: events were lost; look again."""


class WatchEnd(BaseModel):
    """`end`: the directory has gone."""

    reason: Literal["gone"]


REQUESTS: Final[tuple[type[BaseModel], ...]] = (
    CopyBody, AttributesBody, TouchBody, LinkBody, GlobBody, GrepBody, ReplaceBody, FileUrlBody,
)  # fmt: skip
EVENTS: Final[tuple[type[BaseModel], ...]] = (WatchReady, WatchChange, WatchOverflow, WatchEnd)
