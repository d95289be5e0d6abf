"""HTTP/1.1 towards clients: requests of one connection, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from cloche_server.core.http1 import (
    HEAD_LIMIT,
    NO_BODY,
    ChunkedReader,
    Framing,
    HttpError,
    RequestHead,
    chunk,
    format_response,
    last_chunk,
    parse_request,
    request_framing,
    tokens,
)
from cloche_server.gateway.exchange import HeaderList
from cloche_server.host.sockets import SocketStream

#: A head must be there so many seconds after its first byte; a connection without a request is kept so long.
HEAD_SECONDS: Final = 30.0
IDLE_SECONDS: Final = 75.0
#: After an answer to a request whose body was not read: closing at once would take the answer with it.
LINGER_SECONDS: Final = 1.0

Handler = Callable[["H1Exchange"], Awaitable[None]]
Refuse = Callable[["H1Exchange | None", SocketStream, HttpError], Awaitable[None]]


class H1Exchange:
    """`last`: the connection is closed after it."""

    def __init__(self, stream: SocketStream, head: RequestHead, framing: Framing, *, secure: bool, last: bool) -> None:
        self.head = head
        self.framing = framing
        self.secure = secure
        self.begun = False
        self.trailers: HeaderList = ()
        self._stream = stream
        self._left = framing.length or 0
        self._chunks = ChunkedReader() if framing.chunked else None
        self._pieces: list[bytes] = []
        self._chunked = self._finished = self._switched = False
        self._bodiless = head.method == b"HEAD"
        options = tokens(head.headers, b"connection")
        self.last = last or b"close" in options or (head.minor == 0)
        upgrades = tokens(head.headers, b"upgrade")
        wanted = head.minor == 1 and b"upgrade" in options and framing == NO_BODY and len(upgrades) == 1
        self.upgrade = upgrades[0] if wanted else None

    @property
    def client(self) -> str:
        peer = self._stream.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    @property
    def body_read(self) -> bool:
        return self._chunks.done if self._chunks is not None else self._left == 0

    @property
    def reusable(self) -> bool:
        """Another request may follow on the connection."""
        return self._finished and not self.last and self.body_read

    @property
    def switched(self) -> bool:
        return self._switched

    def watch(self, gone: Callable[[], None] | None) -> None:
        self._stream.on_gone = gone
        if gone is not None and self._stream.is_gone:
            gone()

    async def read_body(self) -> bytes:
        if self._chunks is not None:
            return await self._read_chunk(self._chunks)
        if not self._left:
            return b""
        data = await self._stream.read()
        if not data:
            raise ConnectionResetError("the client ended in the middle of its request")
        if len(data) > self._left:
            self._stream.unread(data[self._left :])
            data = data[: self._left]
        self._left -= len(data)
        return data

    async def _read_chunk(self, chunks: ChunkedReader) -> bytes:
        while not self._pieces and not chunks.done:
            data = await self._stream.read()
            if not data:
                raise ConnectionResetError("the client ended in the middle of its request")
            try:
                self._pieces = chunks.feed(data)
            except ValueError as error:
                self.last = True
                raise HttpError(400, f"the body of the request is malformed: {error}") from None
            if chunks.done:
                self._stream.unread(chunks.rest)
                self.trailers = tuple(chunks.trailers)
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    async def inform(self, status: int, reason: bytes, headers: HeaderList) -> None:
        if self.head.minor == 1:
            await self._stream.write(format_response(status, reason, headers))

    async def begin(self, status: int, reason: bytes, headers: HeaderList, framing: Framing) -> None:
        self.begun = True
        more: list[tuple[bytes, bytes]] = []
        if framing.length is not None:
            more.append((b"Content-Length", b"%d" % framing.length))
        elif framing.chunked or framing.until_close:
            if self.head.minor == 1:
                self._chunked = True
                more.append((b"Transfer-Encoding", b"chunked"))
            else:
                self.last = True
        if self.last:
            more.append((b"Connection", b"close"))
        await self._stream.write(format_response(status, reason, [*headers, *more]))

    async def send(self, data: bytes) -> None:
        if data and not self._bodiless:
            await self._stream.write(chunk(data) if self._chunked else data)

    async def finish(self, trailers: HeaderList = ()) -> None:
        if self._chunked and not self._bodiless:
            await self._stream.write(last_chunk(trailers))
        self._finished = True

    def cut(self) -> None:
        self.last = True
        self._stream.abort()

    async def switch(self, reason: bytes, headers: HeaderList) -> SocketStream:
        self.begun = self._switched = self.last = True
        self._stream.on_gone = None
        await self._stream.write(format_response(101, reason, headers))
        return self._stream


async def serve(stream: SocketStream, handle: Handler, refuse: Refuse, *, secure: bool, once: bool) -> None:
    """All requests of a connection, which is closed at the end. `once`: one only."""
    exchange: H1Exchange | None = None
    try:
        while True:
            exchange = None
            head = await _next_head(stream)
            if head is None:
                return
            framing = request_framing(head)
            exchange = H1Exchange(stream, head, framing, secure=secure, last=once)
            try:
                await handle(exchange)
            finally:
                exchange.watch(None)
            if not exchange.reusable:
                if not exchange.switched and not exchange.body_read:
                    await _linger(stream)
                return
    except HttpError as error:
        if exchange is None:
            await refuse(None, stream, error)
            await _linger(stream)
    except (ConnectionError, TimeoutError):
        return  # nobody is there to be told
    finally:
        stream.close()


async def _next_head(stream: SocketStream) -> RequestHead | None:
    """None: no further request comes. Raises HttpError, `TimeoutError` for a head that comes too slowly."""
    async with asyncio.timeout(IDLE_SECONDS):
        if not await stream.wait_data():
            return None
    async with asyncio.timeout(HEAD_SECONDS):
        block = await stream.read_until((b"\r\n\r\n",), HEAD_LIMIT)
    if block is None:
        if stream.buffered >= HEAD_LIMIT:
            raise HttpError(431, f"request line and headers are larger than {HEAD_LIMIT} bytes")
        if stream.is_gone:
            return None
        raise HttpError(431, f"request line and headers are larger than {HEAD_LIMIT} bytes")
    while block.startswith(b"\r\n"):  # an empty line before a request is to be overlooked
        block = block[2:]
    return parse_request(block) if block else await _next_head(stream)


async def _linger(stream: SocketStream) -> None:
    """Throws away what still comes, for a moment, so that the client reads the answer first."""
    await stream.write_eof()
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while await stream.read():
                pass
    except TimeoutError:
        return
