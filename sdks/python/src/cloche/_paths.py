"""Paths in the sandbox: from what the caller gives to the query of a request, and back.

A path is text, bytes or a `PurePath`. What is not UTF-8 (bytes, or text with surrogate escapes as
`os.listdir` yields it) travels as `path_b64`, so every name that can be listed can be read.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from .errors import ProtocolError
from .models import FileEntry

RemotePath = str | bytes | PurePath


def text(path: RemotePath) -> str:
    """The path as text, with surrogate escapes for bytes that are not UTF-8."""
    if isinstance(path, bytes):
        value = path.decode("utf-8", "surrogateescape")
    else:
        value = path.as_posix() if isinstance(path, PurePath) else path
    if not isinstance(value, str):
        raise TypeError(f"a path is str, bytes or PurePath, not {type(path).__name__}")
    if not value or "\0" in value:
        raise ValueError("a path must not be empty or hold a NUL")
    return value


def field(path: RemotePath, name: str = "path") -> dict[str, str]:
    """The field of a request that names the path."""
    value = text(path)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raw = value.encode("utf-8", "surrogateescape")
        return {f"{name}_b64": base64.urlsafe_b64encode(raw).decode().rstrip("=")}
    return {name: value}


def text_field(path: RemotePath, name: str) -> dict[str, str]:
    """The same for a call whose fields are JSON text, which other names cannot be put in."""
    value = field(path, name)
    if name not in value:
        raise ValueError(f"this call takes no names that are not UTF-8: {text(path)!r}")
    return value


def entry(data: Mapping[str, Any], directory: str | None = None) -> FileEntry:
    """An entry of the API. `directory`: the path that was listed; else the entry's own path is used."""
    name = str(data.get("name") or "")
    path = str(data.get("path") or name)
    if data.get("name_b64"):
        name = raw_text(str(data["name_b64"]))
        path = posixpath.join(posixpath.dirname(path), name)
    if directory is not None:
        path = posixpath.join(directory, name)
    mtime_ns = data.get("mtime_ns")
    return FileEntry(
        name=name,
        path=path,
        type=str(data.get("type") or ("dir" if data.get("is_dir") else "unknown")),
        size=int(data.get("size") or 0),
        mode=_mode(data.get("mode")),
        mtime_ns=int(mtime_ns) if mtime_ns is not None else int(data.get("mtime") or 0) * 1_000_000_000,
        uid=int(data.get("uid") or 0),
        gid=int(data.get("gid") or 0),
        owner=str(data.get("owner") or data.get("uid") or ""),
        group=str(data.get("group") or data.get("gid") or ""),
        target=data.get("target"),
    )


def found(data: Mapping[str, Any], path: str) -> FileEntry:
    """An entry of a search, whose path is known by itself."""
    return replace(entry(data), path=path, name=posixpath.basename(path))


def raw_text(encoded: str) -> str:
    """The text of a base64url field, with surrogate escapes for bytes that are not UTF-8."""
    try:
        raw = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except (binascii.Error, ValueError):
        raise ProtocolError("the server sent a file name that is not base64") from None
    return raw.decode("utf-8", "surrogateescape")


def _mode(value: object) -> int:
    try:
        return int(value, 8) if isinstance(value, str) else 0
    except ValueError:
        return 0


def mode_text(mode: int | str | None) -> str | None:
    """A mode as octal text: `0o644` and `"0644"` mean the same; a number is never read as decimal digits."""
    if mode is None:
        return None
    value = int(mode, 8) if isinstance(mode, str) else mode
    if not 0 <= value <= 0o7777:
        raise ValueError(f"mode {mode!r} is not between 0 and 0o7777")
    return f"{value:04o}"
