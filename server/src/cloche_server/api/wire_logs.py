"""Answers and events of logs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

CURSOR = "Where to go on: send it as `from`, or as `Last-Event-ID`. Opaque; an offset in bytes begins it."
StreamName = Literal["console", "stdout", "stderr"]


class LogEntry(BaseModel):
    line: str
    stream: StreamName


class LogsAnswer(BaseModel):
    source: str
    lines: list[LogEntry]
    gap_bytes: int = Field(description="So much was not kept and is missing.")
    restarted: bool = Field(
        description="The place that was asked for is in another log: that of a machine before its last start, or of "
        "another moment. It is read from its beginning; how much is missing is not known."
    )
    next: str = Field(description=CURSOR)
    more: bool = Field(description="There is more already: ask again at once.")
    final: bool = Field(description="Nothing will follow.")


class LineEvent(BaseModel):
    """`line`: one line, or a piece of one that is longer than 64 KiB. Its `id` is where to go on."""

    line: str
    stream: Literal["stdout", "stderr"] | None = Field(None, description="Absent for a console, which has one.")


class LogGapEvent(BaseModel):
    """`gap`: something is missing here."""

    bytes: int = Field(description="So much was not kept; 0 with `restarted`, where that is not known.")
    restarted: bool = Field(
        description="What follows is another log than the one the reader knows, from its beginning."
    )


class LogEndEvent(BaseModel):
    """`end`: the process or the sandbox has ended, or the service was removed."""

    next: str = Field(description=CURSOR)
