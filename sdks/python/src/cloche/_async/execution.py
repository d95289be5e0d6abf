"""Commands: the stream of a running one, and the handle of one in the background."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, AnyStr, Generic, Self

from .. import _aio, _call, _sse, _wire
from .._call import SILENCE, Call
from .._output import LIMIT, Collector
from ..errors import ConnectFailed, ConnectionLost, ProtocolError, WaitTimeout
from ..models import ExecEvent, ExecInfo, ExecResult, Exit, Gap, Stderr, Stdout
from .transport import AsyncBody, AsyncTransport

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
        as_text: bool = False,
    ) -> None:
        self.exec_id = call.exec_id
        self.exit: Exit | None = None
        self.offset: int | None = None
        self._transport = transport
        self._call = call
        self._on_stdout: Callable[[AnyStr], object] | None = on_stdout
        self._on_stderr: Callable[[AnyStr], object] | None = on_stderr
        self._resume = resume
        self._body: AsyncBody | None = None
        self._parser = _sse.Parser()
        self._messages: deque[_sse.Message] = deque()
        self._events: deque[ExecEvent[Any]] = deque()
        self._decoder = _wire.TextDecoder() if as_text else None
        self._failures = 0
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ExecEvent[AnyStr]:
        if self.exit is not None:
            await self._finish()
        if self._closed:
            raise StopAsyncIteration
        try:
            event = await self._next()
            if isinstance(event, Stdout):
                await _aio.call(self._on_stdout, event.data)
            elif isinstance(event, Stderr):
                await _aio.call(self._on_stderr, event.data)
        except BaseException:
            await self.aclose()
            raise
        if isinstance(event, Exit):
            self.exit = event
        return event

    async def _finish(self) -> None:
        """After the last event: a body that is read to its end leaves a connection that can be used again."""
        try:
            if self._body is not None:
                await self._body.next()
        except ConnectionLost:
            pass
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; the iteration is over."""
        self._closed = True
        await self._disconnect()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _next(self) -> ExecEvent[AnyStr]:
        while True:
            try:
                event = await self._receive()
            except (ConnectionLost, ConnectFailed):
                await self._disconnect()
                if not self._resume or self._failures >= len(RESUME_DELAYS):
                    raise
                await _aio.sleep(RESUME_DELAYS[self._failures])
                self._failures += 1
            else:
                self._failures = 0
                return event

    async def _receive(self) -> ExecEvent[AnyStr]:
        if self._events:
            return self._events.popleft()
        body = self._body or await self._connect()
        while True:
            while self._messages and not self._events:
                self._accept(self._messages.popleft(), body.header("x-request-id"))
            if self._events:
                return self._events.popleft()
            chunk = await body.next()
            if chunk is None:
                lost = ConnectionLost("the stream ended without the result of the command")
                lost.exec_id = self.exec_id
                raise lost
            self._messages.extend(self._parser.feed(chunk))

    async def _connect(self) -> AsyncBody:
        call = self._call
        if self._resume and self.offset is not None:
            call = replace(call, params={**call.params, "from": str(self.offset)})
        self._body = body = await self._transport.open(call)
        self._parser = _sse.Parser()
        self._messages.clear()
        if not body.header("content-type").startswith("text/event-stream"):
            raise ProtocolError("the server answered without an event stream")
        return body

    async def _disconnect(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            await body.aclose()

    def _accept(self, message: _sse.Message, request_id: str) -> None:
        data = _wire.record(_wire.parse_json(message.data.encode()))
        if message.event == "error":
            text = str(data.get("error") or "the command could not be run")
            raise _call.told(self._call, {**data, "error": text}, 200, request_id)
        event = _wire.stream_event(message.event, data, message.id, self._call.encoding)
        if event is None:
            return
        if not isinstance(event, Exit) and event.offset is not None:
            self.offset = event.offset
        self._events.extend([event] if self._decoder is None else self._decoder.feed(event))


async def collect(stream: AsyncExecStream[str], limit: int | None) -> ExecResult[str]:
    """Go through a stream and put its result together, with at most `limit` bytes of each output."""
    out, err = (Collector(limit or LIMIT) for _ in range(2))
    end: Exit | None = None
    async with stream:
        async for event in stream:
            if isinstance(event, Stdout):
                out.add(event.data)
            elif isinstance(event, Stderr):
                err.add(event.data)
            elif isinstance(event, Gap):
                (err if event.stream == "stderr" else out).miss(event.bytes)
            else:
                end = event
    if end is None:
        raise ProtocolError("the stream has no end")
    return ExecResult(
        exec_id=stream.exec_id,
        stdout=out.text(),
        stderr=err.text(),
        exit_code=end.exit_code,
        duration_ms=end.duration_ms,
        termination=end.termination,
        truncated=bool(out.dropped or err.dropped),
        stdout_dropped_bytes=out.dropped,
        stderr_dropped_bytes=err.dropped,
    )


class AsyncExec:
    """A command in the background. It goes on when the connection or this program ends."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str, exec_id: str, pid: int | None = None) -> None:
        self.exec_id = exec_id
        self.pid = pid
        self._transport = transport
        self._path = _call.path("sandboxes", sandbox_id, "exec", exec_id)

    async def info(self) -> ExecInfo:
        """How it is doing now; `info().running` tells whether it has ended."""
        return await self._info("utf-8")

    async def _info(self, encoding: _wire.Output) -> ExecInfo:
        query = _call.params(encoding=encoding)
        data = await self._transport.json(Call("GET", self._path, params=query, kind="safe"))
        return _wire.exec_info(_wire.record(data), encoding)

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
        call = self._stream_call(from_offset)
        return AsyncExecStream(
            self._transport, call, on_stdout=on_stdout, on_stderr=on_stderr, resume=True, as_text=True
        )

    def stream_bytes(self, from_offset: int = 0) -> AsyncExecStream[bytes]:
        """As `stream`, with the output as the bytes it is."""
        return AsyncExecStream(self._transport, self._stream_call(from_offset), resume=True)

    def _stream_call(self, from_offset: int) -> Call:
        # In bytes also for text: an offset may lie within a character, where the server could not resume text.
        return Call(
            "GET",
            f"{self._path}/stream",
            params={"from": str(from_offset), "encoding": "base64"},
            kind="safe",
            silence=SILENCE,
            exec_id=self.exec_id,
            encoding="base64",
            accept="text/event-stream",
        )

    async def wait(self, timeout: float | None = None) -> Exit:
        """Wait for the end. After `timeout` seconds `WaitTimeout` is raised and the command goes on."""
        if timeout is not None:
            return _exit_of(_finished(await self._poll(timeout)))
        async with self.stream_bytes() as stream:
            async for event in stream:
                if isinstance(event, Exit):
                    return event
        raise ProtocolError("the stream has no end")

    async def result(self, timeout: float | None = None) -> ExecResult[str]:
        """Wait for the end and return exit code and output, as far as the server keeps it (1 MiB)."""
        await self._until_finished(timeout)
        return _finished(await self._info("utf-8"))

    async def result_bytes(self, timeout: float | None = None) -> ExecResult[bytes]:
        """As `result`, with the output as the bytes it is."""
        await self._until_finished(timeout)
        result: ExecResult[Any] = _finished(await self._info("base64"))
        return result

    async def _until_finished(self, timeout: float | None) -> None:
        if timeout is not None:
            await self._poll(timeout)
        elif (await self.info()).running:
            await self.wait()

    async def kill(self) -> None:
        """Kill the command and all its children."""
        await self._transport.json(Call("DELETE", self._path))

    async def _poll(self, timeout: float) -> ExecInfo:
        deadline = time.monotonic() + timeout
        pause = POLL_FIRST
        while True:
            info = await self.info()
            if not info.running:
                return info
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"the command still runs after {timeout:g} s")
            await _aio.sleep(min(pause, left))
            pause = min(pause * 1.5, POLL_LONGEST)

    def __repr__(self) -> str:
        return f"AsyncExec({self.exec_id!r}, pid={self.pid})"


def _finished(info: ExecInfo) -> ExecResult[str]:
    if info.result is None:
        raise ProtocolError("the command has ended but the server has no result of it")
    return info.result


def _exit_of(result: ExecResult[Any]) -> Exit:
    return Exit(
        exit_code=result.exit_code,
        duration_ms=result.duration_ms,
        termination=result.termination,
        truncated=result.truncated,
        stdout_dropped_bytes=result.stdout_dropped_bytes,
        stderr_dropped_bytes=result.stderr_dropped_bytes,
    )
