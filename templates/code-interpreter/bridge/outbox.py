"""What one connection is still to be sent: bounded, in order, and text of one stream in pieces that are worth sending.

A frame is 4 bytes of length, big endian, and so many bytes of ASCII JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from typing import Any

#: Text of one frame, and of all MIME types of one result (characters).
MAX_TEXT = 32 * 1024
MAX_RESULT = 8 * 1024 * 1024
#: Bytes that wait. Above the first a kernel is stopped, below the second it goes on; what would go above the third is
#: left out, and that is told.
STOP, GO, MOST = 4 << 20, 1 << 20, 48 << 20
MAX_REQUEST = 32 * 1024 * 1024
#: Bytes of one piece, and those that a connection is given before it has sent others.
ENOUGH = 64 * 1024
#: For what is likely to come soon (seconds).
WAIT = 0.1


def encode(data: dict[str, Any]) -> bytes:
    body = json.dumps(data, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises `ValueError` for what is no frame, `IncompleteReadError` at the end."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_REQUEST:
        raise ValueError("a request that is too long")
    data = json.loads(await reader.readexactly(size))
    if not isinstance(data, dict):
        raise ValueError("a request is an object")  # noqa: TRY004 - as any other request that is none
    return data


class Outbox:
    """`pressure(True)` when the reader is too slow, `pressure(False)` when it has caught up.

    What comes at once goes at once, in one piece: whoever carries it on is woken for each."""

    def __init__(self, writer: asyncio.StreamWriter, broken: Callable[[], None]) -> None:
        """`broken` is called when the connection turns out to be."""
        self.pressure: Callable[[bool], None] | None = None
        self.closed = False
        self._writer = writer
        self._broken = broken
        self._frames: deque[bytes] = deque()
        self._text: list[str] = []
        self._stream = ""
        self._size = 0
        self._dropped: dict[str, int] = {}
        self._full = False
        self._ended = False
        self._soon: asyncio.Handle | None = None
        self._waiting: asyncio.TimerHandle | None = None
        #: While the connection takes no more.
        self._draining: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ in

    def text(self, stream: str, text: str) -> None:
        if not text or self.closed:
            return
        if self._size >= MOST:
            self._drop(stream, len(text.encode("utf-8", "replace")))
            return
        if stream != self._stream:
            self._cut()
            self._stream = stream
        self._tell_dropped()
        for start in range(0, len(text), MAX_TEXT):
            piece = text[start : start + MAX_TEXT]
            self._text.append(piece)
            self._grow(len(piece))
        self._go()

    def result(self, data: dict[str, str], main: bool) -> None:
        """Of a result that is too large the largest parts are left out, and told with their sizes."""
        dropped: dict[str, int] = {}
        while sum(len(value) for value in data.values()) > MAX_RESULT:
            largest = max(data, key=lambda mime: len(data[mime]))
            dropped[largest] = len(data.pop(largest))
        if self._size >= MOST:
            self._drop("result", 1)
            return
        self.event({"type": "result", "main": main, "data": data, "dropped": dropped}, waits=main)

    def event(self, data: dict[str, Any], *, waits: bool = False) -> None:
        """`waits`: for what is likely to come soon, at most `WAIT`."""
        if self.closed or self._ended:  # a beat behind the last one would be taken for the answer to what comes next
            return
        self._cut()
        self._tell_dropped()
        self._append(encode(data))
        self._go(waits)

    def end(self, data: dict[str, Any]) -> None:
        """The last one, which goes with `sent`."""
        self.event(data, waits=True)
        self._ended = True

    def _append(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._grow(len(frame))

    def _cut(self) -> None:
        if self._text:
            text, self._text = "".join(self._text), []
            self._size -= len(text)
            for start in range(0, len(text), MAX_TEXT):
                self._append(encode({"type": self._stream, "text": text[start : start + MAX_TEXT]}))
        self._stream = ""

    def _drop(self, what: str, count: int) -> None:
        self._dropped[what] = self._dropped.get(what, 0) + count

    def _tell_dropped(self) -> None:
        dropped, self._dropped = self._dropped, {}
        for what, count in dropped.items():
            self._append(encode({"type": "gap", "stream": what, "count": count}))

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > STOP and not self._full:
            self._full = True
            if self.pressure is not None:
                self.pressure(True)

    # ------------------------------------------------------------ out

    def _go(self, waits: bool = False) -> None:
        if self._soon is not None or self._draining is not None:
            return
        loop = asyncio.get_running_loop()
        if not waits:
            self._soon = loop.call_soon(self._send)
        elif self._waiting is None:
            self._waiting = loop.call_later(WAIT, self._send)

    def _send(self) -> None:
        self._stop()
        if self._draining is not None or self.closed:
            return
        self._write()
        if self._size:
            self._draining = asyncio.create_task(self._drain())

    def _write(self) -> None:
        """All that the connection takes now."""
        transport = self._writer.transport
        while transport.get_write_buffer_size() <= ENOUGH and not transport.is_closing():
            if not self._frames:
                self._cut()
            if not self._frames:
                return
            piece = [self._frames.popleft()]
            size = len(piece[0])
            while self._frames and size + len(self._frames[0]) <= ENOUGH:
                piece.append(self._frames.popleft())
                size += len(piece[-1])
            self._writer.write(b"".join(piece))
            self._size -= size
            if self._size < GO:
                self._relieve()

    def _relieve(self) -> None:
        if self._full:
            self._full = False
            if self.pressure is not None:
                self.pressure(False)

    async def _drain(self) -> None:
        try:
            while self._size and not self.closed:
                await self._writer.drain()
                self._write()
        except OSError:
            self.close()
            self._broken()
        finally:
            self._draining = None

    async def sent(self) -> None:
        """When all has gone, or nobody reads any more."""
        self._send()
        if self._draining is not None:
            await asyncio.wait({self._draining})

    def _stop(self) -> None:
        for one in (self._soon, self._waiting):
            if one is not None:
                one.cancel()
        self._soon = self._waiting = None

    def close(self) -> None:
        """Nobody reads any more."""
        self.closed = True
        self._stop()
        if self._draining is not None:
            self._draining.cancel()
        self._frames.clear()
        self._text.clear()
        self._size = 0
        self._relieve()
