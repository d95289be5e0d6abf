"""One command or shell of a client: its terminal, its signals, and how it ends."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

import asyncssh

from cloche_server.app.attached import TOOLS, Attached, Attachments, AttachWish, Written
from cloche_server.core.errors import ClocheError
from cloche_server.core.process import SIZE_MAX, Size
from cloche_server.guest.frames import Exit
from cloche_server.ssh.flow import Connection
from cloche_server.ssh.pipe import STDERR, Pipe

#: What a command ends with that could not be carried out.
FAILED: Final = 255
#: Signals that may be told by their names (RFC 4254, 6.10).
_SIGNALS: Final = frozenset(
    ("ABRT", "ALRM", "FPE", "HUP", "ILL", "INT", "KILL", "PIPE", "QUIT", "SEGV", "TERM", "USR1", "USR2")
)
_PLAIN_LINKS: Final = ("SSH-2.0-libssh_", "SSH-2.0-AsyncSSH_")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
#: What a login decides itself, and what would decide which code its programs run.
_OURS: Final = frozenset({"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "MAIL", "ENV", "BASH_ENV", "IFS"})
#: The far side of `scp -O`: `scp`, flags, and then paths that the shell takes apart.
_FLAGS: Final = re.compile(r" -[a-zA-Z]+")
_PATHS: Final = re.compile(r"(?: --)? .+", re.DOTALL)


def far_copy(command: str) -> str | None:
    """The arguments of a command that is the far side of a copy: with -t or -f among its flags."""
    if not command.startswith("scp -"):
        return None
    # Flag by flag, and never again in another way: a long run of them would hold up everybody.
    at = len("scp")
    while found := _FLAGS.match(command, at):
        at = found.end()
    if not {"t", "f"} & set(command[3:at]) or _PATHS.fullmatch(command, at) is None:
        return None
    return command[3:]


@dataclass(frozen=True, slots=True)
class Place:
    """Where commands of a client run, and who minds their tasks."""

    attachments: Attachments
    workspace: str
    sandbox_id: str
    start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    beat: Callable[[], None]
    #: Called when a session has ended.
    leave: Callable[[], None]


class Session(asyncssh.SSHServerSession[bytes]):
    def __init__(self, connection: Connection, place: Place) -> None:
        self._place = place
        self._pipe = Pipe(connection, place.beat)
        self._chan: Any = None
        self._task: asyncio.Task[None] | None = None
        self._command: str | None = None
        self._sftp = False
        self._term: str | None = None
        self._size: Size | None = None
        self._resized = False
        self._signals: deque[str] = deque(maxlen=16)
        self._told = asyncio.Event()
        self._left = False

    # ---------------------------------------------------------------- what AsyncSSH tells

    def connection_made(self, chan: Any) -> None:
        self._chan = chan
        self._pipe.made(chan)

    def pty_requested(self, term_type: str | None, term_size: Any, term_modes: Mapping[int, int]) -> bool:
        self._term = term_type
        self._size = _size(term_size[0], term_size[1])
        return True

    def shell_requested(self) -> bool:
        return True

    def exec_requested(self, command: str) -> bool:
        self._command = command
        return True

    def subsystem_requested(self, subsystem: str) -> bool:
        self._sftp = subsystem == "sftp"
        return self._sftp

    def session_started(self) -> None:
        self._task = self._place.start(self._run())

    def data_received(self, data: bytes, datatype: Any) -> None:
        self._pipe.fed(data)

    def eof_received(self) -> bool:
        self._pipe.ended()
        return True

    def signal_received(self, signal: str) -> None:
        self._signals.append(signal)
        self._told.set()

    def break_received(self, msec: int) -> bool:
        self.signal_received("INT")
        return True

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        self._size = _size(width, height)
        self._resized = True
        self._told.set()

    def pause_writing(self) -> None:
        self._pipe.pause()

    def resume_writing(self) -> None:
        self._pipe.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pipe.lost()
        if self._task is not None:
            self._task.cancel()
        if not self._left:
            self._left = True
            self._place.leave()

    # ---------------------------------------------------------------- what it does

    def _wish(self) -> AttachWish:
        env = {
            name: value
            for name, value in self._chan.get_environment().items()
            if _NAME.fullmatch(name) and name not in _OURS and not name.startswith("LD_") and "\0" not in value
        }
        if self._sftp:
            argv = (TOOLS, "sftp", *(["plain-links"] if self._plain_links() else []))
            return AttachWish(argv=argv, env=env, tools=True)
        if self._term and self._term.isprintable():
            env["TERM"] = self._term[:64]
        copy = far_copy(self._command or "")
        if copy is not None and self._size is None:
            return AttachWish(script=f"exec {TOOLS} scp{copy}", env=env, tools=True)
        if self._command is None and self._size is None:
            # A shell that reads what to do from a pipe, as one that is logged in.
            return AttachWish(script='exec "$SHELL" -l', env=env)
        return AttachWish(script=self._command, env=env, pty=self._size)

    def _plain_links(self) -> bool:
        """OpenSSH and most others send the two fields of a new link in another order than the draft of the protocol;
        these do so only to servers that call themselves OpenSSH."""
        version = str(self._chan.get_extra_info("client_version") or "")
        return version.startswith(_PLAIN_LINKS)

    async def _run(self) -> None:
        try:
            attached = await self._place.attachments.open(self._place.workspace, self._place.sandbox_id, self._wish())
            try:
                await self._carry(attached)
            finally:
                await attached.aclose()
        # Of a group: what ends the output comes out of one.
        except* ClocheError as errors:
            self._refuse(errors)
        except* ConnectionError:
            pass  # the client has gone
        except* Exception:
            if not self._pipe.gone:
                self._chan.exit(FAILED)
            raise

    def _refuse(self, errors: BaseExceptionGroup[ClocheError]) -> None:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not self._pipe.gone:
            if isinstance(error, ClocheError):
                self._chan.write(f"cloche: {error.message}\r\n".encode(), STDERR)
            self._chan.exit(FAILED)

    async def _carry(self, attached: Attached) -> None:
        """Until the command has ended, whatever its client still sends."""
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(_guarded(work, attached)) for work in (self._feed, self._mind)]
            try:
                await self._show(attached)
            finally:
                for task in others:
                    task.cancel()

    async def _show(self, attached: Attached) -> None:
        async for item in attached.output():
            if isinstance(item, Written):
                await self._pipe.write(item.data, STDERR if item.error else None)
            else:
                self._end(item)

    def _end(self, end: Exit) -> None:
        if self._pipe.gone:
            return
        name = (end.signal or "").removeprefix("SIG")
        if end.reason == "oom":
            self._chan.write(
                b"cloche: the kernel of the sandbox has ended it, because there was no memory left\r\n", STDERR
            )
        if end.reason == "signaled" and name in _SIGNALS:
            self._chan.exit_with_signal(name, False, "")
        else:
            self._chan.exit(end.exit_code & 0xFF)

    async def _feed(self, attached: Attached) -> None:
        while data := await self._pipe.read():
            if not await attached.write(data):
                # It reads no more; what comes is thrown away, so that its output can go on.
                while await self._pipe.read():
                    pass
                return
        if not self._pipe.gone:
            await attached.write_eof()

    async def _mind(self, attached: Attached) -> None:
        while True:
            await self._told.wait()
            self._told.clear()
            if self._resized and self._size is not None:
                self._resized = False
                await attached.resize(self._size)
            while self._signals:
                await attached.signal(self._signals.popleft())


async def _guarded(work: Callable[[Attached], Coroutine[Any, Any, None]], attached: Attached) -> None:
    """What happens to the command itself is told by its output, which ends then."""
    try:
        await work(attached)
    except (ClocheError, ConnectionError):
        return


def _size(cols: int, rows: int) -> Size:
    """Clients without a window send zeros."""
    return Size(min(max(cols, 1), SIZE_MAX) if cols else 80, min(max(rows, 1), SIZE_MAX) if rows else 24)
