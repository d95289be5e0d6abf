"""The HTTP/1.1 protocol of Uvicorn, with bounds for strangers and with errors in JSON.

Everything here happens before a request has reached the application, so before its token is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cloche_server.api.errors import HTTP_STATUS, error_body
from cloche_server.api.respond import dump
from cloche_server.core.errors import ClocheError
from cloche_server.host.clock import random_bytes

#: Request line and headers together.
HEAD_LIMIT: Final = 64 * 1024
#: A connection that has begun a request must have sent its headers after so many seconds.
HEAD_SECONDS: Final = 30.0
#: How long what still comes is thrown away after a refusal. Closing at once would reset the connection, and
#: the answer would be lost with it.
LINGER_SECONDS: Final = 1.0
_REASONS: Final = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class _HeadTooLarge(Exception):
    """Ends the parsing; never leaves this module."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Somebody who takes connections over. `claims` decides by how a request begins, and answers None while that is too
    little; `handover` gets the connection, with what has come of the request."""

    claims: Callable[[bytes], bool | None]
    handover: Callable[[asyncio.Transport, bytes], None]


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    sharing: ClassVar[Sharing | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._too_large = False
        self._refused = False
        self._completed = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._between = True
        self._held = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self.sharing is not None and self._between and (self.cycle is None or self.cycle.response_complete):
            data, self._held = self._held + data, b""
            claimed = self.sharing.claims(data)
            if claimed is None:
                self._held = data
                return
            if claimed:
                self._hand_over(data)
                return
        self._completed = False
        super().data_received(data)
        if self._refused or not self._in_head:
            self._disarm()
            return
        if not self._completed:  # else part of `data` belongs to the request before
            self._head_bytes += len(data)
        if self._head_bytes > HEAD_LIMIT and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")
        elif self._head_timer is None:
            self._arm()

    def _hand_over(self, data: bytes) -> None:
        """The connection is somebody else's from now on."""
        self._disarm()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        assert self.sharing is not None
        self.sharing.handover(self.transport, data)

    def on_message_begin(self) -> None:
        self._between = False
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._completed = self._between = True
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_LIMIT:
            self._too_large = True
            raise _HeadTooLarge
        super().on_headers_complete()

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, and closes. In the middle of another answer it only closes."""
        if self._refused:
            return
        self._refused = True
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self.transport.close()
            return
        self.transport.write(_refusal(self._too_large))
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def handing_over(sharing: Sharing, base: type[HttpProtocol] = HttpProtocol) -> type[HttpProtocol]:
    """The protocol with somebody who takes some connections over."""
    return type("SharedProtocol", (base,), {"sharing": sharing})


def _refusal(too_large: bool) -> bytes:
    if too_large:
        limit = {"limit_bytes": HEAD_LIMIT}
        error = ClocheError(
            "request.headers_too_large", f"request line and headers are larger than {HEAD_LIMIT} bytes", details=limit
        )
    else:
        error = ClocheError("request.invalid", "this is not an HTTP/1.1 request")
    request_id = random_bytes(8).hex()
    body = dump(error_body(error, request_id))
    status = HTTP_STATUS[error.code]
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\n" % (
        status,
        _REASONS[status],
        len(body),
        request_id.encode(),
    )
    return head + b"connection: close\r\n\r\n" + body
