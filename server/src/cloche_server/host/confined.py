"""A program that reads files which strangers have written, each time in a jail of its own.

It sees itself, its libraries and the files of this call, under names that stand to one another as on the host; it has
a user id that nobody else has, no network, no privilege, and bounds for everything that it could take.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.host import mounts, process
from cloche_server.host.cgroups import Groups, Limits
from cloche_server.host.jail import Jail, Launcher, Program, Root
from cloche_server.host.process import Completed
from cloche_server.host.uids import UidBlock
from cloche_server.telemetry import log

_log = log.get("confined")

_MIB: Final = 1024 * 1024
#: Where the data directory would be, inside.
_DATA: Final = Path("/data")
_KEPT: Final = 65536
_CHUNK: Final = 65536
_THREADS: Final = 80
#: Addresses beside what is used: libraries, and stacks of threads that are hardly touched.
_ADDRESSES_MB: Final = 2048
#: The first to be ended when the host runs out of memory.
_OOM_SCORE: Final = 900
_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one call: seconds that pass, seconds of a processor, memory, and the largest file that it writes."""

    seconds: float
    cpu_seconds: int
    memory_mb: int
    file_mb: int


@dataclass(frozen=True, slots=True)
class Cell:
    """What the jails of a program have in common. `base`: an empty directory to build roots at."""

    launcher: Launcher
    root: Root
    uids: UidBlock
    groups: Groups
    base: Path


@dataclass(frozen=True, slots=True)
class _Running:
    pid: int
    output: int
    group: str
    written: Path | None


class Confined:
    """One program. Few calls run at once; further ones wait. `cell` None: it runs as what this process is, which is for
    a server that was started without jails."""

    def __init__(self, program: str, data: Path, cell: Cell | None) -> None:
        self._program = program
        self._data = data
        self._cell = cell
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def name(self, path: Path) -> str:
        """What a file of the data directory is called by the program."""
        if self._cell is None:
            return os.fspath(path)
        return os.fspath(_DATA / path.relative_to(self._data))

    async def run(
        self, words: Sequence[str], *, reads: Sequence[Path], writes: Path | None = None, bounds: Bounds
    ) -> Completed:
        """Runs it to its end, whatever its exit code is; `-9` as well when it went over its bounds. Files beside these
        are not there. Of its output the end is kept, all in `stderr`. Raises OSError when a file is missing,
        `host.unsupported`, `internal`; and TimeoutError after `bounds.seconds`."""
        binary = shutil.which(self._program)
        if binary is None:
            raise ClocheError("host.unsupported", f"the program `{self._program}` is not installed on this host")
        async with self._turns:
            if self._cell is None:
                async with asyncio.timeout(bounds.seconds):
                    return await process.run([binary, *words], timeout=None, check=False, max_output=_KEPT)
            return await self._inside(self._cell, (binary, *words), reads, writes, bounds)

    async def _inside(
        self, cell: Cell, argv: tuple[str, ...], reads: Sequence[Path], writes: Path | None, bounds: Bounds
    ) -> Completed:
        work = asyncio.get_running_loop().run_in_executor(None, self._start, cell, argv, reads, writes, bounds)
        cancelled: asyncio.CancelledError | None = None
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError as error:  # the thread cannot be stopped, and may start it yet
                cancelled = error
        if cancelled is not None:
            if work.exception() is None:
                _end(cell, work.result())
            raise cancelled
        running = work.result()
        output = b""
        try:
            async with asyncio.timeout(bounds.seconds):
                output = await _until_ended(running)
        finally:
            # At once and on this thread, so that nothing comes between: the kill of one process, and moments.
            code = _end(cell, running)
        return Completed(b"", output, code, len(output) >= _KEPT)

    def _start(
        self, cell: Cell, argv: tuple[str, ...], reads: Sequence[Path], writes: Path | None, bounds: Bounds
    ) -> _Running:
        uid = cell.uids.take()
        group = f"tool-{uid}"
        reader, writer = os.pipe()
        started = False
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, writer)
                null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, null)
                groups, trees = set(), []
                for path in dict.fromkeys(reads):
                    groups.add(cell.uids.readable_by_group(path))
                    trees.append(self._tree(stack, path, writable=False))
                if writes is not None:
                    os.chown(writes, uid, uid)
                    trees.append(self._tree(stack, writes, writable=True))
                cell.base.mkdir(mode=0o755, parents=True, exist_ok=True)
                members = tuple(sorted(groups))
                jail = Jail(cell.root, uid, cell.base, Path("/work"), members, tuple(trees), oom_score=_OOM_SCORE)
                limits = {
                    "CORE": 0,
                    "NPROC": _THREADS,
                    "CPU": bounds.cpu_seconds,
                    "AS": (bounds.memory_mb + _ADDRESSES_MB) * _MIB,
                    "FSIZE": bounds.file_mb * _MIB,
                }
                joined = tuple(self._join(stack, cell, group, bounds))
                fds = {0: null, 1: writer, 2: writer}
                program = Program(
                    (os.path.realpath(argv[0]), *argv[1:]), fds, jail, cgroups=joined, limits=limits, ends_with_us=True
                )
                pid = cell.launcher.start(program)
                started = True
                return _Running(pid, reader, group, writes)
        finally:
            if not started:
                os.close(reader)
                cell.groups.remove(group)
                _take_back(writes)

    def _tree(self, stack: contextlib.ExitStack, path: Path, *, writable: bool) -> tuple[str, int]:
        tree = mounts.detached(path, writable=writable)
        stack.callback(os.close, tree)
        return self.name(path), tree

    def _join(self, stack: contextlib.ExitStack, cell: Cell, group: str, bounds: Bounds) -> Iterator[int]:
        limits = Limits(cpus=1.0, weight=1, memory_bytes=bounds.memory_mb * _MIB, pids=_THREADS)
        fds, failures = cell.groups.make(group, limits)
        if failures:
            _log.warning("cgroup.incomplete", group=group, failures=failures)
        for fd in fds:
            stack.callback(os.close, fd)
            yield fd


async def _until_ended(running: _Running) -> bytes:
    """What it has written, the end of it."""
    loop = asyncio.get_running_loop()
    ended, kept = asyncio.Event(), bytearray()
    os.set_blocking(running.output, False)

    def read() -> bool:
        try:
            data = os.read(running.output, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            loop.remove_reader(running.output)
        kept.extend(data)
        del kept[: max(0, len(kept) - _KEPT)]
        return bool(data)

    pidfd = os.pidfd_open(running.pid)
    try:
        loop.add_reader(pidfd, ended.set)
        loop.add_reader(running.output, read)
        await ended.wait()
        while read():
            pass
    finally:
        loop.remove_reader(pidfd)
        loop.remove_reader(running.output)
        os.close(pidfd)
    return bytes(kept)


def _end(cell: Cell, running: _Running) -> int:
    """Ends it, if it runs still, and removes what it had. Returns how it ended."""
    code = _end_and_reap(running.pid)
    os.close(running.output)
    if not cell.groups.remove(running.group):
        _log.warning("cgroup.not_removed", group=running.group)
    _take_back(running.written)
    return code


def _end_and_reap(pid: int) -> int:
    """Ends a child of ours; returns how it ended (negative: a signal), which may have been before."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return -signal.SIGKILL


def _take_back(path: Path | None) -> None:
    """The file that it wrote is the server's alone again."""
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.chown(path, 0, 0)
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)
