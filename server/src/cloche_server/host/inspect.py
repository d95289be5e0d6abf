"""What another process is and holds, as the kernel tells it; and what a stranger could open.

All functions block for moments, and raise OSError when the process has gone.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SYS_SETFSUID: Final = 122
_SYS_SETFSGID: Final = 123
_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MountPoint:
    """`path` as the process sees it; `options` of the mount itself."""

    path: str
    options: frozenset[str]
    kind: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """`target` as the kernel names it; `writes`: it is open for writing."""

    target: str
    writes: bool


def status(pid: int) -> Mapping[str, str]:
    """The fields of `/proc/PID/status`."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def namespace(pid: int | str, kind: str) -> int:
    """The number of a namespace; `pid` may be `self`."""
    return Path(f"/proc/{pid}/ns/{kind}").stat().st_ino


def mounts(pid: int) -> list[MountPoint]:
    found = []
    for line in Path(f"/proc/{pid}/mountinfo").read_text("utf-8", "replace").splitlines():
        fields = line.split(" ")
        path = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[4])
        kind = fields[fields.index("-") + 1]
        found.append(MountPoint(path, frozenset(fields[5].split(",")), kind))
    return found


def descriptors(pid: int) -> list[Descriptor]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
            info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
        except FileNotFoundError:
            continue  # closed meanwhile
        flags = int(info.split("flags:")[1].split()[0], 8)
        found.append(Descriptor(target, flags & os.O_ACCMODE != os.O_RDONLY))
    return found


def mapped(pid: int, path: str) -> list[str]:
    """How a process has mapped a file: the permissions of each part."""
    lines = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines()
    return [line.split(None, 5)[1] for line in lines if line.split(None, 5)[5:] == [path]]


def hard_limits(pid: int) -> Mapping[str, str]:
    """By the names of `/proc/PID/limits`."""
    found = {}
    for line in Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]:
        parts = re.split(r"\s{2,}", line.strip())
        found[parts[0]] = parts[2]
    return found


def walk_root(pid: int, beyond: frozenset[str]) -> Iterator[str]:
    """Every path in the root of a process, but not what lies below those in `beyond`."""
    root = f"/proc/{pid}/root"
    waiting = [""]
    while waiting:
        place = waiting.pop()
        with os.scandir(f"{root}{place}/") as entries:
            for entry in entries:
                path = f"{place}/{entry.name}"
                yield path
                if entry.is_dir(follow_symlinks=False) and path not in beyond:
                    waiting.append(path)


def as_user(uid: int, attempt: Callable[[], None]) -> OSError | None:
    """Runs `attempt` with the file rights of another user, on this thread only; what it was refused with. None: it was
    not refused. Only for a thread of its own: the kernel keeps these rights per thread."""
    before = _set_rights(uid)
    try:
        attempt()
    except OSError as error:
        return error
    finally:
        _set_rights(before)
    return None


def _set_rights(uid: int) -> int:
    _libc.syscall(ctypes.c_long(_SYS_SETFSGID), ctypes.c_long(uid))
    return int(_libc.syscall(ctypes.c_long(_SYS_SETFSUID), ctypes.c_long(uid)))


def reach(path: Path) -> None:
    """Opens a file, lists a directory, connects to a socket. Raises OSError."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))
    elif path.is_dir():
        os.listdir(path)  # noqa: PTH208 - it has to fail as a whole
    else:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def reach_inode(path: Path) -> Callable[[], None]:
    """An attempt to open a file that does not need the directories above it. Raises OSError."""
    held = os.open(path, os.O_PATH | os.O_CLOEXEC)

    def attempt() -> None:
        try:
            os.close(os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC))
        finally:
            os.close(held)

    return attempt
