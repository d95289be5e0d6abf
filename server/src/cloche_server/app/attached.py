"""Commands that somebody is at: whatever they write waits until it is read, and nothing of it is ever left out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry
from cloche_server.app.exec import laid_out, lost
from cloche_server.core.errors import ClocheError
from cloche_server.core.process import Size
from cloche_server.guest.client import GuestClient
from cloche_server.guest.feed import IN_FLIGHT, IN_FLIGHT_OF_FILES, GuestFeed
from cloche_server.guest.frames import STDERR, Exit, Output
from cloche_server.guest.streams import ExecCall
from cloche_server.guest.types import ExecRequest
from cloche_server.host.clock import random_bytes
from cloche_server.telemetry import metrics

#: What is no failure of a caller: the command has ended, or reads no more.
_OVER: Final = frozenset({"process.ended", "process.no_input", "process.no_terminal", "process.not_found"})
#: The agent's own program, which commands with tools find open under this name.
TOOLS: Final = "/proc/self/fd/3"


@dataclass(frozen=True, slots=True)
class AttachWish:
    """`script`: for the login shell; with a terminal and without a command the login shell itself. `tools`: the agent's
    program is open as `TOOLS`."""

    script: str | None = None
    argv: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    pty: Size | None = None
    tools: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes of stdout, or of stderr with `error`."""

    data: bytes
    error: bool


class Attached:
    """One command. Iterate over `output` once, and always `aclose`: a command that runs then is hung up on."""

    def __init__(
        self, entry: Entry, guest: GuestClient, call: ExecCall, id_: str, access: Access, wish: AttachWish
    ) -> None:
        self._entry = entry
        self._guest = guest
        self._call = call
        self._id = id_
        self._tty = wish.pty is not None
        self._most = IN_FLIGHT_OF_FILES if wish.tools else IN_FLIGHT
        self._feed: GuestFeed | None = None
        self._held = contextlib.ExitStack()
        self._held.enter_context(access.busy(entry))

    async def output(self) -> AsyncIterator[Written | Exit]:
        """What it writes, and last how it has ended, as the guest says. Raises `exec.sandbox_gone`, `exec.suspended`,
        `sandbox.unreachable`."""
        try:
            async for frame in self._call:
                if isinstance(frame, Output):
                    self._entry.traffic.out(len(frame.data))
                    yield Written(frame.data, frame.stream == STDERR)
                elif isinstance(frame, Exit):
                    metrics.execs.labels(frame.reason).inc()
                    yield frame
        except ClocheError as error:
            raise await lost(self._entry, error) from error

    async def write(self, data: bytes) -> bool:
        """Waits while it does not read. False: it takes no more."""
        try:
            took = await (await self._opened()).write(data)
        except ClocheError as error:
            return await self._over(error)
        self._entry.traffic.bytes_in += len(data)
        return took

    async def write_eof(self) -> None:
        """There is no more input. A terminal has no end; a character says so there."""
        if self._tty:
            await self.write(b"\x04")
            return
        try:
            (await self._opened()).finish()
        except ClocheError as error:
            await self._over(error)

    async def _opened(self) -> GuestFeed:
        if self._feed is None:
            self._feed = await self._guest.process_feed(self._id, most=self._most)
        return self._feed

    async def signal(self, name: str) -> None:
        """`name` without SIG; to the process and its group."""
        try:
            await self._guest.process_signal(self._id, name, "group")
        except ClocheError as error:
            if error.code != "request.invalid":
                await self._over(error)

    async def resize(self, size: Size) -> None:
        try:
            await self._guest.process_resize(self._id, size.cols, size.rows)
        except ClocheError as error:
            await self._over(error)

    async def _over(self, error: ClocheError) -> bool:
        if error.code in _OVER:
            return False
        raise await lost(self._entry, error) from error

    async def aclose(self) -> None:
        self._held.close()
        if self._feed is not None:
            self._feed.close()
        await self._call.__aexit__(None, None, None)


class Attachments:
    """Starts such commands. Errors: those of `Access.serving`, and of the start of a command."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def open(self, workspace: str, sandbox_id: str, wish: AttachWish) -> Attached:
        entry, guest = await self._access.serving(workspace, sandbox_id)
        placed = laid_out(entry, wish.script, wish.argv, wish.env, None, None)
        request = ExecRequest(
            id="a" + random_bytes(10).hex(),
            shell=wish.script,
            argv=wish.argv,
            keep_stdin=wish.pty is None,
            pty=None if wish.pty is None else (wish.pty.cols, wish.pty.rows),
            on_lost="hangup",
            tools=wish.tools,
            **placed,
        )
        self._access.count_exec(entry)
        call = guest.exec(request)
        with self._access.busy(entry):  # also while it waits for its turn
            try:
                await call.__aenter__()
            except ClocheError as error:
                raise await lost(entry, error) from error
            return Attached(entry, guest, call, request.id, self._access, wish)
