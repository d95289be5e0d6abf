"""What has happened: events as they come, and the webhooks that they are sent to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

from .. import _aio, _call, _sse, _wire, _wire_events
from .._call import SILENCE, Call
from ..errors import ConnectFailed, ConnectionLost, ProtocolError, ServerUnavailable
from ..models import EventGap, SandboxEvent, WebhookInfo, WebhookTest
from .transport import AsyncBody, AsyncTransport

RESUME_DELAYS: Final = (0.1, 0.3, 1.0, 3.0, 5.0)
#: Events that are asked for at once.
PAGE: Final = 500


class AsyncEventStream:
    """Events, oldest first: each `SandboxEvent` once, and an `EventGap` where the server had removed some.

    Iterate over it. `position` is the id of the last event; given as `since` it goes on there, in another program or
    after a restart of the server, too. With `follow` it goes on until it is closed, or until its sandbox is deleted,
    and a broken connection is taken up again where it broke.
    """

    def __init__(self, transport: AsyncTransport, call: Call, *, follow: bool, since: str | None) -> None:
        self.position = since
        self._transport = transport
        self._call = call
        self._follow = follow
        self._body: AsyncBody | None = None
        self._parser = _sse.Parser()
        self._events: deque[SandboxEvent | EventGap] = deque()
        self._failures = 0
        self._ended = False
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SandboxEvent | EventGap:
        try:
            while not self._closed:
                if self._events:
                    event = self._events.popleft()
                    self.position = event.last_id if isinstance(event, EventGap) else event.id
                    return event
                if self._ended:
                    break
                if self._follow:
                    await self._receive()
                else:
                    await self._page()
        except BaseException:
            await self.aclose()
            raise
        await self.aclose()
        raise StopAsyncIteration

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

    async def _page(self) -> None:
        """What there is now. From a position on it is asked for in pages; else the newest come in one."""
        if self.position is None:
            self._ended = True
            self._events.extend(_events(await self._transport.json(self._call)))
            return
        query = {**self._call.params, **_call.params(since=self.position, tail=PAGE)}
        self._events.extend(_events(await self._transport.json(replace(self._call, params=query))))
        self._ended = not self._events

    async def _receive(self) -> None:
        try:
            body = self._body or await self._connect()
            chunk = await body.next()
            if chunk is None:
                raise ConnectionLost("the stream of events ended without its end")
            for message in self._parser.feed(chunk):
                self._accept(message, body.header("x-request-id"))
        except (ConnectionLost, ConnectFailed, ServerUnavailable):
            await self._disconnect()
            if self._failures >= len(RESUME_DELAYS):
                raise
            if not self._events:
                await _aio.sleep(RESUME_DELAYS[self._failures])
            self._failures += 1

    async def _connect(self) -> AsyncBody:
        call = self._call
        if self.position is not None:
            call = replace(call, params={**call.params, "since": self.position})
        self._body = body = await self._transport.open(call)
        self._parser = _sse.Parser()
        if not body.header("content-type").startswith("text/event-stream"):
            raise ProtocolError("the server answered without an event stream")
        if self.position is None:
            self.position = body.header("x-events-after") or None
        return body

    async def _disconnect(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            await body.aclose()

    def _accept(self, message: _sse.Message, request_id: str) -> None:
        data = _wire.record(_wire.parse_json(message.data.encode()))
        if message.event == "error":
            text = str(data.get("error") or "the stream of events was ended")
            raise _call.told(self._call, {**data, "error": text}, 200, request_id)
        if message.event == "event":
            self._failures = 0
            self._events.append(_wire_events.sandbox_event(data))
        elif message.event == "gap":
            self._events.append(_wire_events.event_gap(data))
        elif message.event == "end":
            self._ended = True


def _events(answer: Any) -> list[SandboxEvent | EventGap]:
    data = _wire.record(answer)
    found: list[SandboxEvent | EventGap] = []
    if "gap" in data:
        found.append(_wire_events.event_gap(_wire.record(data["gap"])))
    return found + [_wire_events.sandbox_event(item) for item in _wire.records(_wire.required(data, "events"))]


def event_stream(
    transport: AsyncTransport,
    *,
    follow: bool,
    since: str | None,
    tail: int | None,
    types: Sequence[str] | None,
    sandbox_id: str | None,
) -> AsyncEventStream:
    """A stream that has not begun."""
    chosen = [types] if isinstance(types, str) else list(types or ())
    query = _call.params(tail=tail, sandbox_id=sandbox_id, type=",".join(chosen) or None, follow=follow or None)
    accept = "text/event-stream" if follow else "application/json"
    call = Call("GET", _call.path("events"), params=query, kind="safe", silence=SILENCE, accept=accept)
    return AsyncEventStream(transport, call, follow=follow, since=since)


async def sandbox_events(
    transport: AsyncTransport, sandbox_id: str, tail: int, types: Sequence[str] | None
) -> list[SandboxEvent]:
    """The newest events of one sandbox."""
    chosen = [types] if isinstance(types, str) else list(types or ())
    query = _call.params(tail=tail, type=",".join(chosen) or None)
    call = Call("GET", _call.path("sandboxes", sandbox_id, "events"), params=query, kind="safe")
    return [event for event in _events(await transport.json(call)) if isinstance(event, SandboxEvent)]


class AsyncWebhooks:
    """Receivers that events are sent to; `client.webhooks`."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        url: str,
        types: Sequence[str] | None = None,
        *,
        sandbox_id: str | None = None,
        description: str | None = None,
    ) -> WebhookInfo:
        """Have what happens from now on sent to `url`: everything, or only `types` (`"sandbox.*"` for a family).

        The result has the `secret` that the messages are signed with (Standard Webhooks). It is not shown again.
        """
        chosen = [types] if isinstance(types, str) else list(types or ())
        body = _wire.given(url=url, types=chosen or None, sandbox_id=sandbox_id, description=description)
        return _wire_events.webhook(await self._transport.json(Call("POST", _call.path("webhooks"), json=body)))

    async def list(self) -> Sequence[WebhookInfo]:
        """All of them, oldest first."""
        data = _wire.record(await self._transport.json(Call("GET", _call.path("webhooks"), kind="safe")))
        return [_wire_events.webhook(item) for item in _wire.records(_wire.required(data, "webhooks"))]

    async def get(self, webhook_id: str) -> WebhookInfo:
        """One, with how far it has come."""
        call = Call("GET", _call.path("webhooks", webhook_id), kind="safe")
        return _wire_events.webhook(await self._transport.json(call))

    async def update(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        types: Sequence[str] | None = None,
        description: str | None = None,
        enabled: bool | None = None,
    ) -> WebhookInfo:
        """Change what is given. An empty list of types means all; `enabled=True` goes on where it was."""
        chosen = [types] if isinstance(types, str) else types
        body = _wire.given(url=url, types=chosen, description=description, enabled=enabled)
        call = Call("PATCH", _call.path("webhooks", webhook_id), json=body, kind="safe")
        return _wire_events.webhook(await self._transport.json(call))

    async def delete(self, webhook_id: str) -> None:
        """Send it nothing more, for good."""
        await self._transport.json(Call("DELETE", _call.path("webhooks", webhook_id)))

    async def test(self, webhook_id: str) -> WebhookTest:
        """Send it a `webhook.test` now, and return what it answered."""
        data = await self._transport.json(Call("POST", f"{_call.path('webhooks', webhook_id)}/test"))
        return _wire_events.webhook_test(_wire.record(data))
