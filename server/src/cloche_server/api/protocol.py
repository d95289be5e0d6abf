"""The HTTP/1.1 protocol of Uvicorn, with bounds for strangers and with errors in JSON.

Everything here happens before a request has reached the application, so before its token is known.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cloche_server.api.errors import HTTP_STATUS, error_body
from cloche_server.api.guards import NO_STORE, SECURITY
from cloche_server.api.respond import dump
from cloche_server.core.errors import ClocheError
from cloche_server.host.clock import random_bytes
from cloche_server.settings import Settings

#: How long what still comes is thrown away after a refusal. Closing at once would reset the connection, and
#: the answer would be lost with it.
LINGER_SECONDS: Final = 1.0
#: Paths of WebSockets; those of ports are somebody else's.
_SOCKETS: Final = re.compile(rb"/v1/sandboxes/[^/]+/(?:terminal|ssh|exec/pty)")
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
    """One connection. `head_limit`: request line and headers together (bytes). A connection that has begun a request
    must have sent its headers after `head_seconds`."""

    head_limit = 64 * 1024
    head_seconds = 30.0

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
        if self._head_bytes > self.head_limit and not self.transport.is_closing():
            self._too_large = True
            self.send_400_response("")
        elif self._head_timer is None:
            self._arm()

    def _should_upgrade_to_ws(self) -> bool:
        """Only where there is a WebSocket: elsewhere the wish to have one is passed over."""
        return super()._should_upgrade_to_ws() and _SOCKETS.fullmatch(self.url.partition(b"?")[0]) is not None

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
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.head_limit:
            self._too_large = True
            raise _HeadTooLarge
        super().on_headers_complete()

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._too_slow)

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
        self.transport.write(_refusal(self.head_limit if self._too_large else None))
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def protocol_for(settings: Settings) -> type[HttpProtocol]:
    """The protocol with the limits of the settings; Uvicorn makes one for each connection and takes no arguments."""
    limits = {"head_limit": settings.max_header_kb * 1024, "head_seconds": settings.header_timeout}
    return type("LimitedProtocol", (HttpProtocol,), limits)


def handing_over(sharing: Sharing, base: type[HttpProtocol] = HttpProtocol) -> type[HttpProtocol]:
    """The protocol with somebody who takes some connections over."""
    return type("SharedProtocol", (base,), {"sharing": sharing})


def _refusal(limit: int | None) -> bytes:
    """`limit` (bytes): what request line and headers are larger than."""
    if limit is not None:
        error = ClocheError(
            "request.headers_too_large",
            f"request line and headers are larger than {limit} bytes",
            details={"limit_bytes": limit},
        )
    else:
        error = ClocheError("request.invalid", "this is not an HTTP/1.1 request")
    request_id = random_bytes(8).hex()
    body = dump(error_body(error, request_id))
    status = HTTP_STATUS[error.code]
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode()),
        *SECURITY,
        NO_STORE,
        (b"connection", b"close"),
    ]
    head = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, _REASONS[status], head, body)
