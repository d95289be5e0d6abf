"""HTTP/2 towards clients: many requests on one connection, each carried on like one of HTTP/1.1."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from cloche_server.core.http1 import (
    LINES_LIMIT,
    Framing,
    HttpError,
    RequestHead,
    parse_request,
    request_framing,
)
from cloche_server.gateway.exchange import Exchange, HeaderList
from cloche_server.host.sockets import SocketStream

#: Requests of one connection at once, and bytes of each that may wait here.
STREAMS: Final = 100
WINDOW: Final = 256 * 1024
HEADER_LIST: Final = 64 * 1024
IDLE_SECONDS: Final = 75.0
#: Streams that a client may open and reset before it is taken for an attack.
_RESETS_MAX: Final = 1000
_PIECE: Final = 64 * 1024

Handle = Callable[[Exchange], Awaitable[None]]


async def serve(stream: SocketStream, handle: Handle) -> None:
    """Carries a connection on to its end."""
    await _Connection(stream, handle).run()


class _Connection:
    def __init__(self, stream: SocketStream, handle: Handle) -> None:
        self.stream = stream
        self._handle = handle
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self.h2 = h2.connection.H2Connection(config)
        code = h2.settings.SettingCodes
        self.h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                code.MAX_CONCURRENT_STREAMS: STREAMS,
                code.INITIAL_WINDOW_SIZE: WINDOW,
                code.MAX_HEADER_LIST_SIZE: HEADER_LIST,
                code.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )
        self.exchanges: dict[int, _H2Exchange] = {}
        self._resets = 0
        #: Set whenever a window may have grown.
        self.grown = asyncio.Event()

    async def run(self) -> None:
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(WINDOW * STREAMS)
        try:
            await self.flush()
            async with asyncio.TaskGroup() as group:
                await self._read(group)
                for exchange in list(self.exchanges.values()):
                    exchange.hang_up()
        except* (ConnectionError, TimeoutError):
            pass  # nobody is there to be told
        finally:
            self.stream.close()

    async def _read(self, group: asyncio.TaskGroup) -> None:
        while True:
            try:
                async with asyncio.timeout(None if self.exchanges else IDLE_SECONDS):
                    data = await self.stream.read()
            except (ConnectionError, TimeoutError):
                return
            if not data:
                return
            try:
                events = self.h2.receive_data(data)
            except (h2.exceptions.ProtocolError, ValueError, LookupError, TypeError):
                with contextlib.suppress(ConnectionError):
                    await self.flush()  # what it broke is said in a GOAWAY
                return
            for event in events:
                if not self._take(event, group):
                    return
            await self.flush()

    def _take(self, event: h2.events.Event, group: asyncio.TaskGroup) -> bool:
        """False: the connection is over."""
        if isinstance(event, h2.events.RequestReceived):
            exchange = _H2Exchange(self, event.stream_id, list(event.headers or ()), event.stream_ended is not None)
            self.exchanges[event.stream_id] = exchange
            group.create_task(self._carry(exchange))
        elif isinstance(event, h2.events.DataReceived):
            exchange_or_none = self.exchanges.get(event.stream_id)
            if exchange_or_none is None:
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
            else:
                exchange_or_none.received(event.data or b"", event.flow_controlled_length or 0)
        elif isinstance(event, h2.events.TrailersReceived):
            if (found := self.exchanges.get(event.stream_id)) is not None:
                found.trailers = tuple(event.headers or ())
        elif isinstance(event, h2.events.StreamEnded):
            if (found := self.exchanges.get(event.stream_id)) is not None:
                found.body_ended()
        elif isinstance(event, h2.events.StreamReset):
            self._resets += 1
            if (found := self.exchanges.get(event.stream_id)) is not None:
                found.hang_up()
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            self.grown.set()
        return not isinstance(event, h2.events.ConnectionTerminated) and self._resets < _RESETS_MAX

    async def _carry(self, exchange: _H2Exchange) -> None:
        try:
            exchange.check()
            await self._handle(exchange)
        except HttpError:
            exchange.cut()
        except ConnectionError:
            pass  # the client is gone
        finally:
            exchange.close()
            self.exchanges.pop(exchange.number, None)
            with contextlib.suppress(ConnectionError):
                await self.flush()

    async def flush(self) -> None:
        if data := self.h2.data_to_send():
            await self.stream.write(data)


class _H2Exchange:
    """An `Exchange`."""

    def __init__(self, connection: _Connection, number: int, fields: list[tuple[bytes, bytes]], ended: bool) -> None:
        self._connection = connection
        self.number = number
        self._fields = fields
        self._buffer = bytearray()
        self._unpaid = 0
        self._ended = ended
        self._gone = False
        self._told: Callable[[], None] | None = None
        self._wake = asyncio.Event()
        self._finished = False
        self.begun = False
        self.secure = True
        self.upgrade: bytes | None = None
        self.trailers: HeaderList = ()
        self.head = RequestHead(b"GET", b"/", 1, (), b"")
        self.framing = Framing()

    @property
    def client(self) -> str:
        peer = self._connection.stream.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def check(self) -> None:
        """Makes a head of the fields, by the rules of HTTP/1.1 that it goes on with. Raises HttpError."""
        pseudo = {name: value for name, value in self._fields if name.startswith(b":")}
        rest = [(name, value) for name, value in self._fields if not name.startswith(b":")]
        if len(rest) > LINES_LIMIT:
            raise HttpError(431, "the request has too many headers")
        host = pseudo.get(b":authority") or next((v for n, v in rest if n == b"host"), b"")
        lines = [b"%b %b HTTP/1.1" % (pseudo.get(b":method", b""), pseudo.get(b":path", b"")), b"Host: " + host]
        cookies = b"; ".join(value for name, value in rest if name == b"cookie")
        lines += [b"%b: %b" % pair for pair in rest if pair[0] not in {b"host", b"cookie"}]
        if cookies:
            lines.append(b"Cookie: " + cookies)
        self.head = parse_request(b"\r\n".join(lines) + b"\r\n\r\n")
        framing = request_framing(self.head)
        self.framing = framing if self._ended or framing.length is not None else Framing(chunked=True)

    # --- what comes

    def received(self, data: bytes, cost: int) -> None:
        self._buffer += data
        self._unpaid += cost
        self._wake.set()

    def body_ended(self) -> None:
        self._ended = True
        self._wake.set()

    def hang_up(self) -> None:
        self._gone = True
        self._wake.set()
        self._connection.grown.set()
        told, self._told = self._told, None
        if told is not None:
            told()

    def watch(self, gone: Callable[[], None] | None) -> None:
        self._told = gone
        if gone is not None and self._gone:
            gone()

    async def read_body(self) -> bytes:
        while not self._buffer:
            if self._gone:
                raise ConnectionResetError("the client has given up the request")
            if self._ended:
                return b""
            self._wake.clear()
            await self._wake.wait()
        data = bytes(self._buffer)
        self._buffer.clear()
        await self._pay()
        return data

    async def _pay(self) -> None:
        unpaid, self._unpaid = self._unpaid, 0
        if unpaid:
            with contextlib.suppress(h2.exceptions.ProtocolError):  # the stream is closed already
                self._connection.h2.acknowledge_received_data(unpaid, self.number)
            await self._connection.flush()

    # --- what goes

    async def inform(self, status: int, reason: bytes, headers: HeaderList) -> None:
        await self._headers(status, headers, end=False)

    async def begin(self, status: int, reason: bytes, headers: HeaderList, framing: Framing) -> None:
        self.begun = True
        more = [(b"content-length", b"%d" % framing.length)] if framing.length is not None else []
        await self._headers(status, [*headers, *more], end=False)

    async def _headers(self, status: int, headers: HeaderList, *, end: bool) -> None:
        fields = [(b":status", b"%d" % status), *((name.lower(), value) for name, value in headers)]
        self._send(lambda: self._connection.h2.send_headers(self.number, fields, end_stream=end))
        await self._connection.flush()

    async def send(self, data: bytes) -> None:
        if self.head.method == b"HEAD":
            return
        view = memoryview(data)
        while view:
            size = await self._room()
            piece, view = bytes(view[:size]), view[size:]
            self._send(lambda piece=piece: self._connection.h2.send_data(self.number, piece))  # type: ignore[misc]
            await self._connection.flush()

    async def _room(self) -> int:
        connection = self._connection
        while True:
            if self._gone or connection.stream.is_gone:
                raise ConnectionResetError("the client has given up the request")
            try:
                size = connection.h2.local_flow_control_window(self.number)
            except h2.exceptions.ProtocolError:
                raise ConnectionResetError("the stream is closed") from None
            if size > 0:
                return min(size, connection.h2.max_outbound_frame_size, _PIECE)
            connection.grown.clear()
            await connection.grown.wait()

    async def finish(self, trailers: HeaderList = ()) -> None:
        self._finished = True
        if trailers:
            fields = [(name.lower(), value) for name, value in trailers]
            self._send(lambda: self._connection.h2.send_headers(self.number, fields, end_stream=True))
        else:
            self._send(lambda: self._connection.h2.end_stream(self.number))
        await self._connection.flush()

    def _send(self, act: Callable[[], None]) -> None:
        try:
            act()
        except h2.exceptions.ProtocolError:
            raise ConnectionResetError("the client has given up the request") from None

    def cut(self) -> None:
        if not self._finished:
            self._finished = True
            self._reset(h2.errors.ErrorCodes.INTERNAL_ERROR)

    def close(self) -> None:
        """It is over: what of the body was not read is not waited for."""
        if not self._finished:
            self.cut()
        elif not self._ended:
            self._reset(h2.errors.ErrorCodes.NO_ERROR)
        if self._unpaid:
            # The stream is gone; its bytes still count for the connection.
            with contextlib.suppress(h2.exceptions.ProtocolError, ValueError):
                self._connection.h2.increment_flow_control_window(self._unpaid)
            self._unpaid = 0

    def _reset(self, code: h2.errors.ErrorCodes) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self._connection.h2.reset_stream(self.number, code)

    async def switch(self, reason: bytes, headers: HeaderList) -> SocketStream:
        raise ConnectionResetError("HTTP/2 knows no such upgrade")
