"""Failures of the guest link, and the one table from agent errors to codes of the catalogue.

Every sentence here is ours. It may name what the *caller* sent (path, user, directory), never text that
came from the guest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..core.errors import ClocheError

_QUOTE_MAX: Final = 200
_ERRNO: Final = re.compile(r"E[A-Z0-9]{1,15}", re.ASCII)
_FIELDS: Final = frozenset(
    {
        "path",
        "to",
        "user",
        "cwd",
        "exec_id",
        "stdin",
        "pty",
        "cols",
        "rows",
        "rlimits",
        "record_bytes",
        "linger_ms",
        "tag",
        "signal",
        "target",
        "stream",
        "id",
        "argv",
        "shell",
        "env",
        "stdin_b64",
        "timeout_ms",
        "max_output",
        "kill_on_limit",
        "detach",
        "from",
        "mode",
        "mtime_ns",
        "append",
        "parents",
        "recursive",
        "limit",
        "after",
        "follow",
        "overwrite",
        "entropy",
        "time_ns",
        "hostname",
        "machine_id",
        "grow_disk",
        "warm",
        "grace_ms",
        "path_b64",
        "to_b64",
        "name",
        "port",
    }
    | {"pattern", "include", "exclude", "context", "format", "owner", "group", "max_bytes", "max_entries"}
    | {"strip", "first", "body", "paths", "paths_b64", "watches", "depth"}
    | {"depends_on", "services", "health", "restart", "backoff_ms", "max_backoff_ms", "max_restarts", "window_ms"}
    | {"stop_signal", "stop_grace_ms", "log_bytes"}
)


class LinkLost(ClocheError):
    """The link ended, or could not be made. Code `sandbox.unreachable`.

    `not_run` is true when the agent cannot have begun the call, so that it may be sent again.
    """

    def __init__(self, why: str, *, not_run: bool = False) -> None:
        super().__init__("sandbox.unreachable", f"The agent in the sandbox cannot be reached: {why}.")
        self.not_run = not_run


class LinkTimeout(ClocheError):
    """The agent was silent for too long. Code `sandbox.unreachable`; the call may have run."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__("sandbox.unreachable", f"The agent in the sandbox {what} within {seconds:g} seconds.")


class StreamBroken(ClocheError):
    """The agent broke one call off (RST_STREAM). Code `guest.error`; `not_run` as in `LinkLost`."""

    def __init__(self, *, not_run: bool = False) -> None:
        super().__init__("guest.error", "The agent in the sandbox broke the call off before it was done.")
        self.not_run = not_run


def protocol_error(what: str) -> ClocheError:
    """The agent answered with something that the protocol does not allow; `what` is our own text."""
    return ClocheError("guest.protocol", f"The agent in the sandbox answered with nonsense: {what}.")


@dataclass(frozen=True, slots=True)
class CallContext:
    """What the caller asked for, for the wording of errors. `area`: machine, exec, process, service, file,
    port, socket (a Unix socket at `path`) or arrival (a connection that waits to be taken)."""

    area: str
    path: str | bytes | None = None
    to: str | bytes | None = None
    user: str | None = None
    cwd: str | None = None
    exec_id: str | None = None
    port: int | None = None


def _quoted(value: str | bytes | None, fallback: str) -> str:
    if value is None:
        return fallback
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
    if len(text) > _QUOTE_MAX:
        text = text[:_QUOTE_MAX] + "…"
    return repr(text)


#: About services: by status and field.
_OF_SERVICES: Final[Mapping[tuple[int, str], tuple[str, str]]] = {
    (404, "name"): ("service.not_found", "There is no service {name} in the sandbox."),
    (404, ""): (
        "not_implemented",
        "The agent in this sandbox is older than the server and knows no services; make another sandbox.",
    ),
    (404, "depends_on"): (
        "request.invalid",
        "The service {name} would depend on one that the sandbox does not have; define that one first.",
    ),
    (409, "depends_on"): ("service.conflict", "The service {name} would depend on itself, through others."),
    (409, "name"): ("service.conflict", "Another service depends on {name}; delete that one first, or change it."),
    (409, "services"): ("service.too_many", "The sandbox has as many services as it may; delete one first."),
    (400, "stop_signal"): (
        "request.invalid",
        "There is no such stop_signal: send its name, as in TERM, or its number from 1 to 64.",
    ),
    (413, "body"): ("exec.too_large", "The definitions of the services of a sandbox are too large."),
}


def _not_found(ctx: CallContext, field: str) -> tuple[str, str]:
    if ctx.area == "process":
        return "process.not_found", f"There is no process {_quoted(ctx.exec_id, 'with this id')} in the sandbox."
    if field == "user":
        return "exec.user_not_found", f"There is no user {_quoted(ctx.user, 'of this name')} in the sandbox."
    if field == "cwd":
        where = _quoted(ctx.cwd, "of the user")
        return "exec.invalid_cwd", f"The working directory {where} does not exist in the sandbox."
    if field in ("exec_id", "id") or (ctx.area == "exec" and not field):
        return "exec.not_found", f"There is no exec {_quoted(ctx.exec_id, 'with this id')} in the sandbox."
    if field == "port":
        return "port.closed", f"Nothing listens on port {ctx.port} of the sandbox."
    if ctx.area == "file" and not field:
        # It says of every path that it is one: what it does not find is the call.
        return (
            "not_implemented",
            "The agent in this sandbox is older than the server and does not know this call; make another sandbox.",
        )
    if ctx.area == "file" and field in ("owner", "group"):
        return "request.invalid", f"There is no such {field} in the sandbox."
    if ctx.area == "file":
        path = _quoted(ctx.path, "at this path")
        return "file.not_found", f"There is no file or directory {path} in the sandbox."
    return "guest.error", "The agent in the sandbox does not know what was asked for."


def _denied(ctx: CallContext, field: str) -> tuple[str, str]:
    user = _quoted(ctx.user or "root", "")
    if field == "cwd":
        where = _quoted(ctx.cwd, "of the user")
        return "exec.invalid_cwd", f"User {user} may not enter the working directory {where}."
    if ctx.area == "exec":
        return "file.permission_denied", f"User {user} may not do this in the sandbox."
    return "file.permission_denied", f"User {user} may not do this at {_quoted(ctx.path, 'this path')}."


def _too_large(ctx: CallContext, field: str, errno: str) -> tuple[str, str]:
    if errno == "EFBIG":
        return "file.no_space", "The file is larger than the file system of the sandbox allows."
    if field == "cwd":
        return "exec.invalid_cwd", f"The working directory {_quoted(ctx.cwd, '')} has a name that is too long."
    if ctx.area == "file" and field in _TOO_LARGE:
        return "file.archive_too_large", _TOO_LARGE[field]
    if ctx.area == "exec":
        part = {"env": "The environment", "argv": "An argument", "shell": "The command"}.get(
            field, "The command or its environment"
        )
        return "exec.too_large", f"{part} is larger than the kernel of the sandbox accepts."
    return "file.name_too_long", f"A name in {_quoted(ctx.path, 'the path')} is too long for the file system."


#: What the agent knows better than the API, in words for whoever has sent it.
_WRONG: Final[Mapping[str, str]] = {
    "signal": "There is no such signal: send its name, as in TERM, or its number from 1 to 64.",
    "from": "There is no output at this offset yet.",
    "rlimits": "A limit of `rlimits` is unknown or out of its range.",
}
#: Codes that say all by themselves.
_PLAIN: Final[Mapping[str, tuple[str, str]]] = {
    "changed": ("file.changed", "{path} is not as the condition of the request says."),
    "range": ("file.range_not_satisfiable", "{path} has no such part."),
    "bad_archive": ("file.bad_archive", "What was sent is not an archive of the format, or it is damaged."),
    "unsafe_archive": ("file.unsafe_archive", "An entry of the archive would be outside of {path}."),
    "not_a_link": ("file.not_a_link", "{path} is not a symbolic link."),
    "too_many_watches": (
        "file.too_many_watches",
        "There are more directories below {path} than may be watched; watch fewer of them, or without `recursive`.",
    ),
}
_TOO_LARGE: Final[Mapping[str, str]] = {
    "max_bytes": "The archive has more bytes than the request allows.",
    "max_entries": "The archive has more entries than the request allows.",
    "format": "A zip archive holds at most 50 000 entries; take tar.",
    "body": "The list of the entries of the zip archive is too long; take tar.",
}
_DONE_MAX: Final = 16
_SOCKETS: Final = frozenset({"port", "socket", "arrival"})


def _bad_request(ctx: CallContext, field: str) -> tuple[str, str]:
    if field in _WRONG:
        return "request.invalid", _WRONG[field]
    if field == "cwd":
        return "exec.invalid_cwd", f"The working directory {_quoted(ctx.cwd, '')} cannot be used."
    if field:
        return "request.invalid", f"The agent in the sandbox refused the field {field!r} of the request."
    return "request.invalid", "The agent in the sandbox refused the request as malformed."


_CONFLICTS: Final[Mapping[str, tuple[str, str]]] = {
    "exists": ("file.exists", "{path} exists already."),
    "is_directory": ("file.is_directory", "{path} is a directory."),
    "not_a_directory": ("file.not_a_directory", "A part of {path} is not a directory."),
    "not_empty": ("file.not_empty", "The directory {path} is not empty."),
    "not_a_regular_file": ("file.not_a_regular_file", "{path} is not a regular file."),
    "text_busy": ("file.busy", "{path} is in use by a running program."),
}

# `conflict` says too little by itself: only the first of these may go away by waiting.
_CONFLICTS_BY_ERRNO: Final[Mapping[str, tuple[str, str]]] = {
    "EBUSY": ("file.busy", "{path} is in use."),
    "ELOOP": ("request.invalid", "{path} leads through too many symbolic links."),
    "EINVAL": ("request.invalid", "The operation is not possible for {path}."),
}


def _of_process(ctx: CallContext, field: str) -> tuple[str, str] | None:
    """A conflict about something that a process has or has not."""
    name = _quoted(ctx.exec_id, "with this id")
    if field == "pty":
        what = "has no terminal" if ctx.area == "process" else "cannot be given a terminal: the sandbox has none left"
        return "process.no_terminal", f"The process {name} {what}."
    if field == "stdin" and ctx.area == "process":
        return (
            "process.no_input",
            f"The process {name} has no input that could be written to or ended: see its `stdin`.",
        )
    if ctx.area == "process":
        return "process.ended", f"The process {name} has ended."
    return None


def _conflict(ctx: CallContext, code: str, field: str, errno: str) -> tuple[str, str]:
    if (told := _of_process(ctx, field)) is not None:
        return told
    if field == "cwd":
        return "exec.invalid_cwd", f"The working directory {_quoted(ctx.cwd, '')} is not a directory."
    if ctx.area == "exec" and code == "conflict":
        return "exec.conflict", f"An exec {_quoted(ctx.exec_id, 'with this id')} exists already."
    known = _CONFLICTS_BY_ERRNO.get(errno) if code == "conflict" else _CONFLICTS.get(code)
    if known is None:
        return "guest.error", "An operation inside the sandbox failed."
    subject = ctx.to if (field == "to" or (code == "exists" and ctx.to is not None)) else ctx.path
    return known[0], known[1].format(path=_quoted(subject, "The path"))


#: About ports and Unix sockets: by status and field.
_OF_SOCKETS: Final[Mapping[tuple[int, str], tuple[str, str]]] = {
    (404, ""): (
        "not_implemented",
        "The agent in this sandbox is older than the server and knows no such sockets; make another sandbox.",
    ),
    (404, "path"): ("file.not_found", "There is no socket {path} in the sandbox, or no directory for it."),
    (404, "id"): ("port.closed", "The connection waits no more."),
    (409, "path"): ("port.in_use", "{path} exists already in the sandbox."),
    (409, "port"): ("port.in_use", "Something listens on port {port} of the sandbox already."),
    (403, "port"): (
        "file.permission_denied",
        "User {user} may not listen on port {port}; those below 1024 are for root.",
    ),
    (504, "path"): ("port.timeout", "What listens at {path} in the sandbox takes no connection."),
    (413, "path"): ("request.invalid", "A Unix socket has a path of at most 107 bytes."),
}


def _of_sockets(status: int, code: str, field: str, ctx: CallContext) -> tuple[str, str] | None:
    told = _OF_SOCKETS.get((status, field))
    if code == "not_listening":
        told = "port.closed", "{path} is no Unix socket that somebody listens on."
    if told is None:
        return None
    return told[0], told[1].format(path=_quoted(ctx.path, "It"), port=ctx.port, user=_quoted(ctx.user or "root", ""))


def _classify(status: int, code: str, field: str, errno: str, ctx: CallContext) -> tuple[str, str]:
    if ctx.area in _SOCKETS and (of_socket := _of_sockets(status, code, field, ctx)) is not None:
        return of_socket
    if ctx.area == "service" and (told := _OF_SERVICES.get((status, field))) is not None:
        return told[0], told[1].format(name=_quoted(ctx.exec_id, "of this name"))
    if code in _PLAIN and ctx.area == "file":
        known = _PLAIN[code]
        return known[0], known[1].format(path=_quoted(ctx.path, "The path"))
    if status == 409:
        return _conflict(ctx, code, field, errno)
    if status == 413:
        return _too_large(ctx, field, errno)
    if status == 504 and ctx.area == "port":
        return "port.timeout", f"What listens on port {ctx.port} of the sandbox took no connection in time."
    if status == 507:
        return "file.no_space", "The disk of the sandbox is full."
    if status == 503:
        return "guest.exhausted", "The sandbox has no process, memory or descriptor left for this."
    by_status = {400: _bad_request, 403: _denied, 404: _not_found}
    decide = by_status.get(status)
    if decide is None:
        return "guest.error", "An operation inside the sandbox failed."
    return decide(ctx, field)


def agent_error(status: int, body: object, ctx: CallContext) -> ClocheError:
    """The error of ours for an error answer of the agent. `body`: its decoded JSON, not trusted.

    `details` holds `status`, and `field` and `errno` if they are of the known forms.
    """
    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        return protocol_error(f"status {status} without an error body")
    field = body.get("field")
    field = field if isinstance(field, str) and field in _FIELDS else ""
    errno = body.get("errno")
    errno = errno if isinstance(errno, str) and _ERRNO.fullmatch(errno) else ""
    code, message = _classify(status, body["code"], field, errno, ctx)
    details: dict[str, object] = {"status": status}
    if field:
        details["field"] = field
    if errno:
        details["errno"] = errno
    if isinstance(at := body.get("at"), str):
        details["at"] = at[:4096].encode("utf-8", "replace").decode("utf-8")
    if isinstance(done := body.get("done"), dict) and len(done) <= _DONE_MAX:
        # Numbers only: how far the call has come.
        details["done"] = {k[:32]: v for k, v in done.items() if type(v) is int and k.isascii() and k.isidentifier()}
    return ClocheError(code, message, details=details)
