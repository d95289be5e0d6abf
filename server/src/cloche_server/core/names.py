"""Names of hosts, taken strictly: what is not plainly a name is none. Pure."""

from __future__ import annotations

import re
from typing import Final

MAX_NAME: Final = 253
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")


def canonical_name(text: str) -> str | None:
    """The name in lower case without its final dot; None for what is no name of a host: empty, over 253 characters,
    with a label that is empty or over 63, with anything but ASCII letters, digits, `-` and `_`, or ending in a number
    (`127.1`, `0x7f.1`: some programs take these for addresses)."""
    if not text.isascii() or len(text) > MAX_NAME + 1:
        return None
    name = text.lower().removesuffix(".")
    if not name or len(name) > MAX_NAME:
        return None
    labels = name.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
        return None
    return name


def host_name(text: str) -> str | None:
    """A name as people write it: letters of other scripts become their `xn--` form first."""
    if text.isascii():
        return canonical_name(text)
    if len(text) > MAX_NAME:
        return None
    try:
        return canonical_name(text.encode("idna").decode("ascii"))
    except UnicodeError:
        return None


def domain_pattern(text: str) -> str | None:
    """An exact name or `*.name` in canonical form, or None."""
    if text.startswith("*."):
        base = host_name(text[2:])
        return None if base is None else f"*.{base}"
    return host_name(text)


def matches(pattern: str, name: str) -> bool:
    """Whether a canonical name is what a canonical pattern means: `*.x` is every name below x, not x."""
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and len(name) > len(pattern) - 1
    return name == pattern


def parents(name: str) -> list[str]:
    """The names above a name, the nearest first."""
    found = []
    at = name.find(".")
    while at >= 0:
        found.append(name[at + 1 :])
        at = name.find(".", at + 1)
    return found
