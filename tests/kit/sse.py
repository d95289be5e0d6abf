"""A strict parser of server-sent events: LF only, and every line must be of a known kind."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """One event, or a comment (`name` is empty then). `at` is when its last byte was seen."""

    name: str
    data: dict[str, Any]
    id: str | None = None
    comment: str = ""
    at: float = field(default_factory=time.monotonic)

    @property
    def is_output(self) -> bool:
        return self.name in {"stdout", "stderr"}

    @property
    def raw(self) -> bytes:
        """The bytes of an output event."""
        chunk = str(self.data["chunk"])
        return base64.b64decode(chunk) if self.data.get("encoding") == "base64" else chunk.encode()


class Parser:
    """Feed it bytes as they come; it returns what has become complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        assert b"\r" not in data, "the stream must use LF only"
        blocks = (self._rest + data).split(b"\n\n")
        self._rest = blocks.pop()
        return [_event(block) for block in blocks]

    def finish(self) -> None:
        assert not self._rest, f"the stream ended in mid-event: {self._rest[:100]!r}"


def _event(block: bytes) -> Event:
    assert block.isascii(), f"events are ASCII JSON, this one is not: {block[:100]!r}"
    fields: dict[str, str] = {}
    for line in block.decode("ascii").split("\n"):
        name, colon, value = line.partition(": ")
        assert colon, f"no field: {line[:100]!r}"
        assert name in {"", "id", "event", "data"}, f"an unknown field: {line[:100]!r}"
        assert name not in fields, f"a field comes twice: {block[:200]!r}"
        fields[name] = value
    if "" in fields:
        assert len(fields) == 1, f"a comment within an event: {block[:200]!r}"
        return Event("", {}, comment=fields[""])
    return Event(fields["event"], json.loads(fields["data"]), fields.get("id"))


def parse(chunks: Iterable[bytes]) -> Iterator[Event]:
    """The events of a stream; fails when it ends within one."""
    parser = Parser()
    for chunk in chunks:
        yield from parser.feed(chunk)
    parser.finish()


@dataclass(frozen=True)
class Outcome:
    """A whole stream, summed up."""

    events: list[Event]

    @property
    def stdout(self) -> bytes:
        return b"".join(e.raw for e in self.events if e.name == "stdout")

    @property
    def stderr(self) -> bytes:
        return b"".join(e.raw for e in self.events if e.name == "stderr")

    @property
    def comments(self) -> list[Event]:
        return [e for e in self.events if not e.name]

    @property
    def gaps(self) -> int:
        return sum(int(e.data["bytes"]) for e in self.events if e.name == "gap")

    @property
    def end(self) -> Event:
        """The terminal event; fails unless there is exactly one and nothing after it."""
        ends = [e for e in self.events if e.name in {"exit", "error"}]
        assert len(ends) == 1, f"exactly one terminal event must come, there are {[e.name for e in ends]}"
        assert self.events[-1] is ends[0], "nothing may follow the terminal event"
        return ends[0]

    @property
    def exit_code(self) -> int:
        assert self.end.name == "exit", f"the stream ended in an error: {self.end.data}"
        return int(self.end.data["exit_code"])


def collect(chunks: Iterable[bytes]) -> Outcome:
    return Outcome(list(parse(chunks)))
