"""One call on the guest link: its buffers, and the response that a caller holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Final, Protocol

from ..core.errors import ClocheError
from .errors import LinkTimeout, protocol_error

STREAM_WINDOW: Final = 1024 * 1024
"""Most bytes that one stream may have buffered here."""

_GRANT: Final = STREAM_WINDOW // 4
_CHUNK: Final = 128 * 1024
_SEND_MARK: Final = 128 * 1024


class Carrier(Protocol):
    """What a stream needs of its link."""

    loop: asyncio.AbstractEventLoop

    def want_write(self, stream: Stream) -> None: ...
    def grant(self, stream: Stream, size: int) -> None: ...
    def reset(self, stream: Stream) -> None: ...
    def suspect(self) -> None: ...
    def more_time(self, began: float, seconds: float) -> float: ...


def expire(waiter: asyncio.Future[None]) -> None:
    """Timer callback: the waiter gets a TimeoutError."""
    if not waiter.done():
        waiter.set_exception(TimeoutError())


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Stream:
    """State of one call. The link writes it, `Response` and the sender of the body read it."""

    __slots__ = (
        "_carrier",
        "_out",
        "_reader",
        "_sender",
        "_taken",
        "_unpaid",
        "began",
        "buf",
        "closed",
        "ended",
        "error",
        "headers",
        "id",
        "in_flight",
        "most",
        "out_end",
        "parked",
        "queued",
        "status",
    )

    def __init__(self, carrier: Carrier, number: int) -> None:
        self.id = number
        self.began = carrier.loop.time()
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.buf = bytearray()  # one buffer, because a list of one-byte chunks would weigh 60 times as much
        self.ended = False
        self.error: ClocheError | None = None
        self.closed = False
        self.out_end = True
        self.queued = self.parked = False
        self.most = 0  # 0: a call; else a tunnel, that may have so many bytes under way that nobody has read
        self.in_flight = 0
        self._out: memoryview | bytearray = memoryview(b"")
        self._taken = self._unpaid = 0
        self._carrier = carrier
        self._reader: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None

    # --- called by the link

    def wake(self) -> None:
        """Something has changed: let the reader and the sender look."""
        _wake(self._reader)
        _wake(self._sender)

    def fail(self, error: ClocheError) -> None:
        """End the call with `error`, unless the response is complete already."""
        if not self.ended and self.error is None:
            self.error = error
        self.closed = True
        self._out = memoryview(b"")
        self.wake()

    def received(self, data: bytes, padding: int) -> None:
        """Bytes of the body; `padding` is paid back at once because it is kept nowhere."""
        self.buf += data
        if padding:
            self.pay(padding)
        _wake(self._reader)

    @property
    def pending(self) -> int:
        """Bytes of the request body that wait to be sent."""
        return len(self._out)

    def take(self, limit: int) -> bytes:
        """Remove up to `limit` bytes of the request body."""
        out = self._out
        if isinstance(out, memoryview):
            self._out = out[limit:]
            return bytes(out[:limit])
        data = bytes(memoryview(out)[:limit])
        del out[:limit]
        if len(out) < _SEND_MARK:
            _wake(self._sender)
        return data

    # --- called by the side of the caller

    def send_all(self, body: bytes) -> None:
        """Hand over the whole request body; it is not copied."""
        self._out = memoryview(body)
        self._carrier.want_write(self)

    async def send_from(self, body: AsyncIterator[bytes], idle: float) -> None:
        """Send what the iterator yields, as fast as the agent takes it; returns early when the call is over.

        `idle`: seconds the agent may take no byte. The time the iterator takes is its own affair.
        """
        self._out = bytearray()
        try:
            async for chunk in body:
                view = memoryview(chunk)
                for at in range(0, len(view), _SEND_MARK):
                    if self._is_over():
                        return
                    self._append(view[at : at + _SEND_MARK])
                    await self._drained(idle)
            if not self._is_over():
                self.out_end = True
                self._carrier.want_write(self)
                while self.pending and not self._is_over():
                    await self._drained(idle, 1)
        finally:
            if isinstance(body, AsyncGenerator):
                await body.aclose()

    async def send(self, data: bytes) -> None:
        """Of a tunnel: send `data`, and wait while much waits already. Raises what has ended the call."""
        if isinstance(self._out, memoryview):
            self._out = bytearray(self._out)
        view = memoryview(data)
        for at in range(0, len(view), _SEND_MARK):
            if self.closed:
                raise self.error or ClocheError("internal", "The tunnel was closed already.")
            self._append(view[at : at + _SEND_MARK])
            await self._drained(None)

    def finish(self) -> None:
        """Of a tunnel: there is no more to send."""
        self.out_end = True
        self._carrier.want_write(self)

    def _is_over(self) -> bool:
        return self.closed or (self.status != 0 and not self.most)

    def _append(self, piece: memoryview) -> None:
        out = self._out
        if isinstance(out, bytearray):
            out += piece
            self._carrier.want_write(self)

    async def _drained(self, idle: float | None, mark: int = _SEND_MARK) -> None:
        while len(self._out) >= mark and not self._is_over():
            self._sender = self._carrier.loop.create_future()
            before = len(self._out)
            try:
                await self._timed(self._sender, idle)
            except TimeoutError:
                if len(self._out) == before and not self._carrier.more_time(self.began, idle or 0.0):
                    self._carrier.suspect()
                    raise LinkTimeout("took nothing of an upload", idle or 0.0) from None
            finally:
                self._sender = None

    async def _timed(self, waiter: asyncio.Future[None], seconds: float | None) -> None:
        # cheaper than asyncio.timeout, and this is on the path of every small call
        if seconds is None:
            await waiter
            return
        timer = self._carrier.loop.call_later(seconds, expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    async def wait(self, seconds: float | None, what: str, *, of: float | None = None) -> None:
        """Until the link has something for the reader. Raises LinkTimeout after `seconds`.

        `what` (the agent failed to do) and `of` (seconds, when these are the rest of more) word the error.
        """
        left = seconds
        try:
            while True:
                self._reader = self._carrier.loop.create_future()
                try:
                    await self._timed(self._reader, left)
                except TimeoutError:
                    left = self._carrier.more_time(self.began, left or 0.0)
                    if left:
                        continue
                    self._carrier.suspect()
                    raise LinkTimeout(what, of or seconds or 0.0) from None
                return
        finally:
            self._reader = None

    async def wait_headers(self, seconds: float) -> None:
        """Until the response has begun. Raises what ended the call if that comes first."""
        deadline = self._carrier.loop.time() + seconds
        while self.status == 0:
            if self.error is not None:
                raise self.error
            left = max(0.0, deadline - self._carrier.loop.time())
            await self.wait(left, "did not answer", of=seconds)

    def read_chunk(self) -> bytes:
        """Take buffered bytes out and give the agent credit for as many."""
        buf = self.buf
        if len(buf) <= _CHUNK:
            data = bytes(buf)
            buf.clear()
        else:
            data = bytes(memoryview(buf)[:_CHUNK])
            del buf[:_CHUNK]
        self.pay(len(data))
        return data

    def pay(self, size: int) -> None:
        """Give credit for `size` bytes, gathered so that there are few WINDOW_UPDATE frames."""
        self._unpaid += size
        if self._unpaid >= _GRANT and not self.ended and not self.closed:
            size, self._unpaid = self._unpaid, 0
            self._carrier.grant(self, size)

    def linger(self, seconds: float) -> None:
        """Nobody holds the call any more; it has so long to end by itself."""
        self._carrier.loop.call_later(seconds, self.abandon)

    def abandon(self) -> None:
        """The caller has no more interest: RST_STREAM(CANCEL) unless the call is complete."""
        self._carrier.reset(self)


class Response:
    """An answer of the agent. Close it, or read it to its end; better still use it in `async with`."""

    __slots__ = ("_stream", "headers", "sent_all", "status")

    def __init__(self, stream: Stream, *, sent_all: bool) -> None:
        self._stream = stream
        self.status: Final = stream.status
        self.headers: Final = stream.headers
        """Names in lower case; of a repeated header the last value."""
        self.sent_all: Final = sent_all
        """Whether the request body had been sent to its end when the answer came."""

    async def next_chunk(self, idle_timeout: float | None = 30.0) -> bytes | None:
        """The next at most 128 KiB of the body, None at its end. The agent gets credit for what is taken.

        `idle_timeout`: seconds of silence while waiting, None for ever. Raises LinkLost, LinkTimeout, StreamBroken,
        after everything that had arrived has been returned.
        """
        stream = self._stream
        while not stream.buf:
            if stream.ended:
                return None
            if stream.error is not None:
                raise stream.error
            if stream.closed:
                raise ClocheError("internal", "The answer was closed before it had been read.")
            await stream.wait(idle_timeout, "sent nothing")
        return stream.read_chunk()

    async def read(self, limit: int, *, timeout: float = 30.0) -> bytes:
        """The whole body. More than `limit` bytes: the call is reset, `guest.protocol`.

        `timeout`: seconds of silence. Raises as `next_chunk` does.
        """
        parts: list[bytes] = []
        size = 0
        try:
            while (part := await self.next_chunk(timeout)) is not None:
                size += len(part)
                if size > limit:
                    raise protocol_error("a body that is too long")
                parts.append(part)
        finally:
            self._stream.abandon()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def aiter_bytes(self, *, idle_timeout: float = 30.0) -> AsyncGenerator[bytes, None]:
        """The body in chunks, as `next_chunk` gives them; closed when the iteration ends."""
        try:
            while (part := await self.next_chunk(idle_timeout)) is not None:
                yield part
        finally:
            self._stream.abandon()

    def close(self) -> None:
        """Reset the call if it is unfinished, and drop what is buffered."""
        self._stream.buf.clear()
        self._stream.abandon()

    async def aclose(self) -> None:
        """`close`, for what closes with await. Never waits."""
        self.close()

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
