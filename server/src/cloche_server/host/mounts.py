"""Files as mounts of their own: made here, where their paths mean something, and put into another root elsewhere."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Final

_SYS_OPEN_TREE: Final = 428
_SYS_MOUNT_SETATTR: Final = 442
_OPEN_TREE_CLONE: Final = 1
_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
#: struct mount_attr: set, clear, propagation, user namespace.
_ATTR: Final = struct.Struct("=4Q")

_libc: Final = ctypes.CDLL(None, use_errno=True)


def detached(path: Path, *, writable: bool = False) -> int:
    """A descriptor of a mount of this one file that is nowhere yet: no set-uid, no devices, no programs, and unless
    `writable` read-only. Raises OSError."""
    long = ctypes.c_long
    name = os.fsencode(path)
    fd = int(_libc.syscall(long(_SYS_OPEN_TREE), long(_AT_FDCWD), name, long(_OPEN_TREE_CLONE | os.O_CLOEXEC)))
    if fd < 0:
        raise _error(path)
    flags = _NOSUID | _NODEV | _NOEXEC | (0 if writable else _RDONLY)
    attributes = _ATTR.pack(flags, 0, 0, 0)
    set_to = (long(_SYS_MOUNT_SETATTR), long(fd), b"", long(_AT_EMPTY_PATH), attributes, long(_ATTR.size))
    if _libc.syscall(*set_to) < 0:
        error = _error(path)
        os.close(fd)
        raise error
    return fd


def _error(path: Path) -> OSError:
    number = ctypes.get_errno() or errno.EIO
    return OSError(number, os.strerror(number), os.fspath(path))
