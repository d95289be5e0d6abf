"""Logs of sandboxes: where a reader is in one, and lines of bytes that come in pieces. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cloche_server.core.errors import ClocheError

#: A longer line is told in pieces (bytes).
LINE_MAX: Final = 64 * 1024
#: So many bytes before a place in a file tell whether it is still the same file.
CONTEXT: Final = 64
_CURSOR: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9a-z]{1,32}))?", re.ASCII)
_SOURCE: Final = re.compile(r"console|agent|(?:process|service):[a-z0-9-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a log: an offset in bytes, and a `mark` of the log that it is in. None: whichever it is."""

    offset: int
    mark: str | None = None

    def __str__(self) -> str:
        return f"{self.offset}" if self.mark is None else f"{self.offset}.{self.mark}"


def parse_cursor(text: str) -> Cursor | None:
    """None for what is no cursor."""
    found = _CURSOR.fullmatch(text)
    return None if found is None else Cursor(int(found[1]), found[2])


def check_source(source: str) -> tuple[str, str]:
    """`console`, `agent`, `process:<id>` or `service:<name>`, in two parts. Raises `request.invalid`."""
    if _SOURCE.fullmatch(source) is None:
        raise ClocheError(
            "request.invalid",
            "source must be console, agent, process:<id> or service:<name>",
            details={"field": "source"},
        )
    kind, _, name = source.partition(":")
    return kind, name


def mark_of(before: bytes) -> str:
    """The mark of a place in a file, from what stands before it."""
    return f"{zlib.crc32(before[-CONTEXT:]):08x}"


@dataclass(frozen=True, slots=True)
class LogLine:
    """`whole`: it has an end; else it is a piece of a line, or the end has not been written yet. `next` is where a
    reader who has seen it goes on; None where nothing but a repetition would be exact."""

    text: str
    stream: str
    next: Cursor | None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class LogGap:
    """Something is missing here: so many bytes that are not kept any more; or (`restarted`) it is another log than the
    one that the reader knows, and how much of that is missing nobody knows."""

    bytes: int
    next: Cursor | None
    restarted: bool = False


@dataclass(frozen=True, slots=True)
class LogEnd:
    """All that there is now, or (`final`) that will ever be."""

    next: Cursor
    final: bool


LogItem = LogLine | LogGap | LogEnd


class LineBuffer:
    """Cuts the bytes of one stream into lines."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bool, int]]:
        """Lines without their ends, whether each has one, and how many bytes of `data` come behind it."""
        rest = self.pending + data
        self.pending = b""
        # Nothing is copied for a line but the line: a guest may send a mebibyte of nothing but ends of lines.
        begin = 0
        while True:
            cut = rest.find(b"\n", begin, begin + LINE_MAX + 1)
            if cut >= 0:
                line, begin = rest[begin:cut], cut + 1
                yield line, True, len(rest) - begin
            elif len(rest) - begin > LINE_MAX:
                line, begin = rest[begin : begin + LINE_MAX], begin + LINE_MAX
                yield line, False, len(rest) - begin
            else:
                self.pending = rest[begin:]
                return

    def flush(self) -> bytes:
        rest, self.pending = self.pending, b""
        return rest


def line_text(line: bytes) -> str:
    """A line for people, without the CR of a terminal."""
    return line.removesuffix(b"\r").decode("utf-8", "replace")
