"""A WebSocket to the API, byte by byte and without a library's opinion of when to read."""

from __future__ import annotations

import json
import socket
import time
from typing import Any, Self
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)


class Refused(Exception):
    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status} {body!r}")
        self.status = status
        self.body = body


class Socket:
    """One open WebSocket. `shown` is all the bytes that came, `texts` the decoded text messages, `code` that of
    its end."""

    def __init__(
        self, url: str, path: str, token: str | None, *, protocols: tuple[str, ...] = (), seconds: float = 60.0
    ) -> None:
        parts = urlsplit(url)
        self._sock = socket.create_connection((parts.hostname, parts.port), timeout=seconds)
        self._ws = WSConnection(ConnectionType.CLIENT)
        self.shown = bytearray()
        self.texts: list[Any] = []
        self.code: int | None = None
        self.protocol: str | None = None
        self._open = False
        self._status, self._body = 0, b""
        headers = [] if token is None else [(b"Authorization", f"Bearer {token}".encode())]
        self._send(Request(host=parts.netloc, target=path, extra_headers=headers, subprotocols=list(protocols)))
        while not self._open:
            if not self._read() and not self._open:
                raise Refused(self._status, self._body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def _send(self, event: Any) -> None:
        self._sock.sendall(self._ws.send(event))

    def _read(self) -> bool:
        data = self._sock.recv(65536)
        if not data:
            return False
        self._ws.receive_data(data)
        for event in self._ws.events():
            if isinstance(event, AcceptConnection):
                self._open, self.protocol = True, event.subprotocol
            elif isinstance(event, RejectConnection):
                self._status = event.status_code
                if not event.has_body:
                    return False
            elif isinstance(event, RejectData):
                self._body += event.data
                if event.body_finished:
                    return False
            elif isinstance(event, BytesMessage):
                self.shown += event.data
            elif isinstance(event, TextMessage):
                self.texts.append(json.loads(event.data))
            elif isinstance(event, Ping):
                self._send(event.response())
            elif isinstance(event, CloseConnection):
                self.code = event.code
                return False
        return True

    def type(self, data: bytes) -> None:
        self._send(BytesMessage(data))

    def tell(self, value: Any) -> None:
        self._send(TextMessage(json.dumps(value)))

    def until(self, text: bytes, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            alive = time.monotonic() < deadline and self._read()
            assert alive or text in self.shown, (text, bytes(self.shown), self.texts)

    def end(self) -> None:
        """Reads until it is closed."""
        while self._read():
            pass

    def close(self) -> None:
        self._sock.close()
