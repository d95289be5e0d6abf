"""A process gives up what it does not need, for good."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from typing import Final

_PR_SET_DUMPABLE: Final = 4
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_LAST_CAPABILITY: Final = 63


def raise_open_files(most: int) -> int:
    """Allows as many open files as the system lets us, up to `most`; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = most if hard == resource.RLIM_INFINITY or os.geteuid() == 0 else min(most, hard)
    for limits in ((want, max(want, hard)), (hard, hard)):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        except (ValueError, OSError):
            continue
        return limits[0]
    return soft


def take_precedence(steps: int) -> None:
    """Is given the processor before others of the same kind (`nice`), as far as the system lets us."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -steps)


def drop(uid: int, gid: int) -> None:
    """From root to a user without any rights: no groups, no capabilities now or ever, no core dumps, not traceable by
    other processes of that user. Without root only the last two, and `uid` must be our own. Raises OSError, or
    PermissionError when something of it is left."""
    if uid == 0:
        raise PermissionError("the user to become must not be root")
    if os.geteuid() == 0:
        _empty_bounding_set()
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid):
        raise PermissionError("this process may not become another user")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _empty_bounding_set() -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            if capability == 0:
                raise
            return  # the kernel knows no more of them


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
