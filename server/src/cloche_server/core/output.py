"""Keeping the output of a command within bounds: head and tail survive, the middle is counted.

Pure: bytes in, text out. The agent cuts already; this is the host's own bound, because the agent's word
is the guest's word.
"""

from __future__ import annotations

import base64
import codecs
from collections import deque
from dataclasses import dataclass

_SEAM = "\n[cloche: truncated, {dropped} bytes dropped]\n"


@dataclass(frozen=True, slots=True)
class CollectedOutput:
    """`text` as UTF-8 with U+FFFD for what is not, or base64; `head_bytes` tells where the gap is."""

    text: str
    dropped: int
    head_bytes: int | None


class OutputCollector:
    """Collects one stream up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._gap = 0
        self._cut = False

    def add(self, data: bytes) -> None:
        if not self._cut:
            if len(self._head) + len(data) <= self._limit:
                self._head += data
                return
            self._head += data
            self._cut = True
            rest = bytes(self._head[self._limit // 2 :])
            del self._head[self._limit // 2 :]
            self._add_tail(rest)
            return
        self._add_tail(data)

    def gap(self, count: int) -> None:
        """`count` bytes were dropped at this place by the sender."""
        if not self._cut:
            self._cut = True
            rest = bytes(self._head[self._limit // 2 :])
            del self._head[self._limit // 2 :]
            if rest:
                self._add_tail(rest)
        if self._tail_size:
            # What was kept as a tail is now in the middle.
            self._gap += self._tail_size
            self._tail.clear()
            self._tail_size = 0
        self._gap += count

    def _add_tail(self, data: bytes) -> None:
        keep = self._limit - self._limit // 2
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size > keep:
            excess = self._tail_size - keep
            first = self._tail[0]
            if len(first) <= excess:
                self._tail.popleft()
                self._tail_size -= len(first)
                self._gap += len(first)
            else:
                self._tail[0] = first[excess:]
                self._tail_size -= excess
                self._gap += excess

    @property
    def kept(self) -> int:
        """Bytes that are here."""
        return len(self._head) + self._tail_size

    @property
    def dropped(self) -> int:
        return self._gap

    def collect(self, encoding: str) -> CollectedOutput:
        """The result in `utf-8` or `base64`."""
        tail = b"".join(self._tail)
        if self._gap == 0:
            return CollectedOutput(_encode(bytes(self._head) + tail, encoding), 0, None)
        if encoding == "base64":
            text = base64.b64encode(bytes(self._head) + tail).decode("ascii")
            return CollectedOutput(text, self._gap, len(self._head))
        head, lost_head = _trim_end(bytes(self._head))
        tail, lost_tail = _trim_start(tail)
        dropped = self._gap + lost_head + lost_tail
        text = head.decode("utf-8", "replace") + _SEAM.format(dropped=dropped) + tail.decode("utf-8", "replace")
        return CollectedOutput(text, dropped, len(head))


def _encode(data: bytes, encoding: str) -> str:
    if encoding == "base64":
        return base64.b64encode(data).decode("ascii")
    return data.decode("utf-8", "replace")


def _trim_end(data: bytes) -> tuple[bytes, int]:
    """Without a character that was cut at the end; and how many bytes that took."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 1 if byte < 0x80 else 2 if byte >> 5 == 6 else 3 if byte >> 4 == 14 else 4 if byte >> 3 == 30 else 1
        return (data[:-back], back) if need > back else (data, 0)
    return data, 0


def _trim_start(data: bytes) -> tuple[bytes, int]:
    """Without the rest of a character that was cut at the start."""
    count = 0
    while count < min(3, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return data[count:], count


class ChunkDecoder:
    """Turns chunks of bytes into chunks of text without ever cutting a character; or into base64."""

    def __init__(self, encoding: str) -> None:
        self._decoder = None if encoding == "base64" else codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        if self._decoder is None:
            return base64.b64encode(data).decode("ascii")
        return self._decoder.decode(data)

    @property
    def pending(self) -> int:
        """Bytes of a character that is not complete yet."""
        return 0 if self._decoder is None else len(self._decoder.getstate()[0])

    def finish(self) -> str:
        return "" if self._decoder is None else self._decoder.decode(b"", True)
