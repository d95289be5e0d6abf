"""From the API's JSON about files and repositories to `trees` and `git`."""

from __future__ import annotations

from typing import Any

from . import _paths, _wire
from .git import GitBranch, GitCommit, GitDiff, GitFile, GitHead, GitStatus
from .trees import DiskUse, Extracted, Glob, Grep, Match, Replaced, TreeUse, WatchEvent


def path(data: _wire.Json, name: str = "path") -> str:
    """A path of an answer, with surrogate escapes for bytes that are not UTF-8."""
    encoded = data.get(f"{name}_b64")
    return _paths.raw_text(str(encoded)) if encoded else str(_wire.required(data, name))


def grep(data: _wire.Json) -> Grep:
    found = [
        Match(
            path(one), int(one["line"]), int(one["column"]), str(one["text"]), bool(one.get("cut")),
            [str(line) for line in one.get("before") or ()], [str(line) for line in one.get("after") or ()],
        )
        for one in _wire.records(_wire.required(data, "matches"))
    ]  # fmt: skip
    numbers = (int(data.get(name) or 0) for name in ("files", "skipped_binary", "unreadable"))
    return Grep(found, bool(data.get("truncated")), *numbers)


def glob(data: _wire.Json) -> Glob:
    entries = [_paths.found(one, path(one)) for one in _wire.records(_wire.required(data, "entries"))]
    return Glob(entries, bool(data.get("truncated")), int(data.get("unreadable") or 0))


def replaced(data: _wire.Json) -> Replaced:
    return Replaced(path(data), int(data.get("count") or 0), data.get("error"))


def tree_use(data: _wire.Json) -> TreeUse:
    parts = [tree_use(one) for one in _wire.records(data.get("parts") or [])]
    bytes_, disk, entries = (int(data.get(name) or 0) for name in ("bytes", "disk_bytes", "entries"))
    return TreeUse(path(data), bytes_, disk, entries, parts)


def disk_use(data: _wire.Json) -> DiskUse:
    names = ("bytes", "used_bytes", "available_bytes", "files", "files_free")
    size, used, available, files, free = (int(data.get(name) or 0) for name in names)
    return DiskUse(size, used, available, files, free, bool(data.get("read_only")))


def extracted(data: _wire.Json) -> Extracted:
    files, dirs, links, size, skipped = (
        int(data.get(name) or 0) for name in ("files", "dirs", "links", "bytes", "skipped")
    )
    told = [(str(one.get("name")), str(one.get("why"))) for one in _wire.records(data.get("notices") or [])]
    return Extracted(path(data), files, dirs, links, size, skipped, told)


def watch_event(kind: str, data: _wire.Json) -> WatchEvent:
    there = path(data) if "path" in data else None
    old = path(data, "old_path") if "old_path" in data else None
    return WatchEvent(kind, there, old, bool(data.get("is_dir")))


def git_head(data: _wire.Json) -> GitHead:
    ahead, behind = (int(data.get(name) or 0) for name in ("ahead", "behind"))
    return GitHead(data.get("branch"), data.get("head"), data.get("upstream"), ahead, behind)


def git_status(data: _wire.Json) -> GitStatus:
    files = [
        GitFile(
            path(one), str(one.get("kind")), str(one.get("index")), str(one.get("worktree")),
            path(one, "old_path") if "old_path" in one else None,
        )
        for one in _wire.records(_wire.required(data, "files"))
    ]  # fmt: skip
    return GitStatus(git_head(data), files, bool(data.get("clean")), bool(data.get("truncated")))


def git_commit(data: _wire.Json) -> GitCommit:
    author = _wire.record(_wire.required(data, "author"))
    name, mail, at = (str(author.get(key)) for key in ("name", "email", "at"))
    parents = [str(one) for one in data.get("parents") or ()]
    return GitCommit(str(_wire.required(data, "hash")), parents, name, mail, at, str(data.get("message")))


def git_diff(data: _wire.Json) -> GitDiff:
    files = [(path(one), one.get("added"), one.get("removed")) for one in _wire.records(data.get("files") or [])]
    return GitDiff(str(_wire.required(data, "diff")), bool(data.get("truncated")), files)


def git_branches(data: Any) -> list[GitBranch]:
    return [
        GitBranch(
            str(one.get("name")), str(one.get("head")), one.get("upstream"),
            bool(one.get("current")), bool(one.get("remote")),
        )
        for one in _wire.records(_wire.required(_wire.record(data), "branches"))
    ]  # fmt: skip
