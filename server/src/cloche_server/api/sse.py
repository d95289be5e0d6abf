"""Server-sent events: LF only, one `data:` line of ASCII JSON, heartbeats, always a terminal event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche_server.api.respond import dump, wait_gone, waited
from cloche_server.core.errors import ClocheError
from cloche_server.telemetry import log

_log = log.get("http")

HEARTBEAT_SECONDS = 10.0
#: Nothing follows one of these.
TERMINAL = frozenset({"exit", "error", "end"})


@dataclass(frozen=True, slots=True)
class SseEvent:
    """`id` is where a reader may go on from (`Last-Event-ID`)."""

    name: str
    data: Mapping[str, Any]
    id: str | None = None

    def encode(self) -> bytes:
        head = f"id: {self.id}\n" if self.id is not None else ""
        return f"{head}event: {self.name}\n".encode() + b"data: " + dump(self.data) + b"\n\n"


class SseResponse(Response):
    """Streams `events`, then closes. `on_error` makes the terminal event of a failure; `aclose` always runs.

    A slow reader stops the source (the transport's buffer is bounded); it never grows memory here.
    """

    def __init__(
        self,
        request: Request,
        events: AsyncIterator[SseEvent],
        aclose: Callable[[], Awaitable[None]],
        on_error: Callable[[ClocheError], SseEvent],
        stopping: asyncio.Event,
        headers: Mapping[str, str],
        terminal: frozenset[str] = TERMINAL,
    ) -> None:
        super().__init__(status_code=200)
        self._request = request
        self._events = events
        self._aclose = aclose
        self._on_error = on_error
        self._stopping = stopping
        self._extra_headers = headers
        self._terminal = terminal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._extra_headers,
        }
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        gone = asyncio.ensure_future(wait_gone(self._request))
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            async for chunk in self._chunks(gone, stop):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            stop.cancel()
            await self._aclose()

    async def _chunks(self, gone: asyncio.Future[None], stop: asyncio.Future[Any]) -> AsyncIterator[bytes]:
        """Encoded events and heartbeats, until the end, the client's hang-up or the server's stop."""
        iterator = self._events.__aiter__()
        following: asyncio.Future[SseEvent] = asyncio.ensure_future(anext(iterator))
        try:
            while True:
                await asyncio.wait(
                    waited(following, gone, stop), timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if gone.done():
                    return
                if following.done():
                    event = self._result(following)
                    if event is None:
                        return
                    yield event.encode()
                    if event.name in self._terminal:
                        return
                    following = asyncio.ensure_future(anext(iterator))
                elif not stop.done():
                    yield b": ping\n\n"
                if stop.done():  # asked last, for a source that never rests
                    ending = ClocheError("server.shutting_down", "the server is shutting down; connect again later")
                    yield self._on_error(ending).encode()
                    return
        finally:
            following.cancel()
            with contextlib.suppress(BaseException):
                await following

    def _result(self, following: asyncio.Future[SseEvent]) -> SseEvent | None:
        """The next event, which is a terminal one when the source has failed; None at its end."""
        try:
            return following.result()
        except StopAsyncIteration:
            return None
        except ClocheError as error:
            return self._on_error(error)
        except Exception as error:  # noqa: BLE001 - a stream without a terminal event is taken for a success
            _log.exception("stream.crashed", error=repr(error))
            return self._on_error(ClocheError("internal", "an internal error; the log of the server has more"))
