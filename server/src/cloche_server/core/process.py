"""Processes: what may be started, and what is remembered of it inside the sandbox. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

#: Columns and rows of a terminal.
SIZE_MAX: Final = 1000
RECORD_KB: Final = 1024
RECORD_KB_MAX: Final = 16 * 1024
NAME_MAX: Final = 128
COMMAND_MAX: Final = 400
#: Limits of the kernel that a process may be given.
RLIMITS: Final = ("as", "core", "cpu", "data", "fsize", "memlock", "nofile", "nproc", "stack")


@dataclass(frozen=True, slots=True)
class Size:
    """Of a terminal, in characters."""

    cols: int
    rows: int


@dataclass(frozen=True, slots=True)
class ProcessWish:
    """A process to start. `shell`: for the login shell; `argv`: without one; with a terminal neither means the login
    shell itself. `timeout` and `linger` (without a reader) in seconds, None = none. `record_kb`: output that is kept.
    """

    shell: str | None = None
    argv: Sequence[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    pipe: bool = False
    pty: Size | None = None
    timeout: float | None = None
    linger: float | None = None
    rlimits: Mapping[str, int] = field(default_factory=dict)
    name: str | None = None
    record_kb: int = RECORD_KB


@dataclass(frozen=True, slots=True)
class Tag:
    """What the agent keeps with a process and tells again. It comes back from the guest, so it is only shown."""

    command: str = ""
    name: str | None = None
    digest: str = ""


def command_text(shell: str | None, argv: Sequence[str] | None) -> str:
    """The command as it is shown, cut."""
    text = shell if shell is not None else " ".join(argv or ())
    return text[:COMMAND_MAX]


def tag_text(shell: str | None, argv: Sequence[str] | None, name: str | None = None, digest: str = "") -> str:
    """At most 2048 bytes: characters are escaped, so what is shown of a command may be shorter."""
    command = command_text(shell, argv)
    while True:
        found = {"c": command, "n": name, "k": digest}
        text = json.dumps({k: v for k, v in found.items() if v}, separators=(",", ":"))
        if len(text) <= 2048:
            return text
        command = command[: len(command) // 2]


def parse_tag(text: str) -> Tag:
    """Whatever it is: text that is no tag of ours is an empty one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return Tag()
    if not isinstance(found, dict):
        return Tag()
    command, name, digest = (_clean(found.get(key)) for key in ("c", "n", "k"))
    return Tag(command[:COMMAND_MAX], name[:NAME_MAX] or None, digest[:64])


def _clean(value: object) -> str:
    if not isinstance(value, str):
        return ""
    return value.encode("utf-8", "replace").decode("utf-8")


def id_of_key(sandbox_id: str, key: str) -> str:
    """The id of the process that was started with an `Idempotency-Key`."""
    return "p" + hashlib.sha256(f"{sandbox_id}\0{key}".encode()).hexdigest()[:20]
