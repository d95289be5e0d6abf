"""Conditions and parts of requests for files: `ETag`, `If-Match`, `If-None-Match`, `Range`, `If-Range` (RFC 9110)."""

from __future__ import annotations

import re
from typing import Final

from starlette.requests import Request

from cloche_server.core.errors import ClocheError
from cloche_server.core.trees import TAG, FileHead, ReadWish

_ONE: Final = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
_LIST: Final = re.compile(r'\s*(?:(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"\s*(?:,\s*|$))+')
_RANGE: Final = re.compile(r"bytes=\s*(?:([0-9]{1,18})-([0-9]{1,18})?|-([0-9]{1,18}))\s*")
_MAX_TAGS: Final = 50


def etag(tag: str) -> str:
    return f'"{tag}"'


def tags(request: Request, name: str, *, weak: bool) -> tuple[str, ...] | None:
    """Those of a header as the agent knows them, `*` for any; None without the header, empty when none can match.
    `weak`: a weak one matches too. Raises `request.invalid`."""
    values = request.headers.getlist(name)
    if not values:
        return None
    text = ", ".join(values).strip()
    if text == "*":
        return ("*",)
    found = _ONE.findall(text)
    if not _LIST.fullmatch(text) or len(found) > _MAX_TAGS:
        raise ClocheError(
            "request.invalid",
            f"{name} holds tags in double quotes with commas between, or `*`",
            details={"field": name.lower()},
        )
    return tuple(tag for mark, tag in found if (weak or not mark) and TAG.fullmatch(tag))


def write_conditions(request: Request) -> tuple[tuple[str, ...], bool]:
    """Tags of which one must fit, and whether there must be no file. Raises `request.invalid`, `file.changed`."""
    absent = tags(request, "If-None-Match", weak=True)
    if absent is not None and absent != ("*",):
        raise ClocheError(
            "request.invalid", "of If-None-Match a write knows `*` only", details={"field": "if-none-match"}
        )
    match = tags(request, "If-Match", weak=False)
    if match == ():
        raise ClocheError("file.changed", "the file has none of the tags of If-Match")
    return match or (), absent is not None


def read_wish(request: Request) -> ReadWish:
    """What of a file is asked for. A Range of another form than one part is as none."""
    unless = tags(request, "If-None-Match", weak=True) or ()
    head = request.method == "HEAD"
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if found is None or head:
        return ReadWish(unless=unless, head=head)
    if_range = request.headers.get("if-range")
    was = None
    if if_range is not None:
        known = _ONE.fullmatch(if_range.strip())
        if known is None or known[1] or not TAG.fullmatch(known[2]):
            return ReadWish(unless=unless)  # a date, or a tag that is not ours: all of the file
        was = known[2]
    if found[3] is not None:
        return ReadWish(last=int(found[3]), if_range=was, unless=unless)
    first = int(found[1])
    if found[2] is None:
        return ReadWish(first=first, if_range=was, unless=unless)
    if int(found[2]) < first:
        return ReadWish(unless=unless)
    return ReadWish(first=first, count=int(found[2]) - first + 1, if_range=was, unless=unless)


def check_read(request: Request, head: FileHead) -> bool:
    """Whether there is something to send. Raises `file.changed`."""
    match = tags(request, "If-Match", weak=False)
    if match is not None and "*" not in match and head.tag not in match:
        raise ClocheError("file.changed", "the file has none of the tags of If-Match")
    any_file = tags(request, "If-None-Match", weak=True) == ("*",)
    return not (head.unchanged or any_file)


def file_headers(head: FileHead) -> list[tuple[bytes, bytes]]:
    """What an answer says about the file."""
    headers = [
        (b"x-file-mode", f"{head.mode:04o}".encode()),
        (b"x-file-mtime-ns", str(head.mtime_ns).encode()),
        (b"accept-ranges", b"bytes" if head.tag is not None else b"none"),
    ]
    if head.tag is not None:
        headers.append((b"etag", etag(head.tag).encode()))
    if head.part is not None:
        first, count, whole = head.part
        headers.append((b"content-range", f"bytes {first}-{first + count - 1}/{whole}".encode()))
    return headers
