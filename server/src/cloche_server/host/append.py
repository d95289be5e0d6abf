"""A log of lines that is only ever appended to, in parts of bounded size: `x.log`, then `x.log.1`, older and older.

Everything here blocks; only one thread at a time may use one log.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_BLOCK: Final = 64 * 1024


class AppendLog:
    """`parts` files of at most `part_bytes` each, for root's eyes only. What is appended is whole lines."""

    def __init__(self, path: Path, part_bytes: int, parts: int) -> None:
        self._path = path
        self._part_bytes = part_bytes
        self._parts = parts
        self._fd: int | None = None
        self._size = 0

    def append(self, data: bytes) -> None:
        """Adds whole lines. Raises OSError, and then nothing was added: of what was written half nothing stays."""
        fd = self._open()
        if self._size and self._size + len(data) > self._part_bytes:
            self._rotate()
            fd = self._open()
        written = 0
        try:
            while written < len(data):
                written += os.write(fd, data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._size)
            raise
        self._size += written

    def newest_first(self) -> Iterator[bytes]:
        """All lines that are there now, without their ends. A part that is rotated away meanwhile is left out."""
        for path in self._files():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                yield from _backwards(file.fileno(), os.fstat(file.fileno()).st_size)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _files(self) -> list[Path]:
        return [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._parts))]

    def _open(self) -> int:
        if self._fd is None:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self._path, flags, 0o600)
            try:
                os.fchmod(fd, 0o600)
                self._size = os.fstat(fd).st_size
                if self._size and os.pread(fd, 1, self._size - 1) != b"\n":
                    self._size += os.write(fd, b"\n")  # the host went down in the middle of a line
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd
        return self._fd

    def _rotate(self) -> None:
        self.close()
        files = self._files()
        for newer, older in reversed(list(itertools.pairwise(files))):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if len(files) == 1:
            self._path.unlink()


def _backwards(fd: int, end: int) -> Iterator[bytes]:
    rest = b""
    while end > 0:
        begin = max(0, end - _BLOCK)
        lines = (os.pread(fd, end - begin, begin) + rest).split(b"\n")
        rest, end = lines[0], begin
        yield from (line for line in reversed(lines[1:]) if line)
    if rest:
        yield rest
