"""A writer for the "newc" cpio archives that the kernel unpacks as its initramfs.

Deterministic: the same entries give the same bytes. No time, owner or inode of the host gets in.
"""

from __future__ import annotations

import stat
from typing import BinaryIO, Final

_TRAILER: Final = "TRAILER!!!"
_BLOCK: Final = 512


class CpioWriter:
    """Writes entries one after another. Directories must come before what is in them."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._position = 0
        self._inode = 0

    def directory(self, name: str, mode: int = 0o755) -> None:
        self._entry(name, stat.S_IFDIR | mode, b"", links=2)

    def file(self, name: str, content: bytes, mode: int = 0o644) -> None:
        self._entry(name, stat.S_IFREG | mode, content)

    def symlink(self, name: str, target: str) -> None:
        self._entry(name, stat.S_IFLNK | 0o777, target.encode())

    def char_device(self, name: str, major: int, minor: int, mode: int = 0o600) -> None:
        self._entry(name, stat.S_IFCHR | mode, b"", device=(major, minor))

    def close(self) -> None:
        """Write the end mark and fill up the last block. The stream itself stays open."""
        self._inode = -1  # the end mark has inode 0
        self._entry(_TRAILER, 0, b"")
        self._write(bytes(-self._position % _BLOCK))

    def _entry(self, name: str, mode: int, content: bytes, *, links: int = 1, device: tuple[int, int] = (0, 0)) -> None:
        self._inode += 1
        path = name.lstrip("/").encode() + b"\0"
        fields = (
            self._inode,
            mode,
            0,  # uid
            0,  # gid
            links,
            0,  # mtime
            len(content),
            0,  # major and minor number of the device that holds the file
            0,
            *device,
            len(path),
            0,  # checksum, unused in this format
        )
        self._write(b"070701" + b"".join(b"%08X" % field for field in fields) + path)
        self._write(bytes(-self._position % 4))
        self._write(content)
        self._write(bytes(-self._position % 4))

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._position += len(data)
