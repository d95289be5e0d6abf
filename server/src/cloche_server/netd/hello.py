"""The first message of TLS, read strictly. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cloche_server.core.names import canonical_name

MAX_HELLO: Final = 64 * 1024
_MAX_RECORD: Final = 16384
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_ECH: Final = frozenset({0xFE0D, 0xFFCE})


class NotTls(Exception):
    """These bytes begin no TLS connection."""


class More(Exception):
    """The message is not complete yet."""


class Broken(Exception):
    """TLS, but not as it has to be; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Hello:
    """`name`: canonical server name, None: there is none. `ech`: the real name may be hidden in it."""

    name: str | None
    ech: bool


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) < count:
            raise Broken("a part of the ClientHello is longer than the whole")
        self._at += count
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def parse_hello(data: bytes) -> Hello:
    """A ClientHello at the beginning of a connection, over as many records as it likes. Raises NotTls, More, Broken."""
    return _hello(_Bytes(_handshake(data)))


def _handshake(data: bytes) -> bytes:
    """The body of the first handshake message."""
    message = b""
    at = 0
    while True:
        head = data[at : at + 5]
        _check_record(head, first=at == 0)
        if len(head) < 5:
            raise More
        length = int.from_bytes(head[3:5], "big")
        if not 1 <= length <= _MAX_RECORD:
            raise Broken("a TLS record has a wrong length")
        message += data[at + 5 : at + 5 + length]
        if message and message[0] != _CLIENT_HELLO:
            raise Broken("the first message of TLS is no ClientHello")
        if len(message) >= 4:
            whole = 4 + int.from_bytes(message[1:4], "big")
            if whole > MAX_HELLO:
                raise Broken("the ClientHello is too long")
            if len(message) > whole:
                raise Broken("something follows the ClientHello at once")
            if len(message) == whole:
                return message[4:]
        at += 5 + length
        if at > len(data):
            raise More


def _check_record(head: bytes, *, first: bool) -> None:
    wrong = (head[:1] and head[0] != _HANDSHAKE) or (head[1:2] and head[1] != 3) or (head[2:3] and head[2] > 4)
    if wrong and first:
        raise NotTls
    if wrong:
        raise Broken("the ClientHello is interrupted")


def _hello(body: _Bytes) -> Hello:
    body.take(2 + 32)
    if len(body.vector(1)) > 32:
        raise Broken("the session id is too long")
    suites = body.vector(2)
    if len(suites) < 2 or len(suites) % 2 or not body.vector(1):
        raise Broken("the ClientHello offers nothing")
    if not body.left:
        return Hello(None, ech=False)
    extensions = _Bytes(body.vector(2))
    if body.left:
        raise Broken("something follows the extensions")
    name: str | None = None
    seen: set[int] = set()
    while extensions.left:
        kind = extensions.number(2)
        value = extensions.vector(2)
        if kind in seen:
            raise Broken("an extension is there twice")
        seen.add(kind)
        if kind == _SERVER_NAME:
            name = _server_name(_Bytes(value))
    return Hello(name, ech=bool(seen & _ECH))


def _server_name(value: _Bytes) -> str:
    names = _Bytes(value.vector(2))
    if value.left or names.number(1) != 0:
        raise Broken("the server name is not as it has to be")
    text = names.vector(2)
    if names.left:
        raise Broken("there is more than one server name")
    name = canonical_name(text.decode("latin-1"))
    if name is None:
        raise Broken("the server name is not the name of a host")
    return name
