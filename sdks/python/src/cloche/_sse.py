"""A server-sent events parser: bytes in, messages out, no I/O.

Lines are split at LF (a CR before it is dropped) and nowhere else, on bytes, before anything is decoded:
neither U+2028 in the data nor a character cut in two by the network can damage a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .errors import ProtocolError

MAX_MESSAGE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Message:
    """One event of the stream."""

    event: str
    data: str
    id: str


class Parser:
    """Feed it what comes from the network; it yields each message that is complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._size = 0
        self._event = ""
        self._data: list[bytes] = []
        self._last_id = ""

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """Add bytes and yield the messages they complete."""
        self._buffer += chunk
        while (end := self._buffer.find(b"\n", self._scanned)) >= 0:
            line = bytes(self._buffer[:end]).removesuffix(b"\r")
            del self._buffer[: end + 1]
            self._scanned = 0
            message = self._line(line)
            if message is not None:
                yield message
        self._scanned = len(self._buffer)
        if self._scanned + self._size > MAX_MESSAGE:
            raise ProtocolError(f"an event of the stream is larger than {MAX_MESSAGE} bytes")

    def _line(self, line: bytes) -> Message | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._last_id = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> Message | None:
        event, data = self._event or "message", self._data
        self._event, self._data, self._size = "", [], 0
        if not data:
            return None
        return Message(event, b"\n".join(data).decode("utf-8", "replace"), self._last_id)
