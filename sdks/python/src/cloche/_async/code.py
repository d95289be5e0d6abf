"""Code that keeps its state: runs, their events, and contexts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from .. import _aio, _call, _sse, _wire, _wire_code
from .._call import SLOW, Call
from ..code import CodeContext, CodeEnd, CodeEvent, CodeException, CodeResult, CodeStderr, CodeStdout, Execution
from ..errors import ConnectionLost, ProtocolError
from ..models import SandboxInfo
from .transport import AsyncBody, AsyncTransport

ContextList = Sequence[CodeContext]


class AsyncCodeStream:
    """The events of a run, in order; the last one is a `CodeEnd`. The code starts with the iteration.

    Leaving the loop early closes the connection, which interrupts the code. If the connection ends before the end
    of the code is known, `ConnectionLost` is raised.
    """

    def __init__(self, transport: AsyncTransport, call: Call) -> None:
        self._transport = transport
        self._call = call
        self._body: AsyncBody | None = None
        self._parser = _sse.Parser()
        self._messages: deque[_sse.Message] = deque()
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CodeEvent:
        if self._ended:
            await self._finish()
            raise StopAsyncIteration
        try:
            event = await self._next()
        except BaseException:
            await self.aclose()
            raise
        self._ended = isinstance(event, CodeEnd)
        return event

    async def _next(self) -> CodeEvent:
        body = self._body
        if body is None:
            body = self._body = await self._transport.open(self._call)
            if not body.header("content-type").startswith("text/event-stream"):
                raise ProtocolError("the server answered without an event stream")
        while True:
            while self._messages:
                message = self._messages.popleft()
                data = _wire.record(_wire.parse_json(message.data.encode()))
                if message.event == "failed":
                    text = str(data.get("error") or "the code could not be run")
                    raise _call.told(self._call, {**data, "error": text}, 200, body.header("x-request-id"))
                event = _wire_code.event(message.event, data)
                if event is not None:
                    return event
            chunk = await body.next()
            if chunk is None:
                raise ConnectionLost("the stream ended without the end of the code")
            self._messages.extend(self._parser.feed(chunk))

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
        """Close the connection; code that still runs is interrupted."""
        self._ended = True
        body, self._body = self._body, None
        if body is not None:
            await body.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncContexts:
    """The contexts of a sandbox, at most 24. `python`, `bash` and other languages each have one by themselves."""

    def __init__(self, transport: AsyncTransport, path: str) -> None:
        self._transport = transport
        self._path = f"{path}/code/contexts"

    async def create(self, language: str = "python", *, cwd: str | None = None) -> CodeContext:
        """Make one with a kernel of its own."""
        call = Call("POST", self._path, json=_wire.given(language=language, cwd=cwd), silence=SLOW)
        return _wire_code.context(_wire.record(await self._transport.json(call)))

    async def list(self) -> ContextList:
        """All there are."""
        data = await self._transport.json(Call("GET", self._path, kind="safe", silence=SLOW))
        return [_wire_code.context(item) for item in _wire.records(_wire.record(data).get("contexts"))]

    async def delete(self, context: str | CodeContext) -> None:
        """End one and its kernel."""
        await self._transport.json(Call("DELETE", self._of(context), silence=SLOW))

    async def interrupt(self, context: str | CodeContext) -> bool:
        """Interrupt what runs in one, as Ctrl-C does; False when nothing ran. The state is kept."""
        data = await self._transport.json(Call("POST", self._of(context, "interrupt"), silence=SLOW))
        return bool(_wire.record(data).get("interrupted"))

    async def restart(self, context: str | CodeContext) -> None:
        """Start its kernel anew; the state is lost."""
        await self._transport.json(Call("POST", self._of(context, "restart"), silence=SLOW))

    async def answer(self, context: str | CodeContext, text: str) -> None:
        """Give code that asks for input a line."""
        await self._transport.json(Call("POST", self._of(context, "input"), json={"text": text}, silence=SLOW))

    def _of(self, context: str | CodeContext, *verb: str) -> str:
        found = context.id if isinstance(context, CodeContext) else context
        return self._path + "/" + "/".join(_call.path(found, *verb).split("/")[2:])


class AsyncCode:
    """What `AsyncSandbox` can do with code. Not for direct use."""

    _transport: AsyncTransport
    _path: str
    info: SandboxInfo

    @property
    def contexts(self) -> AsyncContexts:
        """The contexts that code keeps its state in."""
        return AsyncContexts(self._transport, self._path)

    async def run_code(
        self,
        code: str,
        *,
        language: str | None = None,
        context: str | CodeContext | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        on_result: Callable[[CodeResult], object] | None = None,
        on_error: Callable[[CodeException], object] | None = None,
    ) -> Execution:
        """Run code and wait for it. Variables are there in the next run of the same language, or of the same `context`.

        An exception of the code is `error` of what is returned, and a timeout or the end of its kernel is its `status`.
        Callbacks see everything as it comes. `env` and `cwd` are for this run alone; `timeout` is in seconds.
        """
        gathered = _wire_code.Gatherer()
        stream = self.run_code_stream(code, language=language, context=context, timeout=timeout, env=env, cwd=cwd)
        async with stream:
            async for event in stream:
                gathered.add(event)
                if isinstance(event, CodeStdout):
                    await _aio.call(on_stdout, event.text)
                elif isinstance(event, CodeStderr):
                    await _aio.call(on_stderr, event.text)
                elif isinstance(event, CodeResult):
                    await _aio.call(on_result, event)
                elif isinstance(event, CodeException):
                    await _aio.call(on_error, event)
        return gathered.execution()

    def run_code_stream(
        self,
        code: str,
        *,
        language: str | None = None,
        context: str | CodeContext | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        input: bool | None = None,
    ) -> AsyncCodeStream:
        """Run code and iterate over its events. With `input` it may ask for some; see `contexts.answer`."""
        chosen = context.id if isinstance(context, CodeContext) else context
        fields: dict[str, Any] = {"language": language, "context": chosen, "timeout_seconds": timeout, "cwd": cwd}
        body = _wire_code.body(code, **fields, env=dict(env) if env else None, input=input)
        call = Call("POST", f"{self._path}/code", json=body, silence=SLOW, accept="text/event-stream")
        return AsyncCodeStream(self._transport, call)
