"""Heads and bodies of HTTP/1.1 messages, read strictly: what two servers could read differently is refused.

Nothing here does I/O. `HttpError` is for what a client has sent; `BadAnswer` for what a server has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Headers = tuple[tuple[bytes, bytes], ...]

#: Bytes of a head, and lines in it.
HEAD_LIMIT: Final = 64 * 1024
LINES_LIMIT: Final = 200
_CHUNK_LINE: Final = 1024

_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET: Final = re.compile(rb"[\x21-\x7e\x80-\xff]+")
#: No control characters but the tab.
_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_DIGITS: Final = re.compile(rb"[0-9]{1,15}")
_HEX: Final = re.compile(rb"[0-9A-Fa-f]{1,15}")
_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%\-]*(:[0-9]{0,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{0,5})?")
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?")


class HttpError(Exception):
    """A request that is refused; `status` is 400, 405, 417, 431, 501 or 505."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class BadAnswer(Exception):
    """An answer that is no HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """`target` byte for byte as it was sent, but without scheme and authority; those of it are in `host`."""

    method: bytes
    target: bytes
    minor: int
    headers: Headers
    host: bytes

    def all(self, name: bytes) -> list[bytes]:
        """The values of a header, `name` in lower case."""
        return values(self.headers, name)

    def first(self, name: bytes) -> bytes | None:
        found = self.all(name)
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class ResponseHead:
    status: int
    reason: bytes
    minor: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class Framing:
    """How long a body is: `length` bytes, in chunks, or until the connection ends. None of them: there is none."""

    length: int | None = None
    chunked: bool = False
    until_close: bool = False

    @property
    def empty(self) -> bool:
        return not self.chunked and not self.until_close and not self.length


NO_BODY: Final = Framing()


def values(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def tokens(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """The members of a list header, in lower case."""
    found = [part.strip(b" \t").lower() for value in values(headers, name) for part in value.split(b",")]
    return [part for part in found if part]


# ------------------------------------------------------------------ requests


def parse_request(block: bytes) -> RequestHead:
    """A head with its empty line. Raises HttpError."""
    lines = block.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if any(b"\n" in line or b"\r" in line or b"\0" in line for line in lines):
        raise HttpError(400, "a line of the request does not end as HTTP says")
    if len(lines) > LINES_LIMIT:
        raise HttpError(431, f"the request has more than {LINES_LIMIT} header lines")
    parts = lines[0].split(b" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise HttpError(400, "the first line is not one of an HTTP/1.1 request")
    method, target, version = parts
    if version not in {b"HTTP/1.1", b"HTTP/1.0"}:
        raise HttpError(505 if version.startswith(b"HTTP/") else 400, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    headers = _request_lines(lines[1:])
    hosts = values(headers, b"host")
    minor = int(version[-1:])
    if len(hosts) > 1 or (minor and not hosts) or any(not _HOST.fullmatch(host) for host in hosts):
        raise HttpError(400, "the request needs exactly one valid Host header")
    target, host = _origin_form(method, target, hosts[0] if hosts else b"")
    return RequestHead(method, target, minor, headers, host)


def _request_lines(lines: list[bytes]) -> Headers:
    found = []
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise HttpError(400, "a header line is malformed")
        found.append((name, value))
    return tuple(found)


def _origin_form(method: bytes, target: bytes, host: bytes) -> tuple[bytes, bytes]:
    if method == b"CONNECT":
        raise HttpError(405, "CONNECT is not possible here")
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target, host
    found = re.fullmatch(rb"(?i:https?)://([^/?#@]+)([/?].*)?", target)
    if found is None or not _HOST.fullmatch(found[1]):
        raise HttpError(400, "the target of the request is not a path")
    rest = found[2] or b"/"
    return (rest if rest.startswith(b"/") else b"/" + rest), found[1]


def request_framing(head: RequestHead) -> Framing:
    """Raises HttpError for everything that another server could understand in another way."""
    coding, lengths = head.all(b"transfer-encoding"), head.all(b"content-length")
    if coding and lengths:
        raise HttpError(400, "Content-Length and Transfer-Encoding exclude each other")
    if coding:
        if head.minor == 0 or len(coding) > 1:
            raise HttpError(400, "this Transfer-Encoding is not possible here")
        if coding[0].lower() != b"chunked":
            raise HttpError(501, "the only Transfer-Encoding is chunked")
        return Framing(chunked=True)
    if not lengths:
        return NO_BODY
    if len(lengths) > 1 or not _DIGITS.fullmatch(lengths[0]):
        raise HttpError(400, "Content-Length is not one number")
    return Framing(length=int(lengths[0]))


# ------------------------------------------------------------------ answers


def parse_response(block: bytes) -> ResponseHead:
    """A head with its empty line; lines may end without a carriage return. Raises BadAnswer."""
    lines = [line.removesuffix(b"\r") for line in block.rstrip(b"\r\n").split(b"\n")]
    if len(lines) > LINES_LIMIT:
        raise BadAnswer(f"it has more than {LINES_LIMIT} header lines")
    first = _STATUS.fullmatch(lines[0])
    if first is None:
        raise BadAnswer("its first line is not one of HTTP/1.1")
    headers: list[tuple[bytes, bytes]] = []
    for line in lines[1:]:
        if line[:1] in {b" ", b"\t"} and headers:  # a folded line, which is obsolete and only joined here
            headers[-1] = (headers[-1][0], headers[-1][1] + b" " + _checked(line))
            continue
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name):
            raise BadAnswer("a header line is malformed")
        headers.append((name, _checked(value)))
    return ResponseHead(int(first[2]), first[3] or b"", int(first[1]), tuple(headers))


def _checked(value: bytes) -> bytes:
    value = value.strip(b" \t")
    if not _VALUE.fullmatch(value):
        raise BadAnswer("a header holds control characters")
    return value


def response_framing(head: ResponseHead, method: bytes) -> Framing:
    """Raises BadAnswer when its length is contradictory."""
    if method == b"HEAD" or head.status < 200 or head.status in {204, 304}:
        return NO_BODY
    coding = tokens(head.headers, b"transfer-encoding")
    if coding:
        if coding != [b"chunked"]:
            raise BadAnswer("its Transfer-Encoding is not chunked")
        return Framing(chunked=True)
    lengths = set(values(head.headers, b"content-length"))
    if not lengths:
        return Framing(until_close=True)
    if len(lengths) > 1 or not _DIGITS.fullmatch(next(iter(lengths))):
        raise BadAnswer("its Content-Length is not one number")
    return Framing(length=int(lengths.pop()))


# ------------------------------------------------------------------ chunks


class ChunkedReader:
    """Takes chunks apart. `done` after the last one; `rest` is what came behind it. Raises ValueError."""

    __slots__ = ("_left", "_line", "_state", "_trailer_bytes", "done", "rest", "trailers")

    def __init__(self) -> None:
        self._state = "size"
        self._left = 0
        self._line = b""
        self._trailer_bytes = 0
        self.done = False
        self.rest = b""
        self.trailers: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Pieces of the body in `data`."""
        found: list[bytes] = []
        at = 0
        while at < len(data) and not self.done:
            if self._state == "data":
                piece = data[at : at + self._left] if at or len(data) > self._left else data
                found.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = "end"
                continue
            at = self._feed_line(data, at)
        if self.done:
            self.rest = data[at:]
        return found

    def _feed_line(self, data: bytes, at: int) -> int:
        end = data.find(b"\n", at)
        stop = len(data) if end < 0 else end + 1
        limit = HEAD_LIMIT if self._state == "trailer" else _CHUNK_LINE
        if len(self._line) + stop - at > limit:
            raise ValueError("a line between chunks is too long")
        self._line += data[at:stop]
        if end >= 0:
            line, self._line = self._line, b""
            if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
                raise ValueError("a line between chunks does not end as HTTP says")
            self._take(line[:-2])
        return stop

    def _take(self, line: bytes) -> None:
        if self._state == "end":
            if line:
                raise ValueError("a chunk is longer than it says")
            self._state = "size"
        elif self._state == "size":
            size, semicolon, extension = line.partition(b";")
            if semicolon:
                size = size.rstrip(b" \t")
            if not _HEX.fullmatch(size) or not _VALUE.fullmatch(extension):
                raise ValueError("the size of a chunk is not a number")
            self._left = int(size, 16)
            self._state = "data" if self._left else "trailer"
        elif not line:
            self.done = True
        else:
            self._trailer_bytes += len(line)
            name, colon, value = line.partition(b":")
            value = value.strip(b" \t")
            if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
                raise ValueError("a trailer is malformed")
            self.trailers.append((name, value))
            if len(self.trailers) > LINES_LIMIT or self._trailer_bytes > HEAD_LIMIT:
                raise ValueError("there are too many trailers")


def chunk(data: bytes) -> bytes:
    """`data`, which is not empty, as a chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def last_chunk(trailers: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    return b"0\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in trailers) + b"\r\n"


def format_request(method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (method, target), *(b"%b: %b" % pair for pair in headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def format_response(status: int, reason: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    lines = [b"HTTP/1.1 %d %b" % (status, reason), *(b"%b: %b" % pair for pair in headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"
