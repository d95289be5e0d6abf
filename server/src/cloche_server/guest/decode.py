"""From the agent's JSON to the types of `types.py`. Everything here raises `guest.protocol` on nonsense."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ..core.trees import TAG, FileHead
from .errors import protocol_error
from .fields import Fields
from .frames import parse_exit
from .types import (
    ENTRY_TYPES,
    AgentInfo,
    DirListing,
    Entry,
    ExecInfo,
    Execs,
    GuestProcess,
    ListeningPort,
    RenewResult,
    Usage,
    WriteResult,
    Written,
)

_NAME_MAX: Final = 1024
_PATH_MAX: Final = 8192
_STEPS_MAX: Final = 32
EXECS_MAX: Final = 10_000
_PORTS_MAX: Final = 1024
_PROCESSES_MAX: Final = 2048
_TAG_MAX: Final = 2048
_PART: Final = re.compile(r"([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.ASCII)


def agent_info(body: object) -> AgentInfo:
    f = Fields(body)
    return AgentInfo(
        generation=f.integer("generation", 1, 10**6),
        version=f.text("version", 64),
        boot_id=f.text("boot_id", 64, default=""),
        pid=f.integer("pid", default=0),
        uptime_ms=f.number("uptime_ms", 0.0),
        cpus=f.integer("cpus", default=0),
        memory_mb=f.integer("memory_mb", default=0),
        disk_mb=f.integer("disk_mb", default=0),
        execs_running=f.integer("execs_running", default=0),
    )


def steps(body: object) -> dict[str, float]:
    raw = Fields(body).raw("steps")
    if not isinstance(raw, dict) or len(raw) > _STEPS_MAX:
        raise protocol_error("the field 'steps' is not an object in its bounds")
    times = Fields(raw)
    return {name[:32]: times.number(name) for name in raw if name.isascii() and name.isidentifier()}


def renew_result(body: object) -> RenewResult:
    return RenewResult(steps=steps(body), disk_mb=Fields(body).opt_integer("disk_mb"))


def usage(body: object) -> Usage:
    f = Fields(body)
    return Usage(
        cpu_ms=f.number("cpu_ms", 0.0),
        memory_bytes=f.integer("memory_bytes", default=0),
        memory_limit_bytes=f.integer("memory_limit_bytes", default=0),
        processes=f.integer("processes", default=0),
        disk_used_bytes=f.integer("disk_used_bytes", default=0),
        disk_bytes=f.integer("disk_bytes", default=0),
        oom_kills=f.integer("oom_kills", default=0),
    )


def exec_info(body: object) -> ExecInfo:
    f = Fields(body)
    return ExecInfo(
        id=f.text("id", 64),
        pid=f.integer("pid", 0, 2**31),
        running=f.flag("running"),
        started_ns=f.integer("started_ns", default=0),
        detach=f.flag("detach"),
        exit=parse_exit(Fields(f.raw("exit"))) if f.has("exit") else None,
        offset=f.integer("offset", default=0),
        first=f.integer("first", default=0),
        stdout_bytes=f.integer("stdout", default=0),
        stderr_bytes=f.integer("stderr", default=0),
        stdin=_stdin(f.text("stdin", 16, default="none")),
        pty=_size(Fields(f.raw("pty"))) if f.has("pty") else None,
        tag=f.text("tag", _TAG_MAX, default=""),
    )


def _stdin(text: str) -> str:
    return text if text in {"pipe", "closed", "pty"} else "none"


def _size(f: Fields) -> tuple[int, int]:
    return f.integer("cols", 0, 65535), f.integer("rows", 0, 65535)


def exec_list(body: object) -> list[ExecInfo]:
    return [exec_info(item) for item in Fields(body).items("execs", EXECS_MAX)]


def execs(body: object) -> Execs:
    return Execs(Fields(body).text("boot_id", 64, default=""), exec_list(body))


def written(body: object, most: int) -> Written:
    f = Fields(body)
    return Written(f.integer("bytes", 0, most), f.flag("closed"))


def processes(body: object) -> tuple[list[GuestProcess], bool]:
    fields = Fields(body)
    found = []
    for item in fields.items("processes", _PROCESSES_MAX):
        f = Fields(item)
        found.append(
            GuestProcess(
                pid=f.integer("pid", 0, 2**31),
                ppid=f.integer("ppid", 0, 2**31, default=0),
                uid=f.integer("uid", 0, 2**32, default=0),
                user=printable(f.text("user", 64, default="")),
                state=printable(f.text("state", 1, default="")),
                cpu_ms=f.number("cpu_ms", 0.0),
                rss_kb=f.integer("rss_kb", default=0),
                started_ns=f.integer("started_ns", default=0),
                name=printable(f.text("name", 64, default="")),
                command=printable(f.text("command", 512, default="")),
                exec_id=f.opt_text("exec_id", 64),
            )
        )
    return found, fields.flag("truncated")


def ports(body: object) -> list[ListeningPort]:
    found = []
    for item in Fields(body).items("ports", _PORTS_MAX):
        f = Fields(item)
        found.append(
            ListeningPort(
                port=f.integer("port", 0, 65535),
                address=f.text("address", 64),
                pid=f.integer("pid", 0, 2**31, default=0),
                process=printable(f.text("process", 64, default="")),
            )
        )
    return found


def printable(text: str) -> str:
    """Text of a guest for people to read: without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _octal(text: str) -> int:
    if not 1 <= len(text) <= 6 or text.strip("01234567"):
        raise protocol_error("a mode that is not octal")
    return int(text, 8)


def entry(body: object) -> Entry:
    f = Fields(body)
    kind = f.text("type", 16)
    for known in ENTRY_TYPES:
        if kind == known:
            break
    else:
        known = "unknown"
    name = f.text("name", _NAME_MAX)
    raw_name = f.opt_base64url("name_b64", _NAME_MAX)
    return Entry(
        name=name,
        raw_name=name.encode() if raw_name is None else raw_name,
        path=f.text("path", _PATH_MAX),
        type=known,
        size=f.integer("size", default=0),
        mode=_octal(f.text("mode", 8, default="0")),
        # a file may well be dated before 1970
        mtime_ns=f.integer("mtime_ns", -(2**63), default=0),
        uid=f.integer("uid", 0, 2**32, default=0),
        gid=f.integer("gid", 0, 2**32, default=0),
        owner=f.text("owner", 256, default=""),
        group=f.text("group", 256, default=""),
        target=f.opt_text("target", _PATH_MAX),
    )


def dir_listing(body: object, limit: int) -> DirListing:
    f = Fields(body)
    following = f.opt_base64url("next", _NAME_MAX)
    if f.flag("truncated") != (following is not None):
        raise protocol_error("a list that is cut without saying where")
    entries = [entry(item) for item in f.items("entries", limit)]
    return DirListing(path=f.text("path", _PATH_MAX), entries=entries, next=following)


def write_result(body: object) -> WriteResult:
    f = Fields(body)
    path = f.text("path", _PATH_MAX, default="")
    return WriteResult(path=path, bytes=f.integer("bytes"), created=f.flag("created"), tag=_tag(f.opt_text("tag", 256)))


def _tag(text: str | None) -> str | None:
    if text is not None and not TAG.fullmatch(text):
        raise protocol_error("a tag of another form")
    return text


def number_header(headers: Mapping[str, str], name: str) -> int | None:
    """A decimal number, None if there is none."""
    text = headers.get(name)
    if text is None:
        return None
    digits = text[1:] if text.startswith("-") else text
    if not digits.isascii() or not digits.isdigit() or len(digits) > 19:
        raise protocol_error(f"the header {name!r} is not a number")
    return int(text)


def file_head(headers: Mapping[str, str]) -> FileHead:
    """What the headers of a download say."""
    size = number_header(headers, "content-length")
    if size is not None and size < 0:
        raise protocol_error("a negative length")
    unchanged = headers.get("x-unchanged") == "1"
    part = None
    if (text := headers.get("x-range")) is not None:
        found = _PART.fullmatch(text)
        if found is None:
            raise protocol_error("a part of another form")
        first, count, whole = (int(number) for number in found.groups())
        if (count != size and not unchanged) or first + count > whole:
            raise protocol_error("a part that is not in the file")
        part = first, count, whole
    mtime_ns = number_header(headers, "x-mtime-ns") or 0
    return FileHead(size, _octal(headers.get("x-mode", "0")), mtime_ns, _tag(headers.get("x-tag")), part, unchanged)
