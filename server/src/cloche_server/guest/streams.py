"""Calls of the agent whose answers are streams: the output of a command, the bytes of a file."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Self

from ..core.errors import ClocheError
from ..core.trees import FileHead
from .errors import protocol_error
from .frames import Frame, FrameDecoder, Heartbeat, Started
from .h2stream import Response

IDLE_SECONDS = 30.0
"""The agent sends a heartbeat at least every 10 s; three of them missed, and the stream counts as lost."""


class ExecCall:
    """Output of one command: `async with client.exec(...) as call: async for frame in call: ...`

    Entering the block starts the command (or attaches to it) and raises what the agent answers. Leaving
    it before the exit frame resets the stream; the agent then kills a command that is not detached. The
    last frame is always an `Exit`: an iteration that ends without an exception has seen one.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[Response]],
        kill: Callable[[], Awaitable[None]] | None,
        *,
        attached: bool,
        idle_timeout: float = IDLE_SECONDS,
    ) -> None:
        """`kill` ends the command by its id; None when resetting the stream does that."""
        self._start = start
        self._kill = kill
        self._attached = attached
        self._idle = idle_timeout
        self._decoder = FrameDecoder(attached=attached)
        self._frames: deque[Frame] = deque()
        self._response: Response | None = None
        self._started: Started | None = None
        self._cancelled = False

    @property
    def started(self) -> Started:
        """The first frame; after `exec_output` there from the first step of the iteration on.

        Raises RuntimeError before that.
        """
        if self._started is None:
            raise RuntimeError("there has been no started frame yet")
        return self._started

    async def __aenter__(self) -> Self:
        self._response = await self._start()
        if self._attached:
            try:
                await self._fill()
            except BaseException:
                await self._response.aclose()
                raise
            first = self._frames.popleft()
            assert isinstance(first, Started), "the decoder lets nothing else be the first frame"
            self._started = first
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._response is not None:
            await self._response.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Frame:
        """The next `Output`, `Gap` or `Exit`; heartbeats only keep the call alive.

        Raises `exec.cancelled` after `cancel()`, `guest.protocol` on nonsense, LinkLost, LinkTimeout.
        """
        while True:
            while self._frames:
                frame = self._frames.popleft()
                if isinstance(frame, Started):
                    self._started = frame
                elif not isinstance(frame, Heartbeat):
                    return frame
            if self._decoder.done:
                raise StopAsyncIteration
            if self._cancelled:
                raise ClocheError("exec.cancelled", "The command was cancelled.")
            await self._fill()

    async def _fill(self) -> None:
        if self._response is None:
            raise RuntimeError("the call has to be entered with `async with` first")
        while not self._frames:
            try:
                chunk = await self._response.next_chunk(self._idle)
            except ClocheError:
                if self._cancelled:
                    return
                raise
            if chunk is None:
                self._decoder.end()
                return
            self._frames.extend(self._decoder.feed(chunk))

    async def cancel(self) -> None:
        """Kill the command with all its processes and end the iteration with `exec.cancelled`.

        To see the rest of the output and the exit frame, use `GuestClient.exec_kill` and go on reading.
        """
        self._cancelled = True
        if self._response is not None:
            await self._response.aclose()
        if self._kill is not None:
            await self._kill()


class FileBody:
    """A file being read. Iterate over it or `read` it, inside `async with` or to its end.

    `size` in bytes, None where the kernel does not tell (as in /proc); `mode` permission bits.
    """

    def __init__(self, response: Response, head: FileHead, *, idle_timeout: float) -> None:
        self._response = response
        self._idle = idle_timeout
        self.head = head
        self.size = head.size
        self.mode = head.mode
        self.mtime_ns = head.mtime_ns

    async def aiter_bytes(self) -> AsyncGenerator[bytes, None]:
        """Chunks of at most 128 KiB. Another length than announced is an error, never a short body."""
        count = 0
        async for chunk in self._response.aiter_bytes(idle_timeout=self._idle):
            count += len(chunk)
            yield chunk
        if self.size is not None and count != self.size:
            raise protocol_error("a file of another length than announced")

    def __aiter__(self) -> AsyncGenerator[bytes, None]:
        return self.aiter_bytes()

    async def read(self, limit: int) -> bytes:
        """The whole file. Raises `request.too_large` when it has more than `limit` bytes."""
        parts: list[bytes] = []
        count = 0
        async with self:
            async for chunk in self.aiter_bytes():
                count += len(chunk)
                if count > limit:
                    raise ClocheError("request.too_large", f"The file has more than {limit} bytes.")
                parts.append(chunk)
        return b"".join(parts)

    async def aclose(self) -> None:
        """Stop the transfer. Never waits."""
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
