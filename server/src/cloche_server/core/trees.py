"""What is asked of files in a sandbox and what comes of it, as all layers see it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

#: A state of a file, as the agent names it.
TAG: Final = re.compile(r"[0-9a-f]+(-[0-9a-f]+){4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ReadWish:
    """What of a file is wanted. `first` and `count`, or `last`: a part, counted in bytes; `if_range`: only while the
    file has this tag, else all of it. `unless`: nothing, when it has one of these tags. `head`: no content at all."""

    first: int | None = None
    count: int | None = None
    last: int | None = None
    if_range: str | None = None
    unless: tuple[str, ...] = ()
    head: bool = False

    def query(self) -> list[tuple[str, str]]:
        fields = {"first": self.first, "count": self.count, "last": self.last, "if_range": self.if_range}
        fields["unless"] = ",".join(self.unless) or None
        return [(name, str(value)) for name, value in fields.items() if value is not None]


@dataclass(frozen=True, slots=True)
class FileHead:
    """What the agent says of a file before its content. `size` of what comes, None where the kernel does not tell;
    `part`: (first, count, size of all) when that is not all. `unchanged`: nothing comes."""

    size: int | None
    mode: int
    mtime_ns: int
    tag: str | None = None
    part: tuple[int, int, int] | None = None
    unchanged: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """A line of a file that matches. `column` counts bytes from 1; `cut`: the line is longer than `text`."""

    path: str
    raw_path: bytes
    line: int
    column: int
    text: str
    cut: bool
    before: Sequence[str]
    after: Sequence[str]


@dataclass(frozen=True, slots=True)
class SearchEnd:
    """How a search ended. `truncated`: there is more than was asked for."""

    truncated: bool
    files: int
    skipped_binary: int
    unreadable: int


@dataclass(frozen=True, slots=True)
class Found:
    """An entry that a pattern of names matches."""

    #: As in a list of a directory.
    entry: Any
    raw_path: bytes


@dataclass(frozen=True, slots=True)
class Replaced:
    """What became of one file: `count` places changed, or the `error` for which it was left as it is."""

    path: str
    raw_path: bytes
    count: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Use:
    """What a tree takes up: `bytes` of content, `disk_bytes` of blocks."""

    path: str
    raw_path: bytes
    bytes: int
    disk_bytes: int
    entries: int


@dataclass(frozen=True, slots=True)
class TreeUse:
    """A tree and its parts. `truncated`: there are more parts; `unreadable`: so many could not be looked into."""

    whole: Use
    parts: Sequence[Use]
    truncated: bool
    unreadable: int


@dataclass(frozen=True, slots=True)
class DiskUse:
    """A file system. `available`: what a user who is not root may still write."""

    bytes: int
    used_bytes: int
    available_bytes: int
    files: int
    files_free: int
    read_only: bool


@dataclass(frozen=True, slots=True)
class Extracted:
    """What has come out of an archive. `notices`: names that were left out, and why (at most 100)."""

    path: str
    files: int
    dirs: int
    links: int
    bytes: int
    skipped: int
    notices: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """`kind` as in §4.4. `path` and `old` (of `moved`) are exact."""

    kind: str
    path: bytes | None
    old: bytes | None
    is_dir: bool
    code: str | None
