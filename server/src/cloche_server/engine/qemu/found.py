"""Which machines run on this host: the truth is the process table."""

from __future__ import annotations

import itertools
from pathlib import Path

from cloche_server.core.records import ProcessRef
from cloche_server.engine.qemu.launch import NAME_PREFIX, UID_FILE
from cloche_server.host import process, uids


def find_machines(root: Path) -> dict[str, ProcessRef]:
    """Every VMM process whose directory is below `root`, by machine id."""
    found: dict[str, ProcessRef] = {}
    root = root.resolve()  # the kernel tells where a process really is
    jailed = _uids(root)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        uid = uids.uid_of(pid)
        # What a jailed process says of itself may be a lie; its user id is not.
        name = _name_by_words(entry, root) if uid == 0 else jailed.get(uid or 0)
        if name is None or (uid != 0 and not uids.is_first_of_namespace(pid)):
            continue
        started = process.start_time(pid)
        if started is not None:
            found[name] = ProcessRef(pid, started)
    return found


def _uids(root: Path) -> dict[int, str]:
    """The machines below `root` that were started in a jail, by the user ids of their processes."""
    found: dict[int, str] = {}
    for path in root.glob(f"*/{UID_FILE}"):
        try:
            found[int(path.read_text())] = path.parent.name
        except (OSError, ValueError):
            continue  # on its way out
    return found


def _name_by_words(entry: Path, root: Path) -> str | None:
    """The machine that a process without a jail is, by its command line and working directory."""
    try:
        argv = (entry / "cmdline").read_bytes().split(b"\0")
        cwd = (entry / "cwd").readlink()
    except OSError:
        return None
    return _guest_name(argv) if cwd.parent == root else None


def _guest_name(argv: list[bytes]) -> str | None:
    for flag, value in itertools.pairwise(argv):
        if flag == b"-name" and value.startswith(b"guest=" + NAME_PREFIX.encode()):
            return value.removeprefix(b"guest=" + NAME_PREFIX.encode()).decode("ascii", "replace")
    return None
