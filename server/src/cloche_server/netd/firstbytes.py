"""What the first bytes of a guest claim: TLS with a name, HTTP with a host, or neither. Pure.

Everything that a server could take for HTTP counts as HTTP, also where it bends the grammar.
"""

from __future__ import annotations

import re
from typing import Final

from cloche_server.core.names import canonical_name
from cloche_server.core.policy import Claim, ClaimKind
from cloche_server.netd.hello import Broken, More, NotTls, parse_hello

MAX_BYTES: Final = 64 * 1024
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32})[ \t]+(\S{1,16384})[ \t]+HTTP/1\.[0-9]\r?")
#: A beginning of such a line.
_OPEN_LINE: Final = re.compile(
    rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}(?:[ \t]+(?:\S{1,16384}(?:[ \t]+(?:H|HT|HTT|HTTP|HTTP/[0-9.]{0,3}\r?)?)?)?)?"
)
_PORT: Final = re.compile(r"(.*):([0-9]{1,5})")


def claim_of(data: bytes, *, final: bool) -> Claim | None:
    """None: more bytes are needed; never when `final`, which is the end or the time that is given."""
    try:
        hello = parse_hello(data)
    except NotTls:
        return _http(data, final=final)
    except Broken as error:
        return Claim(ClaimKind.TLS, None, str(error))
    except More:
        if not data:
            return Claim(ClaimKind.RAW) if final else None
        if final or len(data) >= MAX_BYTES:
            return Claim(ClaimKind.TLS, None, "the ClientHello did not come to its end")
        return None
    if hello.name is None and hello.ech:
        return Claim(ClaimKind.TLS, None, "the server name is hidden (ECH)")
    return Claim(ClaimKind.TLS, hello.name)


def _http(data: bytes, *, final: bool) -> Claim | None:
    if data.startswith(_PREFACE[: len(data)]) and len(data) < len(_PREFACE) and not final:
        return None
    if data.startswith(_PREFACE):
        return Claim(ClaimKind.HTTP2)
    text = data.lstrip(b"\r\n")
    if not text:
        return Claim(ClaimKind.RAW) if final else None
    line, newline, rest = text.partition(b"\n")
    if not newline:
        if _OPEN_LINE.fullmatch(line) and not final and len(data) < MAX_BYTES:
            return None
        return Claim(ClaimKind.RAW)
    match = _LINE.fullmatch(line)
    if match is None:
        return Claim(ClaimKind.RAW)
    head = _head(rest)
    if head is None:
        if final or len(data) >= MAX_BYTES:
            return Claim(ClaimKind.HTTP, None, "the head of the request did not come to its end")
        return None
    return _request(match[1], match[2].decode("latin-1"), head)


def _head(rest: bytes) -> list[bytes] | None:
    """The header lines, once the empty line after them is there."""
    lines: list[bytes] = []
    while True:
        line, newline, rest = rest.partition(b"\n")
        if not newline:
            return None
        line = line.removesuffix(b"\r")
        if not line:
            return lines
        lines.append(line)


def _request(method: bytes, target: str, head: list[bytes]) -> Claim:
    hosts = []
    for line in head:
        field, colon, value = line.partition(b":")
        if line[:1] in b" \t" or not colon or field != field.strip():
            return Claim(ClaimKind.HTTP, None, "a header line is not as it has to be")
        if field.lower() == b"host":
            hosts.append(value.strip().decode("latin-1"))
    if method.upper() == b"CONNECT":
        return Claim(ClaimKind.HTTP, None, "CONNECT is for proxies, and there is none here")
    if len(hosts) != 1:
        return Claim(ClaimKind.HTTP, None, "the request names no host, or more than one")
    host = hosts[0]
    if not target.startswith(("/", "*")):
        scheme, separator, rest = target.partition("://")
        authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
        if not separator or scheme.lower() != "http" or _plain(authority) != _plain(host):
            return Claim(ClaimKind.HTTP, None, "the request line and the Host header do not agree")
    name = canonical_name(_plain(host))
    if name is None:
        return Claim(ClaimKind.HTTP, None, "the Host header names no host; addresses need a rule with a cidr")
    return Claim(ClaimKind.HTTP, name)


def _plain(authority: str) -> str:
    """Without a port."""
    match = _PORT.fullmatch(authority)
    return (match[1] if match else authority).lower()
