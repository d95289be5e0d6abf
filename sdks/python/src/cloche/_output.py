"""Output that is gathered from a stream, within a limit: head and tail are kept, as the server does it."""

from __future__ import annotations

LIMIT = 10 * 1024 * 1024
SLACK = 1024 * 1024


class Collector:
    """One stream of a command. Memory is bounded by `limit`, whatever comes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0
        self._missed = 0

    def add(self, text: str) -> None:
        """Take what came next."""
        data = text.encode("utf-8", "replace")
        self._size += len(data)
        room = max(0, self._half - len(self._head))
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > self._limit + SLACK:
            del self._tail[: -(self._limit - self._half)]

    def miss(self, count: int) -> None:
        """Bytes that the server has left out at this point, and said so."""
        self._missed += count
        self.add(marker(count))

    @property
    def dropped(self) -> int:
        """How many bytes are not in `text`."""
        return self._missed + (self._size - self._limit if self._size > self._limit else 0)

    def text(self) -> str:
        """What was kept; a line says what was not."""
        if self._size <= self._limit:
            return bytes(self._head + self._tail).decode("utf-8", "replace")
        head = bytes(self._head).decode("utf-8", "replace")
        tail = bytes(self._tail[-(self._limit - self._half) :]).decode("utf-8", "replace")
        return head + marker(self._size - self._limit) + tail


def marker(count: int) -> str:
    """The line between head and tail."""
    return f"\n[cloche: truncated, {count} bytes dropped]\n"
