"""Processes of the host: run one to its end, start one that outlives us, find it again and kill it.

A process is named by its pid *and* its start time (field 22 of `/proc/PID/stat`). A pid alone may belong
to somebody else by the time it is used; the pair never does, short of a reboot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError

MAX_OUTPUT: Final = 4 * 1024 * 1024
_CHUNK: Final = 65536
_LINGER: Final = 0.5
"""Seconds in which what is left in the pipes must come after the process has exited. Something that it
left behind may hold them open for ever; that is then killed together with the group."""


@dataclass(frozen=True, slots=True)
class Completed:
    """What a process left. `truncated`: the beginning of a stream was dropped to keep it bounded."""

    stdout: bytes
    stderr: bytes
    returncode: int
    truncated: bool = False

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")


# ------------------------------------------------------------------ run to the end


async def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout: float | None = 60.0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    check: bool = True,
    max_output: int = MAX_OUTPUT,
    pass_fds: Sequence[int] = (),
    term_grace: float = 0.0,
    on_line: Callable[[str], None] | None = None,
    error_code: str = "internal",
) -> Completed:
    """Run `argv` to its end, in its own session, and return what it wrote.

    On timeout or cancellation the whole process group is killed: by SIGKILL, or by SIGTERM and then,
    `term_grace` seconds later, SIGKILL for programs that have something to clean up. Of each stream the
    last `max_output` bytes are kept. `on_line` sees each line of stderr as it comes. With `check` an exit
    code other than 0 raises `error_code` with the last lines of output in its details.
    """
    args = [os.fspath(arg) for arg in argv]
    process = await _spawn(args, cwd=cwd, env=env, has_stdin=stdin is not None, pass_fds=pass_fds)
    pump = _Pump(process, stdin, max_output, on_line)
    try:
        async with asyncio.timeout(timeout):
            await pump.finish()
    except BaseException as error:
        await pump.kill(term_grace)
        if isinstance(error, TimeoutError):
            raise failure(args, pump.completed(), error_code, f"took longer than {timeout:g} s") from None
        raise
    finally:
        pump.close()
    done = pump.completed()
    if check and done.returncode != 0:
        raise failure(args, done, error_code, describe(done.returncode))
    return done


async def _spawn(
    args: list[str],
    *,
    cwd: Path | None,
    env: Mapping[str, str] | None,
    has_stdin: bool,
    pass_fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - argv lists only, no shell
            args,
            stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=None if env is None else dict(env),
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )

    starting = asyncio.get_running_loop().run_in_executor(None, start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The thread cannot be stopped; what it has started must not be left running.
        with contextlib.suppress(OSError):
            process = await starting
            _kill_group(process.pid, signal.SIGKILL)
            process.communicate()  # reaps and closes the pipes; it is dead already
        raise
    except OSError as error:
        raise _cannot_start(args[0], error) from error


class _Pump:
    """Moves the bytes of one process between its pipes and memory, driven by the event loop.

    The standard library's own asyncio processes are not used because their `wait()` may hang for as long
    as a grandchild holds a pipe, which is just what must not hold us up.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdin: bytes | None,
        max_output: int,
        on_line: Callable[[str], None] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._input = memoryview(stdin or b"")
        self._max = max_output
        self._on_line = on_line
        self._line = b""
        self._open: dict[int, bytearray] = {}
        self._output = (bytearray(), bytearray())
        self._truncated = False
        self._drained = asyncio.Event()
        self._exited = asyncio.Event()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._exited.set)
        for stream, buffer in zip((process.stdout, process.stderr), self._output, strict=True):
            assert stream is not None
            fd = stream.fileno()
            os.set_blocking(fd, False)
            self._open[fd] = buffer
            self._loop.add_reader(fd, self._read, fd)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self._loop.add_writer(process.stdin.fileno(), self._write)

    async def finish(self) -> None:
        await self._exited.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                await self._drained.wait()
        # Nothing of the group is meant to outlive the call, whether or not it holds a pipe. The leader
        # is reaped after that: as long as it is a zombie its number cannot belong to another group.
        _kill_group(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def kill(self, term_grace: float) -> None:
        """End the group and reap its leader. A second cancellation cuts the grace, not the kill."""
        if self._process.returncode is not None:
            return
        if term_grace > 0 and not self._exited.is_set():
            _kill_group(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(term_grace):
                    await self._exited.wait()
        _kill_group(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def completed(self) -> Completed:
        code = self._process.returncode
        out, err = self._output
        return Completed(bytes(out), bytes(err), -signal.SIGKILL if code is None else code, self._truncated)

    def close(self) -> None:
        for fd in list(self._open):
            self._forget(fd)
        self._close_stdin()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._forget(fd)
            return
        buffer = self._open[fd]
        buffer += data
        if len(buffer) > self._max:
            del buffer[: len(buffer) - self._max]
            self._truncated = True
        if self._on_line is not None and buffer is self._output[1]:
            *lines, self._line = (self._line + data).split(b"\n")
            self._line = self._line[-_CHUNK:]
            for line in lines:
                self._on_line(line.decode("utf-8", "replace"))

    def _forget(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._open.pop(fd, None)
        if not self._open:
            self._drained.set()
            if self._line and self._on_line is not None:
                self._on_line(self._line.decode("utf-8", "replace"))

    def _write(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        try:
            written = os.write(stream.fileno(), self._input[:_CHUNK]) if self._input else 0
        except BlockingIOError:
            return
        except BrokenPipeError:
            # It does not want the rest; whether that is a failure is for its exit code to say.
            written = len(self._input)
        self._input = self._input[written:]
        if not self._input:
            self._close_stdin()

    def _close_stdin(self) -> None:
        stream = self._process.stdin
        if stream is not None and not stream.closed:
            self._loop.remove_writer(stream.fileno())
            stream.close()


def _kill_group(pgid: int, sig: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, sig)


def describe(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"


def failure(args: list[str], done: Completed, error_code: str, what: str) -> ClocheError:
    """The error for a program that has failed, with the end of what it wrote; `host.disk_full` when it says so."""
    tail = (done.stderr.strip() or done.stdout.strip()).decode("utf-8", "replace").splitlines()[-20:]
    if any("No space left on device" in line for line in tail):
        error_code = "host.disk_full"
    return ClocheError(
        error_code,
        f"`{Path(args[0]).name}` {what}",
        details={"argv": args, "returncode": done.returncode, "output": tail},
    )


def _cannot_start(program: str, error: OSError) -> ClocheError:
    if isinstance(error, FileNotFoundError) and error.filename in (program, os.fsencode(program)):
        return ClocheError("host.unsupported", f"the program `{program}` is not installed on this host")
    return ClocheError("internal", f"`{program}` could not be started: {error.strerror}")


def feed(argv: list[str], text: str) -> None:
    """Runs a program that reads commands and ends, on this very thread: in whose network namespace it then is. Blocks.
    Raises `host.unsupported`, `internal`."""
    try:
        done = subprocess.run(  # noqa: S603 - argv lists only, no shell
            argv, input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=30, check=False
        )
    except OSError as error:
        raise _cannot_start(argv[0], error) from error
    except subprocess.TimeoutExpired:
        raise ClocheError("internal", f"`{argv[0]}` took longer than 30 s") from None
    if done.returncode != 0:
        raise failure(argv, Completed(b"", done.stderr, done.returncode), "internal", describe(done.returncode))


# ------------------------------------------------------------------ processes that outlive us


def spawn_detached(
    argv: Sequence[str | os.PathLike[str]],
    *,
    stdout_path: Path | None = None,
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start a process in a session of its own and return its pid; it goes on when we end.

    Its output is appended to `stdout_path` (or goes nowhere). It remains our child until one of us ends:
    `is_alive` and `wait_exit` reap it. Costs about 0.3 ms, because `subprocess` uses vfork as long as
    there is no `preexec_fn`.
    """
    args = [os.fspath(arg) for arg in argv]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    out = os.open(stdout_path or os.devnull, flags if stdout_path else os.O_WRONLY, 0o640)
    try:
        process = subprocess.Popen(  # noqa: S603 - argv lists only, no shell
            args,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=cwd,
            env=None if env is None else dict(env),
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
    except OSError as error:
        raise _cannot_start(args[0], error) from error
    finally:
        os.close(out)
    # The object must not reap behind our back, nor warn that the process still runs: that is the point.
    process.returncode = 0
    return process.pid


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time in clock ticks, or None if there is no such process."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in field 2 may hold spaces and parentheses; the last `)` ends it.
    fields = raw[raw.rindex(b")") + 2 :].split()
    return fields[0].decode("ascii"), int(fields[19])


def start_time(pid: int) -> int | None:
    """Field 22 of `/proc/PID/stat`, which together with the pid names a process for good."""
    stat = _stat(pid)
    return None if stat is None else stat[1]


def is_alive(pid: int, start_time: int) -> bool:
    """Whether this very process runs. A zombie does not; if it is our child it is reaped."""
    stat = _stat(pid)
    if stat is None or stat[1] != start_time:
        return False
    if stat[0] in "ZX":
        reap(pid)
        return False
    return True


def reap(pid: int) -> int | None:
    """Collect the exit code of a child that has ended (negative: a signal); None if there is none."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done == pid else None


def end_child(pid: int) -> None:
    """End and reap a child of ours that nobody else reaps; as long as it is one, its pid is no other's.

    Needs no descriptor, so it works when there is none left. Blocks until the child is gone.
    """
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def open_pidfd(pid: int, start_time: int) -> int | None:
    """A descriptor that stands for this very process, readable once it has ended; None if it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    # Compared after opening: what the descriptor stands for can no longer change.
    if is_alive(pid, start_time):
        return fd
    os.close(fd)
    return None


def kill(pid: int, start_time: int, sig: int = signal.SIGKILL) -> bool:
    """Send a signal to this very process and never to a successor. False if it has gone already."""
    fd = open_pidfd(pid, start_time)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, sig)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


async def wait_exit(pid: int, start_time: int, timeout: float | None = None) -> bool:
    """Wait until the process has ended and reap it if it is ours. False if `timeout` passed first."""
    fd = open_pidfd(pid, start_time)
    if fd is None:
        return True
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        async with asyncio.timeout(timeout):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    reap(pid)
    return True
