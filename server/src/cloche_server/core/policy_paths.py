"""Paths of HTTP requests against paths of rules. Pure.

A server may read `/a/%2e%2e/b` as `/b`. So an allow rule has to match both readings, and a deny rule either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_PERCENT: Final = re.compile(r"%([0-9A-Fa-f]{2})")


def path_matches(patterns: Iterable[str], path: str, *, strict: bool) -> bool:
    """`patterns`: exact paths, or prefixes that end in `*`. `strict`: every reading has to match."""
    plain = path.partition("?")[0].partition("#")[0]
    readings = {plain, resolved_path(plain)}
    found = [any(_one(pattern, reading) for pattern in patterns) for reading in readings]
    return all(found) if strict else any(found)


def _one(pattern: str, path: str) -> bool:
    if pattern.endswith("*"):
        return path.startswith(pattern[:-1])
    return path == pattern


def resolved_path(path: str) -> str:
    """What the most willing server makes of a path: decoded as often as it goes, `\\` as `/`, no empty segments, no
    parameters, dots resolved."""
    for _ in range(4):
        decoded = _PERCENT.sub(lambda match: chr(int(match[1], 16)), path)
        if decoded == path:
            break
        path = decoded
    kept: list[str] = []
    parts = path.replace("\\", "/").split("/")
    for part in parts:
        part = part.partition(";")[0]
        if part == "..":
            del kept[-1:]
        elif part not in {"", "."}:
            kept.append(part)
    slash = "/" if kept and parts[-1] in {"", ".", ".."} else ""
    return "/" + "/".join(kept) + slash
