"""The machinery of a guest link: an asyncio protocol around the sans-I/O HTTP/2 library.

The protocol work is done by callbacks of the transport; there is no task behind a link. Bytes of one
turn of the event loop go out in one write. Flow control credit of the connection is returned on
arrival, that of a stream when its reader takes the data: a reader that stops holds up its own stream
and no other, and costs at most `STREAM_WINDOW` bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Final, cast

import h2.errors
import h2.events
import h2.exceptions

from .errors import LinkLost, StreamBroken, protocol_error
from .h2setup import CONNECTION_WINDOW, REFUSALS, Connection, FrameGuard, new_connection
from .h2stream import Stream
from .sync import REPEAT_SECONDS, Resync

_CONNECTION_GRANT: Final = CONNECTION_WINDOW // 8
_HEADER_COUNT: Final = 64
_WRITE_HIGH: Final = 64 * 1024
_WRITE_MAX: Final = 8 * 1024 * 1024
_TURN_BYTES: Final = 128 * 1024
_STREAMS_AT_FIRST: Final = 100
_STREAMS_MAX: Final = 1000
_SILENCE: Final = 30.0
_SLICE_SECONDS: Final = 0.004
_NOISE_MAX: Final = 5000


def _seen(ready: asyncio.Future[None]) -> None:
    # Nobody waits any more when connecting was given up; the loop must not report that as forgotten.
    if not ready.cancelled():
        ready.exception()


class Wire(asyncio.Protocol):
    """The protocol side of a link; `h2link.Link` adds the calls."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        """Set when the link has ended, for whatever reason."""
        self.generation = 0
        """Highest protocol generation the agent speaks."""
        self._transport: asyncio.Transport
        self._resync: Resync | None = Resync()
        self._timer: asyncio.TimerHandle | None = None
        self._ready: asyncio.Future[None] = self.loop.create_future()
        self._ready.add_done_callback(_seen)
        self._h2: Connection
        self._lost = ""
        self._streams: dict[int, Stream] = {}
        self._next_id = 1
        self._slots: deque[asyncio.Future[None]] = deque()
        self._max_streams = _STREAMS_AT_FIRST
        self._sendq: deque[Stream] = deque()
        self._paused = self._flush_due = False
        self._unpaid = 0
        self._heard = time.monotonic()
        # While the machine stands still, and since when it does or has gone on, by the clock of the loop.
        self._is_still = False
        self._still_since = self._moves_since = self.loop.time()
        self._guard = FrameGuard()
        self._slice = 16384
        self._backlog = memoryview(b"")
        self._noise = 0
        self._noise_since = self._heard

    # --- the end

    def suspect(self) -> None:
        """A call has timed out. If the whole link has been silent that long, it is taken for dead."""
        if not self._is_still and time.monotonic() - self._heard >= _SILENCE:
            self._fail("it has been silent for too long")

    def stand_still(self, still: bool) -> None:
        """Its machine was stopped, and goes on later. Meanwhile silence means nothing."""
        self._is_still = still
        if still:
            self._still_since = self.loop.time()
        else:
            self._moves_since = self.loop.time()
            self._heard = time.monotonic()

    def more_time(self, began: float, seconds: float) -> float:
        """What a call is given once more, that was begun then and has waited for so long: all of it while the machine
        stands still, and what it has not had since. A call that is made to a machine that stands still gets nothing."""
        if began > self._still_since:
            return 0.0
        if self._is_still:
            return max(seconds, 1.0)
        return max(0.0, seconds - (self.loop.time() - self._moves_since))

    def _fail(self, why: str, *, polite: bool = False, last_stream: int | None = None) -> None:
        if self._lost:
            return
        self._lost = why
        if self._timer is not None:
            self._timer.cancel()
        if not self._ready.done():
            self._ready.set_exception(LinkLost(why, not_run=True))
        for stream in list(self._streams.values()):
            stream.fail(LinkLost(why, not_run=last_stream is not None and stream.id > last_stream))
        self._streams.clear()
        self._sendq.clear()
        for waiter in self._slots:
            if not waiter.done():
                waiter.set_exception(LinkLost(why, not_run=True))
        if polite and self._resync is None and not self._transport.get_write_buffer_size():
            self._h2.close_connection()
            self._transport.write(self._h2.data_to_send())
            if not self._transport.get_write_buffer_size():
                self._transport.close()
                return
        self._transport.abort()  # waiting for a guest to read would be waiting at its pleasure

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH)
        assert self._resync is not None
        self._transport.write(self._resync.start())
        self._timer = self.loop.call_later(REPEAT_SECONDS, self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection ended")
        self.closed.set()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        if self._lost:
            return
        if self._resync is None:
            if self._backlog:  # reading is paused, but a read may have been under way
                self._backlog = memoryview(bytes(self._backlog) + data)
            else:
                self._feed(memoryview(data))
        elif self._resync.feed(data):
            self._in_step(self._resync.generation)

    def _tick(self) -> None:
        if self._resync is None or self._lost:
            return
        if not self._paused:  # a guest that reads nothing must not make the buffer grow
            self._transport.write(self._resync.tick())
        self._timer = self.loop.call_later(REPEAT_SECONDS, self._tick)

    def _in_step(self, generation: int) -> None:
        self.generation = generation
        self._resync = None
        if self._timer is not None:
            self._timer.cancel()
        if generation < 1:
            self._fail("it speaks no known generation of the protocol")
            return
        self._h2 = new_connection()
        self._want_flush()  # the first request will go with the preface, in the same write
        if not self._ready.done():
            self._ready.set_result(None)

    # --- receiving

    def _feed(self, view: memoryview) -> None:
        # A guest may send thousands of tiny frames in one read. Slices that shrink when they are slow to
        # digest, and a pause as long as the work was, keep the event loop free for other sandboxes. It is
        # processor time that counts: on a busy host an honest guest must not be slowed down for waiting.
        began = now = time.thread_time()
        while view and not self._lost:
            piece, view = view[: self._slice], view[self._slice :]
            try:
                events = self._h2.receive_data(piece) if self._guard.accepts(piece) else None
            except REFUSALS:
                events = None
            if events is None:
                self._fail("it broke the rules of HTTP/2")
                return
            for event in events:
                self._dispatch(event)
            before, now = now, time.thread_time()
            if now - before > _SLICE_SECONDS:
                self._slice = max(2048, self._slice // 4)
            elif now - before < _SLICE_SECONDS / 4:
                self._slice = min(262144, self._slice * 2)
            if view and now - began > 2 * _SLICE_SECONDS:
                self._backlog = view
                self._transport.pause_reading()
                self.loop.call_later(min(now - began, 0.05), self._resume)
                break
        self._flush()

    def _resume(self) -> None:
        if self._lost:
            return
        view, self._backlog = self._backlog, memoryview(b"")
        self._transport.resume_reading()
        self._feed(view)

    def _dispatch(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.DataReceived():
                self._on_data(event)
            case h2.events.ResponseReceived():
                self._on_headers(event)
            case h2.events.StreamEnded():
                self._on_end(event.stream_id)
            case h2.events.WindowUpdated():
                self._on_window(event.stream_id, event.delta or 0)
            case h2.events.StreamReset():
                self._on_reset(event)
            case h2.events.RemoteSettingsChanged():
                limit = self._h2.remote_settings.max_concurrent_streams
                self._max_streams = max(1, min(limit, _STREAMS_MAX))
                self._free_slots()
                for stream in list(self._streams.values()):
                    self._on_window(stream.id)
                self._count_noise()
            case h2.events.ConnectionTerminated():
                self._fail("it ended the session", last_stream=event.last_stream_id)
            case _:
                self._count_noise()

    def _count_noise(self) -> None:
        # PING, SETTINGS, empty DATA …: each costs work and some an answer, and none is needed often.
        if self._heard - self._noise_since > 1.0:
            self._noise, self._noise_since = 0, self._heard
        self._noise += 1
        if self._noise > _NOISE_MAX:
            self._fail("it floods the link with control frames")

    def _on_headers(self, event: h2.events.ResponseReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        status = headers.pop(":status", "")
        if len(event.headers) > _HEADER_COUNT or len(status) != 3 or not status.isdigit():
            stream.fail(protocol_error("a response head out of bounds"))
            self.reset(stream)
            return
        stream.headers = headers
        stream.status = int(status)
        stream.wake()

    def _on_data(self, event: h2.events.DataReceived) -> None:
        size, kept = event.flow_controlled_length, len(event.data)
        self._unpaid += size
        if self._unpaid >= _CONNECTION_GRANT and not self._lost:
            self._h2.increment_flow_control_window(self._unpaid)
            self._unpaid = 0
        stream = self._streams.get(event.stream_id)
        if stream is not None and size:
            stream.received(event.data, size - kept)
        if not kept:
            self._count_noise()

    def _on_end(self, number: int) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        if stream.status == 0:
            stream.fail(protocol_error("a response without a head"))
        stream.ended = True
        stream.wake()
        if not stream.out_end or stream.pending:
            self.reset(stream)  # the answer is complete and the rest of the upload useless
        elif not stream.queued:
            self._release(stream)

    def _on_reset(self, event: h2.events.StreamReset) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            refused = event.error_code == h2.errors.ErrorCodes.REFUSED_STREAM and stream.status == 0
            stream.fail(StreamBroken(not_run=refused))
            self._release(stream)

    def _on_window(self, number: int, read: int = 0) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.in_flight = max(0, stream.in_flight - read)
        if stream.parked:
            stream.parked = False
            self._sendq.append(stream)

    # --- sending

    def want_write(self, stream: Stream) -> None:
        """The stream has more of its request body, or its end."""
        if not stream.queued and not stream.closed:
            stream.queued = True
            self._sendq.append(stream)
        self._want_flush()

    def grant(self, stream: Stream, size: int) -> None:
        """Let the agent send `size` bytes more on the stream."""
        if not self._lost:
            self._h2.increment_flow_control_window(size, stream.id)
            self._want_flush()

    def reset(self, stream: Stream) -> None:
        """RST_STREAM(CANCEL) if the call is not complete."""
        if self._streams.get(stream.id) is not stream:
            return
        with contextlib.suppress(h2.exceptions.H2Error):  # closed in the library's view already
            self._h2.reset_stream(stream.id, h2.errors.ErrorCodes.CANCEL)
        self._release(stream)
        stream.wake()
        self._want_flush()

    def _release(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        stream.closed = True
        self._free_slots()

    def _free_slots(self) -> None:
        free = self._max_streams - len(self._streams)
        for waiter in self._slots:
            if free <= 0:
                break
            free -= 1  # those woken before, but not run yet, count as well
            if not waiter.done():
                waiter.set_result(None)

    def _want_flush(self) -> None:
        if not self._flush_due and not self._lost:
            self._flush_due = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._lost or self._resync is not None:
            return
        try:
            self._pump()
        except h2.exceptions.H2Error:
            self._fail("it broke the rules of HTTP/2")
            return
        data = self._h2.data_to_send()
        if data:
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > _WRITE_MAX:
                self._fail("it does not read what it is sent")
                return
        if self._sendq and not self._paused and self._h2.outbound_flow_control_window > 0:
            self._want_flush()

    def _pump(self) -> None:
        budget = _TURN_BYTES
        queue = self._sendq
        while queue and budget > 0 and not self._paused:
            stream = queue.popleft()
            if stream.closed:
                continue
            size = min(self._h2.local_flow_control_window(stream.id), self._h2.max_outbound_frame_size, budget)
            if stream.most:  # what a server does not read would fill the agent's memory
                size = min(size, stream.most - stream.in_flight)
            if size <= 0 and stream.pending:
                if self._h2.outbound_flow_control_window <= 0:
                    queue.appendleft(stream)
                    return
                stream.parked = True
                continue
            data = stream.take(max(size, 0))
            budget -= len(data)
            stream.in_flight += len(data)
            more = stream.pending > 0
            last = stream.out_end and not more
            self._h2.send_data(stream.id, data, end_stream=last)
            if more:
                queue.append(stream)
                continue
            stream.queued = False
            if last and stream.ended:
                self._release(stream)
