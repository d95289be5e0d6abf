"""What searches, archives and watches of files in a sandbox tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .models import FileEntry

ArchiveFormat = Literal["tar", "tar.gz", "zip"]


@dataclass(frozen=True, slots=True)
class Match:
    """A line that matches. `column` counts bytes from 1; `cut`: the line is longer than `text`."""

    path: str
    line: int
    column: int
    text: str
    cut: bool
    before: Sequence[str]
    after: Sequence[str]


@dataclass(frozen=True, slots=True)
class Grep:
    """What a search in files has found. `truncated`: there is more."""

    matches: Sequence[Match]
    truncated: bool
    files: int
    skipped_binary: int
    unreadable: int


@dataclass(frozen=True, slots=True)
class Glob:
    """What a search for names has found. `truncated`: there is more."""

    entries: Sequence[FileEntry]
    truncated: bool
    unreadable: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """What became of one file: `count` places changed, or the code of the `error` for which it was left."""

    path: str
    count: int
    error: str | None


@dataclass(frozen=True, slots=True)
class TreeUse:
    """What a tree takes up: `bytes` of content, `disk_bytes` of blocks. `parts`: directories in it."""

    path: str
    bytes: int
    disk_bytes: int
    entries: int
    parts: Sequence[TreeUse] = ()


@dataclass(frozen=True, slots=True)
class DiskUse:
    """A file system. `available_bytes`: what a user who is not root may still write."""

    bytes: int
    used_bytes: int
    available_bytes: int
    files: int
    files_free: int
    read_only: bool


@dataclass(frozen=True, slots=True)
class Extracted:
    """What has come out of an archive. `notices`: name and reason of what was left out."""

    path: str
    files: int
    dirs: int
    links: int
    bytes: int
    skipped: int
    notices: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """`type`: created, modified, attributes, deleted, moved (`old_path`), or overflow: events were lost, look again."""

    type: str
    path: str | None = None
    old_path: str | None = None
    is_dir: bool = False
