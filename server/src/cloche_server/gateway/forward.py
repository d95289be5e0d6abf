"""One request to a server in a guest, and its answer back: both ways at once, and nothing is held back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.http1 import (
    HEAD_LIMIT,
    BadAnswer,
    ChunkedReader,
    Framing,
    ResponseHead,
    chunk,
    format_request,
    last_chunk,
    parse_response,
    response_framing,
    values,
)
from cloche_server.core.streams import ByteStream
from cloche_server.gateway.exchange import Exchange
from cloche_server.gateway.headers import to_client

#: Interim answers to one request.
_INTERIM_MAX: Final = 32


class Truncated(Exception):
    """The answer ended before its end; the client must see that."""


@dataclass(slots=True)
class Pulse:
    """`beat` whenever bytes move; `wait` seconds for the head of an answer."""

    beat: Callable[[], None]
    wait: float


async def forward(
    exchange: Exchange, upstream: ByteStream, target: bytes, headers: list[tuple[bytes, bytes]], port: int, pulse: Pulse
) -> None:
    """Raises `port.bad_answer`, `port.timeout`, HttpError before the answer has begun, and afterwards `Truncated`."""
    await _written(upstream, format_request(exchange.head.method, target, headers))
    reader = _Reader(upstream, port)
    sender = None
    try:
        if not exchange.framing.empty or exchange.framing.chunked:
            sender = asyncio.ensure_future(_send_body(exchange, upstream, pulse))
        answer = await _head(exchange, reader, sender, pulse)
        if answer.status == 101:
            await _switch(exchange, upstream, reader, answer, pulse)
        else:
            await _answer(exchange, reader, answer, pulse)
    finally:
        if sender is not None:
            sender.cancel()
            await asyncio.wait([sender])
            if not sender.cancelled():
                sender.exception()  # it was looked at while it mattered


async def _written(upstream: ByteStream, data: bytes) -> None:
    # A server that closes early may have answered before: what it said is read in any case.
    with contextlib.suppress(ConnectionError):
        await upstream.write(data)


async def _send_body(exchange: Exchange, upstream: ByteStream, pulse: Pulse) -> None:
    chunked = exchange.framing.chunked
    listening = True
    while data := await exchange.read_body():
        pulse.beat()
        if not listening:
            continue  # the answer decides what becomes of the connection
        try:
            await upstream.write(chunk(data) if chunked else data)
        except ConnectionError:
            listening = False
    if chunked and listening:
        await _written(upstream, last_chunk(exchange.trailers))


async def _head(exchange: Exchange, reader: _Reader, sender: asyncio.Future[None] | None, pulse: Pulse) -> ResponseHead:
    """The head of the final answer. While a body is sent its sender decides how long that takes."""
    reading = asyncio.ensure_future(_final_head(exchange, reader))
    try:
        if sender is not None:
            both: set[asyncio.Future[Any]] = {reading, sender}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if sender.done() and not sender.cancelled() and (error := sender.exception()) is not None:
                raise error
        async with asyncio.timeout(pulse.wait):
            return await reading
    except TimeoutError:
        raise ClocheError(
            "port.timeout",
            f"the server on port {reader.port} took the request and has not answered within {pulse.wait:g} seconds",
        ) from None
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait([reading])
        if not reading.cancelled():
            reading.exception()


async def _final_head(exchange: Exchange, reader: _Reader) -> ResponseHead:
    for _ in range(_INTERIM_MAX):
        answer = await reader.head()
        if answer.status >= 200:
            return answer
        if answer.status == 101:
            if exchange.upgrade is None:
                raise reader.bad("it changed the protocol though nobody had asked it to")
            return answer
        await exchange.inform(answer.status, answer.reason, to_client(answer, upgrade=False))
    raise reader.bad("it sent too many interim answers")


async def _answer(exchange: Exchange, reader: _Reader, answer: ResponseHead, pulse: Pulse) -> None:
    try:
        framing = response_framing(answer, exchange.head.method)
    except BadAnswer as error:
        raise reader.bad(str(error)) from None
    headers = to_client(answer, upgrade=False)
    length = values(answer.headers, b"content-length")
    if framing == Framing() and length and (exchange.head.method == b"HEAD" or answer.status == 304):
        headers = (*headers, (b"Content-Length", length[0]))
    await exchange.begin(answer.status, answer.reason, headers, framing)
    pulse.beat()
    try:
        trailers = await _body(exchange, reader, framing, pulse)
    except (ValueError, ConnectionError) as error:
        raise Truncated(str(error)) from error
    await exchange.finish(trailers)


async def _body(exchange: Exchange, reader: _Reader, framing: Framing, pulse: Pulse) -> tuple[tuple[bytes, bytes], ...]:
    if framing.chunked:
        chunks = ChunkedReader()
        while not chunks.done:
            data = await reader.read()
            if not data:
                raise ConnectionResetError("the answer ended within its chunks")
            pulse.beat()
            if pieces := chunks.feed(data):
                await exchange.send(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        return tuple(chunks.trailers)
    left = framing.length
    while framing.until_close or left:
        data = await reader.read()
        if not data:
            if left:
                raise ConnectionResetError("the answer is shorter than announced")
            break
        pulse.beat()
        if left is not None:
            data = data[:left]
            left -= len(data)
        await exchange.send(data)
    return ()


async def _switch(
    exchange: Exchange, upstream: ByteStream, reader: _Reader, answer: ResponseHead, pulse: Pulse
) -> None:
    client = await exchange.switch(answer.reason, to_client(answer, upgrade=True))
    if rest := reader.rest():
        await client.write(rest)
    await relay(client, upstream, pulse.beat)


async def relay(one: ByteStream, other: ByteStream, beat: Callable[[], None]) -> None:
    """Joins two connections until both directions have ended or one has failed; ends are passed on singly."""

    async def carry(source: ByteStream, sink: ByteStream) -> None:
        while data := await source.read():
            beat()
            await sink.write(data)
        await sink.write_eof()

    broke = False
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(carry(one, other))
            group.create_task(carry(other, one))
    except* ConnectionError:
        broke = True  # what is raised in here would come out in a group, which is no such error
    if broke:
        raise ConnectionResetError("one side of the connection broke")


class _Reader:
    """The bytes of a server in a guest, which may be anything."""

    def __init__(self, stream: ByteStream, port: int) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self.port = port

    def rest(self) -> bytes:
        data = bytes(self._buffer)
        self._buffer.clear()
        return data

    async def read(self) -> bytes:
        return self.rest() or await self._stream.read()

    async def head(self) -> ResponseHead:
        looked = 0
        while True:
            ends = [at + len(end) for end in (b"\r\n\r\n", b"\n\n") if (at := self._buffer.find(end, looked)) >= 0]
            if ends and min(ends) <= HEAD_LIMIT:
                block = bytes(memoryview(self._buffer)[: min(ends)])
                del self._buffer[: min(ends)]
                try:
                    return parse_response(block)
                except BadAnswer as error:
                    raise self.bad(str(error)) from None
            if len(self._buffer) >= HEAD_LIMIT:
                raise self.bad("its headers are too large")
            looked = max(0, len(self._buffer) - 3)
            await self._fill()

    async def _fill(self) -> None:
        try:
            data = await self._stream.read()
        except ConnectionError:
            data = b""
        if not data:
            raise self.bad(
                "it closed the connection in the middle of its headers"
                if self._buffer
                else "it closed the connection without an answer"
            )
        self._buffer += data
        if self._buffer[0] in {0x15, 0x16}:
            raise self.bad("it speaks TLS; previews need plain HTTP behind them, TLS is added here")
        if not b"HTTP/1.".startswith(bytes(self._buffer[:7])):
            raise self.bad("it does not speak HTTP")

    def bad(self, what: str) -> ClocheError:
        return ClocheError("port.bad_answer", f"something listens on port {self.port} of the sandbox, but {what}")
