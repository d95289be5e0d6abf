"""Whom a kernel runs as. A user is written as for a command: name, number, `name:group` or `uid:gid`."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass

#: The highest number means "no change" to the kernel, and is no id.
_NO_ID = 2**32 - 1


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str
    shell: str


def account(wanted: str | None) -> Account:
    """None: whoever this process is. Raises `KeyError` when there is no such user or group. A number needs no entry in
    the files of the system: it then has no home, and the group 0 unless one is named."""
    user, colon, group = (wanted or str(os.getuid())).partition(":")
    found = _user(user)
    if found is None:
        uid, gid, name, home, shell = _number(user), 0, user, "/", ""
    else:
        uid, gid, name, home, shell = found.pw_uid, found.pw_gid, found.pw_name, found.pw_dir or "/", found.pw_shell
    if colon:
        gid = _group(group)
    others = {one.gr_gid for one in grp.getgrall() if name in one.gr_mem}
    return Account(uid, gid, (gid, *sorted(others - {gid})), name, home, shell or "/bin/bash")


def _user(text: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(text)
    except KeyError:
        pass
    try:
        return pwd.getpwuid(_number(text))
    except KeyError:
        if _is_number(text):
            return None
        raise


def _group(text: str) -> int:
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        return _number(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < _NO_ID


def _number(text: str) -> int:
    if not _is_number(text):
        raise KeyError(text)
    return int(text)
