"""Processes of sandboxes: start, list, wait, signal, write. What they are is docs/processes.md."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry
from cloche_server.app.exec import laid_out, lost
from cloche_server.app.process_output import ProcessStream
from cloche_server.app.turns import Turns
from cloche_server.core.errors import ClocheError
from cloche_server.core.process import ProcessWish, id_of_key, parse_tag, tag_text
from cloche_server.guest.client import GuestClient
from cloche_server.guest.processes import WRITE_MAX
from cloche_server.guest.types import ExecInfo, ExecRequest, GuestProcess, Written
from cloche_server.host.clock import random_bytes

#: A wait is cut into pieces, so that a guest that has gone is noticed (seconds).
WAIT_PIECE: Final = 20.0
#: A write as well.
WRITE_PIECE: Final = 10.0


class Processes:
    """Errors of every method: those of `Access.serving`, `process.not_found`, `process.lost`."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._writers = Turns()

    # ---------------------------------------------------------------- start

    async def start(
        self, workspace: str, sandbox_id: str, wish: ProcessWish, key: str | None = None, body: bytes = b""
    ) -> ExecInfo:
        """Starts a process, or finds the one that was started with the same `key` and body before.

        Raises what a command raises that cannot be started, `request.idempotency_conflict`.
        """
        entry, guest = await self._access.serving(workspace, sandbox_id)
        digest = hashlib.sha256(body).hexdigest()[:32] if key is not None else ""
        process_id = id_of_key(sandbox_id, key) if key is not None else "p" + random_bytes(10).hex()
        request = self._request(entry, wish, process_id, digest)
        # What the machine is has to be known before, so that a loss is seen later.
        boot_id = entry.processes.boot_of(guest) or await self._boot_id(entry, guest)
        self._access.count_exec(entry)
        try:
            with self._access.busy(entry):  # also while it waits for its turn
                async with guest.exec(request) as call:
                    started = call.started
        except ClocheError as error:
            if key is None or error.code != "exec.conflict":
                raise await lost(entry, error) from error
            return await self._earlier(entry, guest, process_id, digest)
        info = await self._info(entry, guest, process_id)
        entry.processes.saw(info, boot_id)
        return replace(info, pid=started.pid)

    def _request(self, entry: Entry, wish: ProcessWish, process_id: str, digest: str) -> ExecRequest:
        placed = laid_out(entry, wish.shell, wish.argv, wish.env, wish.cwd, wish.user)
        return ExecRequest(
            id=process_id,
            argv=wish.argv,
            shell=wish.shell,
            detach=True,
            timeout_ms=0 if wish.timeout is None else max(1, round(wish.timeout * 1000)),
            keep_stdin=wish.pipe,
            pty=None if wish.pty is None else (wish.pty.cols, wish.pty.rows),
            rlimits=wish.rlimits,
            record_bytes=wish.record_kb * 1024,
            linger_ms=0 if wish.linger is None else max(1, round(wish.linger * 1000)),
            tag=tag_text(wish.shell, wish.argv, wish.name, digest),
            **placed,
        )

    async def _earlier(self, entry: Entry, guest: GuestClient, process_id: str, digest: str) -> ExecInfo:
        try:
            info = await self._info(entry, guest, process_id)
        except ClocheError as error:
            if error.code != "process.not_found":
                raise
            raise ClocheError(
                "process.not_found",
                "a process was started with this Idempotency-Key, and is not remembered any more",
            ) from error
        if parse_tag(info.tag).digest != digest:
            raise ClocheError(
                "request.idempotency_conflict", "this Idempotency-Key was used before with another request body"
            )
        return info

    async def _boot_id(self, entry: Entry, guest: GuestClient) -> str:
        """Of the machine, which also says what is lost since the last one."""
        found = await guest.all_execs()
        entry.processes.saw_all((info for info in found.execs if info.detach), found.boot_id)
        entry.processes.belongs(guest, found.boot_id)
        return found.boot_id

    # ---------------------------------------------------------------- what there is

    async def list_all(self, workspace: str, sandbox_id: str) -> list[tuple[ExecInfo, bool]]:
        """Those that run, those that have ended and are remembered, and those that are lost (true), oldest first."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        found = await guest.all_execs()
        infos = [info for info in found.execs if info.detach]
        entry.processes.saw_all(infos, found.boot_id)
        entry.processes.belongs(guest, found.boot_id)
        all_of_them = [(info, False) for info in infos] + [(info, True) for info in entry.processes.lost()]
        return sorted(all_of_them, key=lambda item: (item[0].started_ns, item[0].id))

    async def guest_processes(self, workspace: str, sandbox_id: str) -> tuple[list[GuestProcess], bool]:
        """All that runs in the guest; true: and more."""
        _, guest = await self._access.serving(workspace, sandbox_id)
        return await guest.guest_processes()

    async def get(self, workspace: str, sandbox_id: str, ref: str) -> tuple[ExecInfo, bool]:
        """By id, or by the pid of one that runs. True: it is lost."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        return await self._find(entry, guest, ref)

    async def wait(self, workspace: str, sandbox_id: str, ref: str, seconds: float) -> tuple[ExecInfo, bool]:
        """As `get`, but of one that runs only when it has ended, or after so long."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        info, is_lost = await self._find(entry, guest, ref)
        left = seconds
        with self._access.busy(entry):
            while info.running and not is_lost and left > 0:
                piece = min(left, WAIT_PIECE)
                left -= piece
                try:
                    info = await guest.process_wait(info.id, piece)
                except ClocheError as error:
                    raise await lost(entry, error) from error
        if not info.running:
            entry.processes.forget(info.id)  # its end is known, so it is never lost
        return info, is_lost

    async def _find(self, entry: Entry, guest: GuestClient, ref: str) -> tuple[ExecInfo, bool]:
        if ref.isascii() and ref.isdigit():
            for info in await guest.execs():
                if info.detach and info.running and str(info.pid) == ref:
                    return info, False
            raise ClocheError("process.not_found", "no process that was started here runs under this pid")
        try:
            return await self._info(entry, guest, ref), False
        except ClocheError as error:
            if error.code != "process.not_found":
                raise
            await self._boot_id(entry, guest)
            if not entry.processes.is_lost(ref):
                raise
            return entry.processes.known[ref].info, True

    async def _info(self, entry: Entry, guest: GuestClient, process_id: str) -> ExecInfo:
        info = await guest.process_wait(process_id, 0)
        if not info.running:
            entry.processes.forget(process_id)
        return info

    async def _alive(self, workspace: str, sandbox_id: str, ref: str) -> tuple[Entry, GuestClient, str]:
        """Raises `process.lost`; whether it runs is found out by the agent."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        if not (ref.isascii() and ref.isdigit()) and not entry.processes.is_lost(ref):
            return entry, guest, ref
        info, is_lost = await self._find(entry, guest, ref)
        if is_lost:
            raise ClocheError("process.lost", f"the process {info.id} was lost when its machine was stopped")
        return entry, guest, info.id

    # ---------------------------------------------------------------- what is done to one

    async def signal(self, workspace: str, sandbox_id: str, ref: str, signal: str | int, target: str) -> None:
        """`target`: process, group or tree. Raises `process.ended`."""
        _, guest, process_id = await self._alive(workspace, sandbox_id, ref)
        await guest.process_signal(process_id, signal, target)

    async def resize(self, workspace: str, sandbox_id: str, ref: str, cols: int, rows: int) -> None:
        """Raises `process.no_terminal`, `process.ended`."""
        _, guest, process_id = await self._alive(workspace, sandbox_id, ref)
        await guest.process_resize(process_id, cols, rows)

    async def write(
        self, workspace: str, sandbox_id: str, ref: str, data: bytes, seconds: float, *, close: bool = False
    ) -> Written:
        """As much as the process takes within so long; fewer bytes than were given are no error. `close` ends its input
        if all were taken. Raises `process.no_input`, `process.ended`."""
        entry, guest, process_id = await self._alive(workspace, sandbox_id, ref)
        with self._access.busy(entry):
            async with self._turn(sandbox_id, process_id, seconds) as mine:
                if not mine:
                    return Written(0, closed=False)
                return await self._write(entry, guest, process_id, data, seconds, close)

    @contextlib.asynccontextmanager
    async def _turn(self, sandbox_id: str, process_id: str, seconds: float) -> AsyncIterator[bool]:
        """Writers do not mix; one that waits for too long gets no turn."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(max(seconds, 0.01)):
                    await stack.enter_async_context(self._writers.of((sandbox_id, process_id)))
                mine = True
            except TimeoutError:
                mine = False
            yield mine

    async def _write(
        self, entry: Entry, guest: GuestClient, process_id: str, data: bytes, seconds: float, close: bool
    ) -> Written:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        done = 0
        while True:
            piece = data[done : done + WRITE_MAX]
            left = max(0.0, deadline - loop.time())
            last = done + len(piece) == len(data)
            try:
                written = await guest.process_write(process_id, piece, min(left, WRITE_PIECE), close=close and last)
            except ClocheError as error:
                if done and error.code in {"process.no_input", "process.ended"}:
                    return Written(done, closed=True)
                raise await lost(entry, error) from error
            done += written.bytes
            entry.traffic.bytes_in += written.bytes
            if done == len(data) or written.closed or loop.time() >= deadline:
                return Written(done, written.closed)

    async def forget(self, workspace: str, sandbox_id: str, ref: str) -> None:
        """Kills it with all its processes, and keeps nothing of it."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        info, is_lost = await self._find(entry, guest, ref)
        if not is_lost:
            await guest.process_forget(info.id)
        entry.processes.forget(info.id)

    # ---------------------------------------------------------------- output

    async def output(
        self, workspace: str, sandbox_id: str, ref: str, offset: int, stream: str | None, encoding: str, follow: bool
    ) -> ProcessStream:
        """What it has written from an offset on, of both streams or of one alone; with `follow` until it ends. Whoever
        calls closes it. Raises `process.lost`."""
        entry, guest, process_id = await self._alive(workspace, sandbox_id, ref)
        until: int | None = None
        if not follow:
            info = await self._info(entry, guest, process_id)
            until = {"stdout": info.stdout_bytes, "stderr": info.stderr_bytes}.get(stream or "", info.offset)
        call = guest.exec_output(process_id, offset, stream)
        try:
            await call.__aenter__()
        except ClocheError as error:
            if error.code == "exec.not_found":
                raise ClocheError("process.not_found", error.message) from error
            raise await lost(entry, error) from error
        return ProcessStream(entry, call, self._access, stream, offset, encoding, until)
