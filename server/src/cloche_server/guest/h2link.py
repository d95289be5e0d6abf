"""One HTTP/2 connection to one agent, over the Unix socket of its virtio-serial port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final, Self
from urllib.parse import quote

from ..core.errors import ClocheError
from .errors import LinkLost
from .h2stream import Response, Stream, expire
from .h2wire import Wire

__all__ = ["Link", "Response"]


_SMALL_BODY: Final = 65536


async def _one(body: bytes) -> AsyncIterator[bytes]:
    # A large body goes the way of the streams, so that its timeout counts from the last progress.
    yield body


class Link(Wire):
    """A connection. Make one with `Link.connect`; when it is lost, make another."""

    # --- opening and closing

    @classmethod
    async def connect(cls, path: str, *, timeout: float = 10.0) -> Self:
        """Connect to the socket at `path` and get in step with the agent.

        Raises LinkLost when there is no socket, or no agent that answers within `timeout` seconds.
        """
        link: Self | None = None
        try:
            async with asyncio.timeout(timeout):
                _, link = await asyncio.get_running_loop().create_unix_connection(cls, path)
                await link._ready
        except BaseException as error:
            if link is not None:
                link._fail("the attempt to connect was given up")
            if isinstance(error, TimeoutError):
                raise LinkLost(f"it did not answer within {timeout:g} seconds", not_run=True) from None
            if isinstance(error, OSError):
                raise LinkLost("its socket is not there or takes no connection", not_run=True) from None
            raise
        return link

    @property
    def is_open(self) -> bool:
        """Whether calls can be made. The transport knows of an end one turn of the loop earlier."""
        return not self._lost and not self._transport.is_closing()

    async def wait_closed(self) -> None:
        await self.closed.wait()

    async def aclose(self) -> None:
        """End the link; calls under way fail with LinkLost. May be called twice."""
        if not self._lost:
            self._fail("the link was closed", polite=True)
        await self.closed.wait()

    # --- calls

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Iterable[tuple[str, str]] = (),
        body: bytes | AsyncIterator[bytes] | None = None,
        timeout: float = 30.0,
    ) -> Response:
        """Make a call and return when the head of the answer is there.

        `timeout`: seconds for a free stream, for the answer after the body has been sent, and for the
        agent to take a part of the body; the time the body iterator takes itself does not count. An
        answer that comes before the end of the body stops the upload (`Response.sent_all` is false).
        Cancelling the caller, or an exception of the iterator, resets the call.
        Raises LinkLost, LinkTimeout, StreamBroken.
        """
        target = path + "?" + "&".join(f"{k}={quote(v, safe='/')}" for k, v in query) if query else path
        await self._slot(timeout)
        stream = self._open(method, target, headers, has_body=body is not None)
        try:
            if body is None or (isinstance(body, bytes) and len(body) <= _SMALL_BODY):
                if body is not None:
                    stream.send_all(body)
                self._kick()
                await stream.wait_headers(timeout)
            else:
                source = _one(body) if isinstance(body, bytes) else body
                await self._upload(stream, source, timeout)
        except BaseException:
            self.reset(stream)
            raise
        return Response(stream, sent_all=stream.out_end and not stream.pending)

    async def duplex(self, target: str, most: int, timeout: float) -> tuple[Stream, Response]:
        """A call whose body and answer go on side by side: `Stream.send` and `finish`, `Response.next_chunk`.

        `most`: bytes that may be under way to the agent without having been read there. `timeout`: seconds for the
        head of the answer. Raises as `request` does.
        """
        await self._slot(timeout)
        stream = self._open("POST", target, (), has_body=True)
        stream.most, stream.out_end = most, False
        try:
            self._kick()
            await stream.wait_headers(timeout)
        except BaseException:
            self.reset(stream)
            raise
        return stream, Response(stream, sent_all=True)

    def _open(self, method: str, target: str, headers: Iterable[tuple[str, str]], *, has_body: bool) -> Stream:
        if self._next_id >= 2**31:
            self._fail("the link has used up its stream numbers")
            raise LinkLost(self._lost, not_run=True)
        if not self._streams:
            self._heard = self.loop.time()  # an idle link is silent by right; the wait begins now
        stream = Stream(self, self._next_id)
        self._next_id += 2
        head = [
            (":method", method),
            (":scheme", "http"),
            (":authority", "agent"),
            (":path", target),
            *headers,
        ]
        self._h2.send_headers(stream.id, head, end_stream=not has_body)
        self._streams[stream.id] = stream
        return stream

    def _kick(self) -> None:
        # A lone call goes out now; where there are more, those of one turn of the loop share a write.
        if len(self._streams) == 1:
            self._flush()
        else:
            self._want_flush()

    async def _upload(self, stream: Stream, body: AsyncIterator[bytes], timeout: float) -> None:
        # A task, because the answer may come while the iterator waits for a slow client. It never
        # outlives this call.
        stream.out_end = False
        self._want_flush()  # the agent may refuse before the first chunk is there
        sender = self.loop.create_task(stream.send_from(body, timeout))
        sender.add_done_callback(lambda _: stream.wake())
        try:
            while not sender.done() and stream.status == 0 and stream.error is None:
                await stream.wait(None, "")
            if sender.done():
                sender.result()
        finally:
            if not sender.done():
                sender.cancel()
                await asyncio.wait([sender])
                if not sender.cancelled():
                    sender.exception()  # mark as seen; the answer counts
        await stream.wait_headers(timeout)

    async def _slot(self, timeout: float) -> None:
        """Wait until the agent allows one more stream; first come, first served."""
        self._check_open()
        if not self._slots and len(self._streams) < self._max_streams:
            return
        waiter: asyncio.Future[None] = self.loop.create_future()
        self._slots.append(waiter)
        timer = self.loop.call_later(timeout, expire, waiter)
        try:
            await waiter
        except TimeoutError:
            raise ClocheError(
                "guest.exhausted",
                f"All {self._max_streams} streams of the link to the sandbox are in use; "
                "end some calls or try again later.",
            ) from None
        finally:
            timer.cancel()
            self._slots.remove(waiter)
            if not waiter.done() or waiter.cancelled() or waiter.exception() is not None:
                self._free_slots()
        self._check_open()

    def _check_open(self) -> None:
        if not self.is_open:
            raise LinkLost(self._lost or "the connection ended", not_run=True)
