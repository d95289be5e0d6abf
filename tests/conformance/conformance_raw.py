"""HTTP/1.1 without a client library, for requests that no library sends."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """One answer; `body` as it was framed (chunks joined)."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        found = [value for key, value in self.headers if key == name.lower()]
        assert len(found) < 2, f"{name} came twice: {found}"
        return found[0] if found else None

    def json(self) -> Any:
        assert self.header("content-type") == "application/json", self
        return json.loads(self.body)

    def error(self, status: int, code: str) -> dict[str, Any]:
        """The body of an error, checked against the rules for all of them."""
        assert self.status == status, self
        body = self.json()
        check_error(body)
        assert body["code"] == code, body
        assert body["request_id"] == self.header("x-request-id")
        return dict(body)


def check_error(body: dict[str, Any]) -> None:
    assert isinstance(body["error"], str), body
    assert body["error"].strip(), body
    assert isinstance(body["code"], str), body
    assert isinstance(body["retryable"], bool), body
    assert isinstance(body["request_id"], str), body
    assert isinstance(body["details"], dict), body


@dataclass(frozen=True)
class Wire:
    """`host`, `port` and the token that is sent unless a request says otherwise."""

    host: str
    port: int
    token: str

    @classmethod
    def to(cls, url: str, token: str) -> Wire:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        return cls(parts.hostname, parts.port, token)

    def connect(self, timeout: float = 30.0) -> Connection:
        return Connection(socket.create_connection((self.host, self.port), timeout=timeout))

    def head(self, method: str, target: str, headers: str = "", auth: str | None = None) -> bytes:
        sent = f"Authorization: Bearer {self.token}\r\n" if auth is None else auth
        return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{sent}{headers}".encode("latin-1")

    def send(
        self,
        method: str,
        target: str,
        body: bytes | str | None = None,
        headers: str = "",
        auth: str | None = None,
        kind: str | None = "application/json",
    ) -> Answer:
        """One request on a connection of its own. `headers`, `auth`: whole lines, each with its CRLF."""
        raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
        if raw is not None:
            headers += f"Content-Length: {len(raw)}\r\n" + (f"Content-Type: {kind}\r\n" if kind else "")
        with self.connect() as connection:
            connection.send(self.head(method, target, headers, auth) + b"\r\n" + (raw or b""))
            return connection.answer(bodyless=method == "HEAD")

    def raw(self, data: bytes) -> Answer:
        with self.connect() as connection:
            connection.send(data)
            return connection.answer()


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def ended(self) -> bool:
        """Whether the other side closes without another byte."""
        try:
            return not self._buffer and self._socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def _more(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            raise EOFError(f"the connection ended after {self._buffer[-200:]!r}")
        self._buffer += data

    def until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._more()
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._more()
        found, self._buffer = self._buffer[:count], self._buffer[count:]
        return found

    def answer_head(self) -> tuple[int, list[tuple[str, str]]]:
        lines = self.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        assert version == "HTTP/1.1", lines
        pairs = [line.partition(": ") for line in lines[1:]]
        return int(status), [(name.lower(), value) for name, _, value in pairs]

    def chunk(self) -> bytes:
        """One chunk of a chunked body; empty at its end."""
        size = int(self.until(b"\r\n"), 16)
        data = self._exactly(size)
        assert self._exactly(2) == b"\r\n"
        return data

    def answer(self, *, bodyless: bool = False) -> Answer:
        status, headers = self.answer_head()
        found = dict(headers)
        if bodyless or status in {100, 204, 304}:
            return Answer(status, headers, b"")
        if found.get("transfer-encoding") == "chunked":
            parts = []
            while part := self.chunk():
                parts.append(part)
            return Answer(status, headers, b"".join(parts))
        return Answer(status, headers, self._exactly(int(found["content-length"])))
