"""A terminal in a sandbox, over a WebSocket."""

from __future__ import annotations

import json
from collections import deque
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from .. import _aio, _call, _wire
from .._call import Call
from ..errors import ConnectionLost, ProtocolError
from .transport import AsyncTransport

PROTOCOL = "cloche.terminal"
_REFUSAL_MAX = 65536


class AsyncTerminal:
    """What is shown, and what is typed. Use it as a context manager.

    `process_id` and `offset` are where to come back to: `offset` counts what `read` has returned and what the server
    has left out. `exit_code` is there after the end. Closing it leaves the process running, for as long as was asked.
    """

    def __init__(self, transport: AsyncTransport, sandbox_id: str, params: dict[str, str]) -> None:
        """Not for direct use: see `AsyncSandbox.terminal`."""
        self.process_id = ""
        self.offset = 0
        self.exit_code: int | None = None
        self._transport = transport
        self._call = Call("GET", _call.path("sandboxes", sandbox_id, "terminal"), params=params)
        self._ws = WSConnection(ConnectionType.CLIENT)
        self._wire: _aio.Wire | None = None
        self._lock = _aio.Lock()
        self._shown: deque[bytes] = deque()
        self._text = ""
        self._open = False
        self._refusal = bytearray()
        self._status = 0

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Connect. Raises what the server says when it refuses."""
        settings = self._transport.settings
        url = self._call.url(settings.api_url)
        parts = urlsplit(url)
        with _call.translated(self._call):
            self._wire = await _aio.connect(url, settings.timeout)
        headers = [(b"Authorization", f"Bearer {settings.api_key}".encode())]
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        await self._send(Request(host=parts.netloc, target=target, extra_headers=headers, subprotocols=[PROTOCOL]))
        try:
            while not (self._open and self.process_id):
                if not await self._receive() and not (self._open and self.process_id):
                    raise self._refused()
        except BaseException:
            await self.aclose()
            raise

    def _refused(self) -> Exception:
        if not self._status:
            return ConnectionLost("the server closed the connection")
        try:
            data = _wire.record(_wire.parse_json(bytes(self._refusal)))
        except ProtocolError:
            data = {"error": f"the server refused the terminal with status {self._status}"}
        return _call.told(self._call, data, self._status, "")

    async def aclose(self) -> None:
        """Hang up."""
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.aclose()

    async def read(self) -> bytes:
        """What came next; empty at the end, when `exit_code` is known."""
        while not self._shown:
            if self.exit_code is not None:
                return b""
            if not await self._receive() and not self._shown and self.exit_code is None:
                raise ConnectionLost("the connection to the terminal ended; the process may run on")
        data = self._shown.popleft()
        self.offset += len(data)
        return data

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        data = await self.read()
        if not data:
            raise StopAsyncIteration
        return data

    async def write(self, data: bytes | str) -> None:
        """Type. Waits while the process does not take it."""
        await self._send(BytesMessage(data.encode() if isinstance(data, str) else bytes(data)))

    async def resize(self, cols: int, rows: int) -> None:
        """Give it another size."""
        await self._send(TextMessage(json.dumps({"resize": {"cols": cols, "rows": rows}})))

    async def _send(self, event: Event) -> None:
        if self._wire is None:
            raise ConnectionLost("the terminal is closed")
        async with self._lock:
            try:
                data = self._ws.send(event)
            except LocalProtocolError as error:
                raise ConnectionLost("the terminal is closed") from error
            with _call.translated(self._call):
                await self._wire.send(data)

    async def _receive(self) -> bool:
        """False: nothing more will come."""
        if self._wire is None:
            raise ConnectionLost("the terminal is closed")
        with _call.translated(self._call):
            data = await self._wire.receive()
        try:
            self._ws.receive_data(data or None)
            events = list(self._ws.events())
        except (RemoteProtocolError, LocalProtocolError) as error:
            raise ProtocolError("the server speaks no WebSocket") from error
        more = bool(data)
        for event in events:
            more = await self._take(event) and more
        return more

    async def _take(self, event: Event) -> bool:
        if isinstance(event, AcceptConnection):
            self._open = True
        elif isinstance(event, BytesMessage):
            if event.data:
                self._shown.append(bytes(event.data))
        elif isinstance(event, TextMessage):
            self._text += event.data
            if event.message_finished:
                text, self._text = self._text, ""
                self._told(_wire.record(_wire.parse_json(text.encode())))
        elif isinstance(event, Ping):
            await self._send(event.response())
        elif isinstance(event, CloseConnection):
            return False
        elif isinstance(event, RejectConnection):
            self._status = event.status_code
            return event.has_body
        elif isinstance(event, RejectData):
            self._refusal += event.data[: _REFUSAL_MAX - len(self._refusal)]
            return not event.body_finished
        return True

    def _told(self, message: Any) -> None:
        if "process" in message:
            self.process_id, self.offset = str(message["process"]), int(message.get("offset") or 0)
        elif "exit" in message:
            self.exit_code = int(message["exit"])
        elif "gap" in message:
            self.offset += int(message["gap"])
        elif "code" in message:
            raise _call.told(self._call, message, 200, "")
