"""QMP without I/O: bytes in, messages out.

QMP is line-delimited JSON (QEMU, docs/interop/qmp-spec). A message is a greeting, a return, an error
or an event. The VMM is trusted less than this process, so lines are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_LINE = 4 * 1024 * 1024


class QmpProtocolError(Exception):
    """The peer does not speak QMP."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """`version` as (major, minor, micro)."""

    version: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Return:
    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    id: int | None
    kind: str
    description: str


@dataclass(frozen=True, slots=True)
class QmpEvent:
    name: str
    data: Mapping[str, Any]


Message = Greeting | Return | Failure | QmpEvent


def encode(command: str, arguments: Mapping[str, Any] | None, number: int) -> bytes:
    """One command as a line."""
    message: dict[str, Any] = {"execute": command, "id": number}
    if arguments:
        message["arguments"] = dict(arguments)
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Decoder:
    """Turns chunks of any size into messages."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises `QmpProtocolError`."""
        lines = (self._pending + data).split(b"\n")
        self._pending = lines.pop()
        if len(self._pending) > MAX_LINE:
            raise QmpProtocolError("a line is longer than 4 MiB")
        return [_decode(line) for line in lines if line.strip()]


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError:
        raise QmpProtocolError("a line is not JSON") from None
    if not isinstance(message, dict):
        raise QmpProtocolError("a message is not an object")
    try:
        if "QMP" in message:
            version = message["QMP"]["version"]["qemu"]
            return Greeting((int(version["major"]), int(version["minor"]), int(version["micro"])))
        if "event" in message:
            return QmpEvent(str(message["event"]), dict(message.get("data") or {}))
        if "error" in message:
            error = message["error"]
            number = message.get("id")
            return Failure(number if isinstance(number, int) else None, str(error["class"]), str(error["desc"]))
        if "return" in message:
            return Return(int(message["id"]), message["return"])
    except (KeyError, TypeError, ValueError):
        raise QmpProtocolError("a message lacks a part") from None
    raise QmpProtocolError("a message of an unknown kind")
