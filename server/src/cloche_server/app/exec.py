"""Running commands: blocking, streaming, detached. No lifecycle code, no engine code."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry
from cloche_server.app.patience import Patience
from cloche_server.core.command import Command, CommandEnd, CommandResult, check_size, timeout_told, with_defaults
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.output import ChunkDecoder, OutputCollector
from cloche_server.core.process import tag_text
from cloche_server.core.secrets import guest_env
from cloche_server.guest.frames import STDERR, STDOUT, Exit, Frame, Gap, Output
from cloche_server.guest.streams import ExecCall
from cloche_server.guest.types import ExecInfo, ExecRequest
from cloche_server.telemetry import metrics

#: The host's own clock ends a command when its machine has run for this many seconds more than the guest should have
#: needed to end it.
HOST_GRACE: Final = 10.0
#: After the link is lost: how long until the end of the VMM process must have been noticed.
NOTICE_TIMEOUT: Final = 2.0
#: Its machine is gone, and what ran in it goes on later.
ASLEEP: Final = frozenset({Status.HIBERNATING, Status.HIBERNATED, Status.WAKING})
STREAM_NAMES: Final = {STDOUT: "stdout", STDERR: "stderr"}


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """Text of one stream (or base64). `offset` is where a reader who has seen this may go on, in output bytes of
    both streams; None when nothing but a repetition would be exact, because the other stream is in mid-character."""

    stream: str
    text: str
    offset: int | None


@dataclass(frozen=True, slots=True)
class StreamGap:
    """`count` bytes of output are missing here."""

    stream: str
    count: int
    offset: int


StreamItem = StreamChunk | StreamGap | CommandEnd


class Execs:
    """Commands in sandboxes. Errors of every method: those of `Access.serving`, and `exec.*`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    # ---------------------------------------------------------------- start

    async def run(self, workspace: str, sandbox_id: str, command: Command) -> CommandResult:
        """Runs a command to its end. Cancelling the call kills it, unless `detach`.

        Raises `exec.timeout` and `exec.sandbox_gone` with the fields of a result in their details.
        """
        entry, guest = await self._access.serving(workspace, sandbox_id)
        request = self._counted(entry, command)
        out, err = OutputCollector(command.max_output), OutputCollector(command.max_output)
        end: CommandEnd | None = None
        with self._access.busy(entry):
            try:
                # Its time begins when it has started: waiting for its turn is no part of it.
                async with guest.exec(request) as call, Patience(entry, command.timeout + HOST_GRACE):
                    async for frame in call:
                        if isinstance(frame, Output):
                            entry.traffic.out(len(frame.data))
                            (out if frame.stream == STDOUT else err).add(frame.data)
                        elif isinstance(frame, Gap):
                            (err if frame.stream == STDERR else out).gap(frame.bytes)
                        elif isinstance(frame, Exit):
                            end = end_of(frame)
            except TimeoutError:
                end = CommandEnd(137, "timeout", command.timeout * 1000, "SIGKILL", 9, "ended by the clock of the host")
            except ClocheError as error:
                told = await lost(entry, error)
                raise _with_result(told, _result(command, _gone(told), out, err)) from error
        assert end is not None, "a call without an exception has seen its exit frame"
        metrics.execs.labels(end.reason).inc()
        metrics.exec_seconds.observe(end.duration_ms / 1000)
        result = _result(command, end, out, err)
        if end.reason == "timeout":
            raise timed_out(command, result)
        return result

    async def stream(self, workspace: str, sandbox_id: str, command: Command) -> ExecStream:
        """Starts a command; raises at once what a blocking call would raise at once.

        Closing the stream early kills the command, unless `detach`.
        """
        entry, guest = await self._access.serving(workspace, sandbox_id)
        call = guest.exec(self._counted(entry, command, limited=False))
        return await self._open(entry, call, command.encoding, command.timeout + HOST_GRACE)

    async def start(self, workspace: str, sandbox_id: str, command: Command) -> int:
        """Starts a detached command and returns its pid in the guest at once."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        request = self._counted(entry, command, limited=False)
        with self._access.busy(entry):
            async with guest.exec(request) as call:
                return call.started.pid

    # ---------------------------------------------------------------- afterwards

    async def list(self, workspace: str, sandbox_id: str) -> list[ExecInfo]:
        _, guest = await self._access.serving(workspace, sandbox_id)
        return await guest.execs()

    async def get(
        self, workspace: str, sandbox_id: str, exec_id: str, encoding: str
    ) -> tuple[ExecInfo, CommandResult | None]:
        """What is known of a command, with its recorded output when it has ended. Raises `exec.not_found`."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        info = await guest.exec_info(exec_id)
        if info.exit is None or not info.detach:
            return info, None
        command = Command(exec_id, encoding=encoding)
        out, err = OutputCollector(command.max_output), OutputCollector(command.max_output)
        async with guest.exec_output(exec_id) as call:
            async for frame in call:
                if isinstance(frame, Output):
                    entry.traffic.out(len(frame.data))
                    (out if frame.stream == STDOUT else err).add(frame.data)
        result = _result(command, end_of(info.exit), out, err)
        return info, _with_losses(result, info.exit, out, err)

    async def attach(self, workspace: str, sandbox_id: str, exec_id: str, offset: int, encoding: str) -> ExecStream:
        """Follows a detached command from an output offset. Closing the stream leaves it running."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        call = guest.exec_output(exec_id, offset)
        return await self._open(entry, call, encoding, None)

    async def kill(self, workspace: str, sandbox_id: str, exec_id: str) -> None:
        _, guest = await self._access.serving(workspace, sandbox_id)
        await guest.exec_kill(exec_id)

    # ---------------------------------------------------------------- inside

    def _counted(self, entry: Entry, command: Command, *, limited: bool = True) -> ExecRequest:
        """What is asked of the guest, counted. Raises `exec.too_large`, and then `budget.exceeded`."""
        request = _request(command, entry, limited=limited)
        self._access.count_exec(entry)
        entry.traffic.bytes_in += len(command.stdin or b"")
        return request

    async def _open(self, entry: Entry, call: ExecCall, encoding: str, timeout: float | None) -> ExecStream:
        with self._access.busy(entry):  # also while it waits for its turn
            try:
                await call.__aenter__()
            except ClocheError as error:
                raise await lost(entry, error) from error
            return ExecStream(entry, call, encoding, timeout, self._access)


class ExecStream:
    """The output of a running command; iterate once, and always `aclose`.

    The iteration ends with exactly one `CommandEnd`, or raises.
    """

    def __init__(self, entry: Entry, call: ExecCall, encoding: str, timeout: float | None, access: Access) -> None:
        self._entry = entry
        self._call = call
        self._timeout = timeout
        self._decoders = {STDOUT: ChunkDecoder(encoding), STDERR: ChunkDecoder(encoding)}
        self._offset = 0
        self._held = contextlib.ExitStack()
        self._held.enter_context(access.busy(entry))

    async def aclose(self) -> None:
        self._held.close()
        await self._call.__aexit__(None, None, None)

    async def __aiter__(self) -> AsyncIterator[StreamItem]:
        try:
            while True:
                # The deadline covers waiting for the guest, never the time a slow client takes.
                async with Patience(self._entry, self._timeout):
                    frame: Frame | None = await anext(self._call, None)
                if frame is None:
                    return
                for item in self._translate(frame):
                    yield item
        except TimeoutError:
            limit = (self._timeout or 0) * 1000
            yield CommandEnd(137, "timeout", limit, "SIGKILL", 9, "ended by the clock of the host")
        except ClocheError as error:
            raise await lost(self._entry, error) from error

    def _resume_at(self, stream: int) -> int | None:
        """Bytes that are held back as half a character have to come again."""
        if any(decoder.pending for number, decoder in self._decoders.items() if number != stream):
            return None
        return self._offset - self._decoders[stream].pending

    def _translate(self, frame: Frame) -> Iterator[StreamItem]:
        if isinstance(frame, Output):
            self._offset = frame.offset + len(frame.data)
            self._entry.traffic.out(len(frame.data))
            if text := self._decoders[frame.stream].feed(frame.data):
                yield StreamChunk(STREAM_NAMES[frame.stream], text, self._resume_at(frame.stream))
        elif isinstance(frame, Gap):
            self._offset = frame.offset + frame.bytes
            for number, decoder in self._decoders.items():
                # A character that a loss has cut stays half: what comes behind it is not its other half.
                if frame.stream in (0, number) and (rest := decoder.finish()):
                    yield StreamChunk(STREAM_NAMES[number], rest, None)
            yield StreamGap(STREAM_NAMES.get(frame.stream, "both"), frame.bytes, self._offset)
        elif isinstance(frame, Exit):
            for number, name in STREAM_NAMES.items():
                if rest := self._decoders[number].finish():
                    yield StreamChunk(name, rest, self._offset)
            metrics.execs.labels(frame.reason).inc()
            metrics.exec_seconds.observe(frame.duration_ms / 1000)
            yield end_of(frame)


async def lost(entry: Entry, error: ClocheError) -> ClocheError:
    """The error a caller gets: a lost link of a dead machine means that the sandbox is gone."""
    if error.code != "sandbox.unreachable":
        return error
    if entry.record.status in ASLEEP:
        return ClocheError(
            "exec.suspended",
            f"sandbox {entry.record.id} was hibernated while the command ran; the command goes on when it wakes up",
            details={"sandbox_status": entry.record.status.value},
        )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(NOTICE_TIMEOUT):
            await entry.ended.wait()
    machine_ended = entry.machine is None or entry.machine.ended
    if not entry.ended.is_set() and not machine_ended:
        return error
    termination = entry.record.termination
    why = termination.detail or termination.reason.value if termination else "its machine has ended"
    return ClocheError(
        "exec.sandbox_gone",
        f"sandbox {entry.record.id} went away while the command ran: {why}",
        details={"sandbox_status": entry.record.status.value},
    )


def laid_out(
    entry: Entry,
    shell: str | None,
    argv: Sequence[str] | None,
    env: Mapping[str, str],
    cwd: str | None,
    user: str | None,
) -> dict[str, Any]:
    """Environment, directory and user of a command in a sandbox. Raises `exec.too_large`, `request.invalid`."""
    defaults = entry.record.defaults
    if entry.record.is_read:
        defaults = replace(defaults, env={**guest_env(entry.record.grants), **defaults.env})
    merged: dict[str, Any] = with_defaults(Command("", env=env, cwd=cwd, user=user), defaults)
    check_size(argv, shell, merged["env"])
    return merged


def _request(command: Command, entry: Entry, *, limited: bool = True) -> ExecRequest:
    merged = laid_out(entry, command.shell, command.argv, command.env, command.cwd, command.user)
    return ExecRequest(
        tag=tag_text(command.shell, command.argv) if command.detach else "",
        id=command.exec_id,
        argv=command.argv,
        shell=command.shell,
        stdin=command.stdin,
        timeout_ms=max(1, round(command.timeout * 1000)),
        detach=command.detach,
        max_output=command.max_output if limited or command.kill_on_limit else 0,
        kill_on_limit=command.kill_on_limit,
        **merged,
    )


def end_of(frame: Exit) -> CommandEnd:
    """How a command ended, as the guest says it."""
    killed = frame.signal, frame.signal_number, frame.detail
    used = frame.user_ms, frame.system_ms, frame.max_rss_kb
    return CommandEnd(frame.exit_code, frame.reason, frame.duration_ms, *killed, *used, frame.oom_kills)


def _gone(error: ClocheError) -> CommandEnd:
    reason = "sandbox_gone" if error.code == "exec.sandbox_gone" else "cancelled"
    return CommandEnd(137, reason, 0.0, detail=error.message)


def _result(command: Command, end: CommandEnd, out: OutputCollector, err: OutputCollector) -> CommandResult:
    stdout, stderr = out.collect(command.encoding), err.collect(command.encoding)
    return CommandResult(
        exec_id=command.exec_id,
        end=end,
        stdout=stdout.text,
        stderr=stderr.text,
        encoding=command.encoding,
        stdout_dropped=stdout.dropped,
        stderr_dropped=stderr.dropped,
        stdout_head_bytes=stdout.head_bytes,
        stderr_head_bytes=stderr.head_bytes,
    )


def _with_losses(result: CommandResult, frame: Exit, out: OutputCollector, err: OutputCollector) -> CommandResult:
    """A ring forgets without saying of which stream: the difference to what was written is what is lost."""
    lost_out = max(0, frame.stdout_bytes - out.kept)
    lost_err = max(0, frame.stderr_bytes - err.kept)
    return replace(result, stdout_dropped=lost_out, stderr_dropped=lost_err)


def timed_out(command: Command, result: CommandResult) -> ClocheError:
    """The error for a command that ran into its timeout; the partial output is in its details."""
    error = ClocheError(
        "exec.timeout",
        timeout_told(command.timeout, result.end),
        details={"timeout_seconds": command.timeout},
    )
    return _with_result(error, result)


def _with_result(error: ClocheError, result: CommandResult) -> ClocheError:
    if error.code in {"exec.timeout", "exec.sandbox_gone", "sandbox.unreachable"}:
        error.details["result"] = result
    return error
