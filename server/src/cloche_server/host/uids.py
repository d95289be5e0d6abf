"""User ids for jailed processes: each machine has one of its own, which no other process of this host has.

A data directory gets a block of ids, so that two servers on one host never meet. Which block belongs to which
directory stands below `/run/cloche`, which a boot empties: at a boot there are no machines. Ids are given out in turn,
so an id comes back only after all others of its block, and then only when no process has it. Other processes of the
same data directory (a bake beside a running server) take from the same block.

The first id of each block is left alone, for the process that carries the network.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.host import files

RUN: Final = Path("/run/cloche")
BLOCK: Final = 65536
BLOCKS: Final = 4096
#: Group ids of memory files lie above all blocks.
_GROUPS: Final = BLOCK * BLOCKS
#: Of a block: 0 belongs to the network, and the highest is left out.
_FIRST, _LAST = 1, BLOCK - 2


@dataclass(frozen=True, slots=True)
class UidBlock:
    """The ids from `first` on that belong to one data directory."""

    first: int
    base: int
    run: Path = RUN

    @property
    def name(self) -> str:
        """A name for what belongs to this block on this host."""
        return str(self.first)

    def __contains__(self, uid: int) -> bool:
        return self.first <= uid < self.first + BLOCK

    def take(self) -> int:
        """An id that nobody has. Raises `host.unsupported` when the run directory cannot be written."""
        counter = self.run / f"next-{self.first}"
        with _locked(self.run):
            offset, careful = _read_counter(counter) or (_FIRST, bool(used_uids(self)))
            # While the block is used for the first time an id that was not given out yet is nobody's.
            used = used_uids(self) if careful else frozenset[int]()
            for _ in range(_FIRST, _LAST + 1):
                uid = self.first + offset
                offset, careful = (offset + 1, careful) if offset < _LAST else (_FIRST, True)
                if uid not in used:
                    counter.write_text(f"{offset} {int(careful)}")
                    return uid
        raise ClocheError("capacity.unavailable", "all user ids of this host's sandboxes are taken", retry_after=5)

    def readable_by_group(self, path: Path) -> int:
        """Lets one group read a file, and nobody else; only root may write it. Returns the group. Raises OSError."""
        status = path.stat()
        group = self.group_of(status)
        if (status.st_uid, status.st_gid) != (0, group):
            os.chown(path, 0, group)
        if stat.S_IMODE(status.st_mode) != 0o440:
            path.chmod(0o440)
        return group

    def group_of(self, status: os.stat_result) -> int:
        """The group that may read a memory file: the same for all machines that have mapped this file, and for no
        other file."""
        digest = hashlib.sha256(f"{status.st_dev}:{status.st_ino}".encode()).digest()
        return self.base + _GROUPS + int.from_bytes(digest[:4], "big") % (_GROUPS - 1)


def claim(data: Path, base: int, run: Path = RUN) -> UidBlock:
    """The block of a data directory; a new one when it has none. Raises `host.unsupported`."""
    name = os.fspath(data.resolve())
    with _locked(run):
        path = run / "blocks.json"
        try:
            blocks: dict[str, int] = json.loads(path.read_text())
        except FileNotFoundError:
            blocks = {}
        except ValueError:
            raise ClocheError("host.unsupported", f"{path} is damaged; end all machines and remove it") from None
        # Of directories that are gone the block is free, unless a process still has one of its ids.
        for gone in [one for one in blocks if one != name and not Path(one).is_dir()]:
            if not used_uids(UidBlock(blocks[gone], base, run)):
                del blocks[gone]
        if not _in_range(blocks.get(name), base):
            taken = set(blocks.values())
            free = (base + number * BLOCK for number in range(BLOCKS))
            first = next((one for one in free if one not in taken), None)
            if first is None:
                raise ClocheError("host.unsupported", f"all blocks of user ids from {base} on are taken")
            blocks[name] = first
            (run / f"next-{first}").unlink(missing_ok=True)
        files.write_atomic(path, json.dumps(blocks), mode=0o600)
        return UidBlock(blocks[name], base, run)


def existing(data: Path, base: int, run: Path = RUN) -> UidBlock | None:
    """The block of a data directory that has one."""
    try:
        first = json.loads((run / "blocks.json").read_text()).get(os.fspath(data.resolve()))
    except (FileNotFoundError, ValueError):
        return None
    return UidBlock(first, base, run) if _in_range(first, base) else None


def _in_range(first: int | None, base: int) -> bool:
    return first is not None and base <= first < base + _GROUPS and (first - base) % BLOCK == 0


def used_uids(block: UidBlock) -> frozenset[int]:
    """The ids of the block that processes of this host have."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                uid = uid_of(int(entry.name))
                if uid is not None and uid in block:
                    found.add(uid)
    return frozenset(found)


def uid_of(pid: int) -> int | None:
    """The real user id of a process; None when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


def is_first_of_namespace(pid: int) -> bool:
    """Whether a process is number 1 of a process namespace below ours."""
    try:
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"NSpid:"):
                numbers = line.split()[1:]
                return len(numbers) > 1 and numbers[-1] == b"1"
    except (FileNotFoundError, ProcessLookupError):
        pass
    return False


def _read_counter(path: Path) -> tuple[int, bool] | None:
    try:
        offset, careful = path.read_text().split()
        return min(max(int(offset), _FIRST), _LAST), careful != "0"
    except (FileNotFoundError, ValueError):
        return None


@contextlib.contextmanager
def _locked(run: Path) -> Iterator[None]:
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(run / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ClocheError("host.unsupported", f"{run} cannot be written ({error.strerror})") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
