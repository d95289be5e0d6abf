"""Answers that a test puts in front of a route, good and bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .http import Abort, Handler, Reply, Request

if TYPE_CHECKING:
    from .api import FakeCloche

Event = tuple[str, Any] | tuple[str, Any, int]
SSE = "text/event-stream; charset=utf-8"


def error(status: int, code: str, text: str = "it failed", **more: Any) -> Handler:
    """A refusal."""

    async def handler(request: Request, reply: Reply) -> None:
        await reply.error(status, code, text, **more)

    return handler


def abort(request: Request, reply: Reply) -> Any:
    """A connection that ends after the request, without an answer."""

    async def handler() -> None:
        await request.body()
        raise Abort

    return handler()


def lost(server: FakeCloche) -> Handler:
    """The request is served, and then the answer is lost."""

    async def handler(request: Request, reply: Reply) -> None:
        key = request.headers["idempotency-key"]
        body = await request.json()
        if key not in server.keys:
            server.keys[key] = server.make(body)["id"]
        raise Abort

    return handler


def recorded(bodies: list[Any], then: Handler) -> Handler:
    """As `then`, and the body of the request is added to `bodies`."""

    async def handler(request: Request, reply: Reply) -> None:
        bodies.append(await request.json())
        await then(request, reply)

    return handler


def answer(status: int, body: bytes, kind: str = "application/json") -> Handler:
    """Any answer."""

    async def handler(request: Request, reply: Reply) -> None:
        await reply.send(status, body, kind=kind)

    return handler


def pieces(
    parts: Sequence[bytes], kind: str = "application/json", length: int | None = None, cut: bool = False
) -> Handler:
    """A body in pieces; with `cut` it breaks off after them."""

    async def handler(request: Request, reply: Reply) -> None:
        await reply.begin(200, kind, length)
        for part in parts:
            await (reply.chunk(part) if length is None else reply.raw(part))
        if cut:
            raise Abort
        await reply.end()

    return handler


def events(sequence: Sequence[Event]) -> Handler:
    """An event stream that ends tidily after these events, whatever they are."""

    async def handler(request: Request, reply: Reply) -> None:
        await reply.begin(200, SSE)
        for item in sequence:
            await reply.event(*item)
        await reply.end()

    return handler


def silence() -> Handler:
    """An event stream that begins and says nothing."""

    async def handler(request: Request, reply: Reply) -> None:
        await reply.begin(200, SSE)
        while not reply.gone():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.02)

    return handler


def says(status: int, value: object = None, heard: list[Any] | None = None) -> Handler:
    """An answer in JSON, or with nothing in it. `heard` gets the JSON of the request."""

    async def handler(request: Request, reply: Reply) -> None:
        if heard is not None:
            heard.append(await request.json())
        await (reply.send(status) if value is None else reply.json(status, value))

    return handler
