"""Programs in a jail: their own user, namespaces and root, no privilege, no file but what they are given.

What the jail of a program holds is a value (`Jail`); `Launcher` makes it true through `zygote.py`, and the program is
then a child of this process. Without a jail a program is started the same way, as root among all the others.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cloche_server.host import process, zygote
from cloche_server.host.seccomp import jail_filter

NAMESPACES: Final = ("mnt", "uts", "ipc", "pid", "net")
_SCRIPT: Final = Path(zygote.__file__)
#: Parts of a program's environment that do not come from ours.
ENVIRONMENT: Final = {"PATH": "/usr/bin", "LANG": "C.UTF-8"}
_MOST_FDS: Final = 550
_CAP_SYS_RESOURCE: Final = 24


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or directory of the host, read-only under the same name; `execute`, `device`: what else it may be."""

    path: Path
    execute: bool = False
    device: bool = False


@dataclass(frozen=True, slots=True)
class Root:
    """What every jail of a program holds: where the program and its libraries are, and links that lead there."""

    binds: tuple[Bind, ...]
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Jail:
    """`uid`: also its group; `groups`: others it has. `base`: an empty directory to build the root at, which stays
    empty. `trees`: names in the root, with descriptors of `mounts.detached`. `cwd`: an empty directory to work in."""

    root: Root
    uid: int
    base: Path
    cwd: Path
    groups: tuple[int, ...] = ()
    trees: tuple[tuple[str, int], ...] = ()
    hostname: str = "sandbox"
    oom_score: int | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """`fds`: descriptors of ours by the numbers that the program has them by; 0, 1 and 2 among them. `cgroups`: open
    `cgroup.procs` files of the groups it joins. `limits`: by the names of setrlimit(2). `ends_with_us`: it does
    not outlive this process."""

    argv: tuple[str, ...]
    fds: Mapping[int, int]
    jail: Jail | None
    cwd: Path | None = None
    cgroups: tuple[int, ...] = ()
    limits: Mapping[str, int] = field(default_factory=lambda: {"CORE": 0})
    ends_with_us: bool = False


def request_of(program: Program, status: int) -> tuple[dict[str, Any], list[int]]:
    """What the launcher is told, and the descriptors that go with it."""
    sent: list[int] = []

    def place(fd: int) -> int:
        sent.append(fd)
        return len(sent) - 1

    jail = program.jail
    request: dict[str, Any] = {
        "argv": list(program.argv),
        "env": ENVIRONMENT,
        "cwd": os.fspath(program.cwd) if program.cwd else None,
        "fds": {str(number): place(fd) for number, fd in program.fds.items()},
        "status": place(status),
        "groups": [place(fd) for fd in program.cgroups],
        "limits": dict(program.limits),
        "ends_with_us": program.ends_with_us,
        "jail": None,
    }
    if jail is not None:
        request["jail"] = {
            "namespaces": list(NAMESPACES),
            "base": os.fspath(jail.base),
            "cwd": os.fspath(jail.cwd),
            "uid": jail.uid,
            "groups": list(jail.groups),
            "hostname": jail.hostname,
            "oom_score": jail.oom_score,
            "filter": jail_filter().hex(),
            "links": [list(link) for link in jail.root.links],
            "binds": [_bind(one) for one in jail.root.binds],
            "trees": [[place(fd), target] for target, fd in jail.trees],
        }
    request["count"] = len(sent)
    return request, sent


def _bind(one: Bind) -> list[Any]:
    options = [name for name, wanted in (("exec", one.execute), ("dev", one.device)) if wanted]
    return [os.fspath(one.path), os.fspath(one.path), options]


class Launcher:
    """Starts programs as children of this process. Blocking, for threads; several may start programs at once. The
    process behind it is started when it is needed, and again when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0

    @property
    def pid(self) -> int:
        """Of the process behind it; 0 before it is needed."""
        return self._pid

    def start(self, program: Program) -> int:
        """The pid of the program, which runs already. Raises OSError that says what could not be done."""
        reader, writer = os.pipe()
        try:
            try:
                request, fds = request_of(program, writer)
                if max(program.fds) > _MOST_FDS:
                    raise OSError(7, "the machine needs more descriptors than can be handed over")
                pid = self._ask(request, fds)
            finally:
                os.close(writer)
            failure = _read_all(reader)
        finally:
            os.close(reader)
        if failure:
            process.end_child(pid)
            raise OSError(5, f"the jail could not be built: {failure}")
        return pid

    def _ask(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        with self._lock:
            for attempt in (1, 2):
                sock = self._connected()
                try:
                    answer = _exchange(sock, request, fds)
                    break
                except OSError:
                    self._drop()
                    if attempt == 2:
                        raise
        if "pid" not in answer:
            raise OSError(int(answer["errno"]), str(answer["error"]))
        return int(answer["pid"])

    def _connected(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    # Isolated and without site packages: small, quick to start, and nothing in the way decides.
                    argv = [sys.executable, "-I", "-S", str(_SCRIPT), str(theirs.fileno())]
                    self._pid = process.spawn_detached(argv, pass_fds=[theirs.fileno()], cwd=Path("/"), env={})
                except BaseException:
                    ours.close()
                    raise
            self._socket = ours
        return self._socket

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            process.end_child(self._pid)
            self._pid = 0

    def close(self) -> None:
        """Ends the process behind it. What it has started runs on."""
        with self._lock:
            self._drop()


def may_set_limits() -> bool:
    """Whether this process may lift limits of others; in a container root may not always (CAP_SYS_RESOURCE)."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)
    return False


def limit_file_size(pid: int, size: int) -> None:
    """No file that a process writes gets larger than `size` bytes. Raises ProcessLookupError. Does nothing where limits
    of others cannot be set."""
    if may_set_limits():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


def _exchange(sock: socket.socket, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
    """Raises OSError when the other side is gone."""
    data = json.dumps(request).encode()
    if len(data) > zygote.PACKET:
        raise ValueError("the request is too long")
    for at in range(0, max(1, len(fds)), zygote.FDS_AT_ONCE):
        part = array.array("i", fds[at : at + zygote.FDS_AT_ONCE])
        sock.sendmsg([data if at == 0 else b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, part)])
    answer = sock.recv(4096)
    if not answer:
        raise ConnectionResetError("the launcher has ended")
    found: dict[str, Any] = json.loads(answer)
    return found


def _read_all(fd: int) -> str:
    """What was written until nobody can write any more."""
    parts = []
    while part := os.read(fd, 4096):
        parts.append(part)
    return b"".join(parts).decode("utf-8", "replace")


@contextlib.contextmanager
def opened(*fds: int) -> Iterator[None]:
    """Closes descriptors at the end."""
    try:
        yield
    finally:
        for fd in fds:
            os.close(fd)
