"""Terminals: a process with a screen, and one client at it who may come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cloche_server.app.process_output import ProcessStream
from cloche_server.app.processes import Processes
from cloche_server.core.errors import ClocheError
from cloche_server.core.process import ProcessWish, Size

#: A shell that was opened with `/ssh` is hung up on so long after its client has gone (seconds).
SSH_GRACE: Final = 10.0
#: How long a process has to take what was typed (seconds). Its reader may be stopped, and go on later.
TYPE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class TerminalWish:
    """`process`: one that runs, whose output is repeated from `offset`; without it a login shell is started, which ends
    `linger` seconds after nobody watches it any more. `size`: None leaves that of a process as it is."""

    size: Size | None
    linger: float
    process: str | None = None
    offset: int | None = None


class Terminal:
    """One client at one process. Close its stream."""

    def __init__(self, processes: Processes, workspace: str, sandbox_id: str, stream: ProcessStream, id_: str) -> None:
        self._processes = processes
        self._where = (workspace, sandbox_id, id_)
        self.stream = stream
        self.process_id = id_

    async def type(self, data: bytes) -> bool:
        """False: it takes no more, or not everything in time."""
        try:
            written = await self._processes.write(*self._where, data, TYPE_SECONDS)
        except ClocheError as error:
            if error.code in {"process.ended", "process.no_input"}:
                return False
            raise
        return written.bytes == len(data)

    async def resize(self, size: Size) -> None:
        try:
            await self._processes.resize(*self._where, size.cols, size.rows)
        except ClocheError as error:
            if error.code not in {"process.ended", "process.no_terminal"}:
                raise


class Terminals:
    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    async def open(self, workspace: str, sandbox_id: str, wish: TerminalWish) -> Terminal:
        """Raises what a start raises, or `process.not_found`, `process.no_terminal`, `process.lost`."""
        process_id, offset = wish.process, wish.offset or 0
        if process_id is None:
            shell = ProcessWish(pty=wish.size or Size(80, 24), linger=wish.linger, name="terminal")
            process_id = (await self._processes.start(workspace, sandbox_id, shell)).id
        else:
            info, is_lost = await self._processes.get(workspace, sandbox_id, process_id)
            process_id = info.id
            if is_lost:
                raise ClocheError("process.lost", f"the process {info.id} was lost when its machine was stopped")
            if info.stdin != "pty":
                raise ClocheError("process.no_terminal", f"the process {info.id} has no terminal")
            offset = info.offset if wish.offset is None else offset
        stream = await self._processes.output(workspace, sandbox_id, process_id, offset, None, "base64", follow=True)
        terminal = Terminal(self._processes, workspace, sandbox_id, stream, process_id)
        if wish.process is not None and wish.size is not None:
            await terminal.resize(wish.size)
        return terminal
