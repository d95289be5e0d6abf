"""qcow2 files over other files: what their front says, and what we have written down about it ourselves.

A machine may write to every byte of its top layer, the name of the file below included. So that name is also kept in
an extended attribute, which only a privileged process can set, and one that has changed since is not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MAGIC: Final = b"QFI\xfb"
#: Magic, version, offset and length of the backing name, cluster bits, size, encryption, entries of the L1 table.
HEADER: Final = struct.Struct(">4sIQIIQII")
NAME_MAX: Final = 1023
_ATTRIBUTE: Final = "trusted.cloche.below"
#: A layer beside it, the disk of a template, or a root image: nothing else is ever below.
_BELOW: Final = re.compile(
    r"[a-z0-9]{1,64}\.qcow2"
    r"|\.\./templates/[A-Za-z0-9_.-]{1,200}/disk\.qcow2"
    r"|\.\./\.\./images/[A-Za-z0-9_.-]{1,200}/[A-Za-z0-9_.-]{1,200}"
    r"|\.\./\.\./boot/[0-9a-f]{64}"  # of a template that was imported
)


@dataclass(frozen=True, slots=True)
class Header:
    """What the front of a qcow2 file says. `backing`: the name of the file below, as written; `size` in bytes."""

    backing: str
    size: int
    cluster_bits: int
    name_offset: int


def read_header(path: Path) -> Header:
    """Raises OSError, or ValueError for what is not a qcow2 file over another one."""
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
        if len(raw) < HEADER.size:
            raise ValueError("too short")
        magic, _, offset, length, bits, size, _, _ = HEADER.unpack(raw)
        if magic != _MAGIC or not 9 <= bits <= 21 or not 0 < length <= NAME_MAX or not 0 < offset < 1 << bits:
            raise ValueError("not a qcow2 overlay")
        file.seek(offset)
        name = file.read(length)
    if len(name) != length:
        raise ValueError("cut short")
    return Header(name.decode("utf-8"), size, bits, offset)


def record_below(path: Path, name: str) -> None:
    """Writes down what a file lies over. Where the file system or the host has no such attributes the front alone is
    asked, and only names that our own files have are followed."""
    with contextlib.suppress(OSError):
        os.setxattr(path, _ATTRIBUTE, name.encode())


def recorded_below(path: Path) -> str | None:
    """What was written down; None when nothing was. Raises OSError."""
    try:
        return os.getxattr(path, _ATTRIBUTE).decode()
    except OSError as error:
        if error.errno in {errno.ENODATA, errno.ENOTSUP, errno.EPERM}:
            return None
        raise


def below(path: Path) -> str:
    """The name of the file below, which was not changed by whoever writes to the file. Raises OSError, ValueError."""
    written = read_header(path).backing
    recorded = recorded_below(path)
    if recorded is not None and recorded != written:
        raise ValueError("the name of the file below has been changed")
    if not _BELOW.fullmatch(written):
        raise ValueError("it lies over a file that is none of ours")
    return written


def chain(top: Path) -> list[Path]:
    """A disk and all files below it, top first; the last may be a raw image. Raises OSError, ValueError."""
    found = [top]
    while found[-1].suffix == ".qcow2":
        following = Path(os.path.normpath(found[-1].parent / below(found[-1])))
        if following in found:
            raise ValueError("it lies over itself")
        found.append(following)
    return found
