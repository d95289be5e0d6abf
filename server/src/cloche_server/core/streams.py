"""A connection as two streams of bytes, whatever carries it."""

from __future__ import annotations

from typing import Protocol


class ByteStream(Protocol):
    """One reader and one writer at a time. `ConnectionError` is raised by what is cut; an orderly end is none."""

    async def read(self) -> bytes:
        """The next bytes; empty once the other side has said that it will send no more."""

    async def write(self, data: bytes) -> None:
        """Sends, and waits while the other side is slow."""

    async def write_eof(self) -> None:
        """There is no more to send; the other side may go on sending."""

    def close(self) -> None:
        """Ends it at once, in order when both directions have ended, and cut otherwise. May be called twice."""


class LastingStream(ByteStream, Protocol):
    """One that is kept for what comes later."""

    @property
    def is_quiet(self) -> bool:
        """Nothing has come that was not read, not even an end: it may be written to."""
