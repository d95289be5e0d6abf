"""Commands: the stream of a running one, and the handle of one in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, AnyStr, Generic, Self

from .. import _aio, _call, _sse, _wire
from .._call import SILENCE, Call
from ..errors import ConnectFailed, ConnectionLost, ProtocolError, WaitTimeout
from ..models import ExecEvent, ExecInfo, ExecResult, Exit, Stderr, Stdout
from .transport import AsyncTransport

RESUME_DELAYS = (0.1, 0.3, 1.0, 3.0, 5.0)
POLL_FIRST = 0.02
POLL_LONGEST = 1.0


class AsyncExecStream(Generic[AnyStr]):
    """The events of a command, in order: `Stdout`, `Stderr`, perhaps `Gap`, and at last exactly one `Exit`.

    Iterate over it. If the connection ends before the `Exit` event, `ConnectionLost` is raised: an end
    without a result is never taken for success. Leaving the loop early closes the connection, which
    cancels a command that was not started with `detach=True`.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        call: Call,
        *,
        on_stdout: Callable[[AnyStr], object] | None = None,
        on_stderr: Callable[[AnyStr], object] | None = None,
        resume: bool = False,
    ) -> None:
        self.exec_id = call.exec_id
        self.exit: Exit | None = None
        self.offset: int | None = None
        self._transport = transport
        self._call = call
        self._on_stdout: Callable[[AnyStr], object] | None = on_stdout
        self._on_stderr: Callable[[AnyStr], object] | None = on_stderr
        self._resume = resume
        self._events: _aio.Gen[ExecEvent[AnyStr]] = self._run()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ExecEvent[AnyStr]:
        return await self._events.__anext__()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self) -> _aio.Gen[ExecEvent[AnyStr]]:
        async with aclosing(self._resumed()) as events:
            async for event in events:
                if isinstance(event, Exit):
                    self.exit = event
                elif isinstance(event, Stdout):
                    await _aio.call(self._on_stdout, event.data)
                elif isinstance(event, Stderr):
                    await _aio.call(self._on_stderr, event.data)
                yield event
                if isinstance(event, Exit):
                    return

    async def _resumed(self) -> _aio.Gen[ExecEvent[AnyStr]]:
        failures = 0
        while True:
            try:
                async with aclosing(self._connection()) as events:
                    async for event in events:
                        failures = 0
                        if not isinstance(event, Exit) and event.offset is not None:
                            self.offset = event.offset
                        yield event
            except (ConnectionLost, ConnectFailed):
                if not self._resume or failures >= len(RESUME_DELAYS):
                    raise
            await _aio.sleep(RESUME_DELAYS[failures])
            failures += 1

    async def _connection(self) -> _aio.Gen[ExecEvent[AnyStr]]:
        call = self._call
        if self._resume and self.offset is not None:
            call = replace(call, params={**call.params, "from": str(self.offset)})
        async with self._transport.open(call) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise ProtocolError("the server answered without an event stream")
            parser = _sse.Parser()
            chunks = response.aiter_raw()
            while True:
                with _call.translated(call):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                for message in parser.feed(chunk):
                    event = self._decode(call, message, response.headers.get("x-request-id", ""))
                    if event is not None:
                        yield event
        lost = ConnectionLost("the stream ended without the result of the command")
        lost.exec_id = self.exec_id
        raise lost

    def _decode(self, call: Call, message: _sse.Message, request_id: str) -> ExecEvent[AnyStr] | None:
        data = _wire.record(_wire.parse_json(message.data.encode()))
        if message.event == "error":
            text = str(data.get("error") or "the command could not be run")
            raise _call.told(call, {**data, "error": text}, 200, request_id)
        return _wire.stream_event(message.event, data, message.id, call.encoding)


async def collect(stream: AsyncExecStream[AnyStr], empty: AnyStr) -> ExecResult[AnyStr]:
    """Go through a stream and put its result together."""
    out: list[Any] = []
    err: list[Any] = []
    async with stream:
        async for event in stream:
            if isinstance(event, Stdout):
                out.append(event.data)
            elif isinstance(event, Stderr):
                err.append(event.data)
    end = stream.exit
    if end is None:
        raise ProtocolError("the stream has no end")
    return ExecResult(
        exec_id=stream.exec_id,
        stdout=empty.join(out),
        stderr=empty.join(err),
        exit_code=end.exit_code,
        duration_ms=end.duration_ms,
        termination=end.termination,
        truncated=end.truncated,
        stdout_dropped_bytes=end.stdout_dropped_bytes,
        stderr_dropped_bytes=end.stderr_dropped_bytes,
    )


class AsyncExec:
    """A command in the background. It goes on when the connection or this program ends."""

    def __init__(
        self, transport: AsyncTransport, sandbox_id: str, exec_id: str, pid: int | None = None
    ) -> None:
        self.exec_id = exec_id
        self.pid = pid
        self._transport = transport
        self._path = _call.path("sandboxes", sandbox_id, "exec", exec_id)

    async def info(self) -> ExecInfo:
        """How it is doing now; `info().running` tells whether it has ended."""
        data = await self._transport.json(Call("GET", self._path, kind="safe"))
        return _wire.exec_info(_wire.record(data))

    def stream(
        self,
        from_offset: int = 0,
        *,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
    ) -> AsyncExecStream[str]:
        """The events from an output offset on, up to the end of the command.

        A broken connection is taken up again where it broke. What the server no longer keeps is told as a
        `Gap` event.
        """
        call = Call(
            "GET",
            f"{self._path}/stream",
            params=_call.params(**{"from": from_offset}),
            kind="safe",
            silence=SILENCE,
            exec_id=self.exec_id,
            accept="text/event-stream",
        )
        return AsyncExecStream(self._transport, call, on_stdout=on_stdout, on_stderr=on_stderr, resume=True)

    async def wait(self, timeout: float | None = None) -> Exit:
        """Wait for the end. After `timeout` seconds `WaitTimeout` is raised and the command goes on."""
        if timeout is not None:
            return _exit_of(await self._poll(timeout))
        async with self.stream() as stream:
            async for event in stream:
                if isinstance(event, Exit):
                    return event
        raise ProtocolError("the stream has no end")

    async def result(self, timeout: float | None = None) -> ExecResult[str]:
        """Wait for the end and return exit code and output, as far as the server keeps it (1 MiB)."""
        if timeout is not None:
            return await self._poll(timeout)
        info = await self.info()
        if info.result is None:
            await self.wait()
            info = await self.info()
        if info.result is None:
            raise ProtocolError("the command has ended but the server has no result of it")
        return info.result

    async def kill(self) -> None:
        """Kill the command and all its children."""
        await self._transport.json(Call("DELETE", self._path))

    async def _poll(self, timeout: float) -> ExecResult[str]:
        deadline = time.monotonic() + timeout
        pause = POLL_FIRST
        while True:
            info = await self.info()
            if info.result is not None:
                return info.result
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"the command still runs after {timeout:g} s")
            await _aio.sleep(min(pause, left))
            pause = min(pause * 1.5, POLL_LONGEST)

    def __repr__(self) -> str:
        return f"AsyncExec({self.exec_id!r}, pid={self.pid})"


def _exit_of(result: ExecResult[Any]) -> Exit:
    return Exit(
        exit_code=result.exit_code,
        duration_ms=result.duration_ms,
        termination=result.termination,
        truncated=result.truncated,
        stdout_dropped_bytes=result.stdout_dropped_bytes,
        stderr_dropped_bytes=result.stderr_dropped_bytes,
    )
