"""The jails and control groups of a data directory, looked at from outside."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from cloche_server.host import cgroups, uids
from cloche_server.host.uids import UidBlock
from cloche_server.settings import Settings
from kit import procs


def block(data: Path) -> UidBlock:
    """The user ids of a data directory, from the list of this host."""
    blocks = json.loads((uids.RUN / "blocks.json").read_text())
    first = blocks[str(data.resolve())]
    return UidBlock(first, Settings().uid_base)


def groups(data: Path) -> set[str]:
    """Names of the control groups of its machines, of all controllers."""
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError, KeyError):
        name = block(data).name
        for root in set(cgroups.probe().roots.values()):
            with contextlib.suppress(FileNotFoundError):
                found |= {one.name for one in (root / "cloche" / name).iterdir() if one.is_dir()}
    return found


def limited() -> bool:
    """Whether this host has control groups at all."""
    return cgroups.probe().version != 0


def jailed(data: Path) -> dict[int, int]:
    """Processes with a user id of this data directory, netd left out: pid and user id."""
    with contextlib.suppress(FileNotFoundError, KeyError):
        mine = block(data)
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and procs.start_time(int(entry.name)) is not None:
                uid = uids.uid_of(int(entry.name))
                if uid is not None and uid in mine and uid != mine.first:
                    found[int(entry.name)] = uid
        return found
    return {}


def launchers(server: int) -> list[int]:
    """The processes of a server that start machines."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"zygote.py" in (entry / "cmdline").read_bytes():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == server:
                    found.append(int(entry.name))
    return found


def forget(data: Path) -> None:
    """Removes the groups of a data directory that goes away, whose machines have ended."""
    with contextlib.suppress(FileNotFoundError, KeyError):
        name = block(data).name
        for root in set(cgroups.probe().roots.values()):
            with contextlib.suppress(OSError):
                for one in (root / "cloche" / name).iterdir():
                    if one.is_dir():
                        one.rmdir()
                (root / "cloche" / name).rmdir()
