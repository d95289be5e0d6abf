"""What becomes of headers on their way: nothing of ours reaches a guest, nothing of one connection the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote_to_bytes

from cloche_server.core.http1 import Framing, Headers, RequestHead, ResponseHead, tokens
from cloche_server.core.ids import is_token
from cloche_server.core.previews import COOKIE, TOKEN_HEADER, TOKEN_QUERY, HostRule, PortRule, looks_like_token
from cloche_server.gateway.exchange import Exchange
from cloche_server.gateway.routes import Route, Way

_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"transfer-encoding", b"upgrade"}
)
#: What clients could claim, and what is ours.
_NOT_PASSED: Final = frozenset(
    {b"host", b"content-length", b"forwarded", b"x-real-ip", b"x-cloche-sandbox", b"x-cloche-port", b"trailer"}
    | {b"http2-settings", TOKEN_HEADER.lower().encode()}
)
_COOKIE: Final = COOKIE.encode()
_QUERY: Final = TOKEN_QUERY.encode()


def to_guest(
    exchange: Exchange, route: Route, rule: PortRule, *, opened_by_authorization: bool, scheme: str
) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Target and headers of the request that a server in the guest gets."""
    head = exchange.head
    named = set(tokens(head.headers, b"connection"))
    headers: list[tuple[bytes, bytes]] = [(b"Host", host_for(head, rule))]
    for name, value in head.headers:
        lower = name.lower()
        if lower in _HOP or lower in _NOT_PASSED or lower.startswith(b"x-forwarded-") or lower in named - {b"cookie"}:
            continue
        if lower == b"cookie":
            value = without_cookie(value)
            if not value:
                continue
        if lower == b"authorization" and (opened_by_authorization or is_our_authorization(value)):
            continue
        if lower == b"origin" and rule.host is HostRule.LOCALHOST:
            value = _local_origin(value, head, rule)
        headers.append((name, value))
    headers += [
        (b"X-Forwarded-For", exchange.client.encode("latin-1")),
        (b"X-Forwarded-Host", head.host),
        (b"X-Forwarded-Proto", scheme.encode()),
    ]
    if route.way is Way.API:  # the prefix of the other path form holds a secret
        headers.append((b"X-Forwarded-Prefix", route.prefix))
    headers += _framed(exchange.framing)
    if exchange.upgrade is not None:
        headers += [(b"Connection", b"Upgrade"), (b"Upgrade", head.first(b"upgrade") or b"")]
    else:
        headers.append((b"Connection", b"close"))
    return without_query(route.target), headers


def _framed(framing: Framing) -> list[tuple[bytes, bytes]]:
    if framing.chunked:
        return [(b"Transfer-Encoding", b"chunked")]
    return [] if framing.length is None else [(b"Content-Length", b"%d" % framing.length)]


def host_for(head: RequestHead, rule: PortRule) -> bytes:
    return b"localhost:%d" % rule.port if rule.host is HostRule.LOCALHOST else head.host


def _local_origin(value: bytes, head: RequestHead, rule: PortRule) -> bytes:
    """Only the origin that is the preview itself; what is foreign has to stay so."""
    scheme, _, host = value.partition(b"://")
    own = host.lower() == head.host.lower() and scheme in {b"http", b"https"}
    return b"http://localhost:%d" % rule.port if own else value


def to_client(answer: ResponseHead, *, upgrade: bool) -> Headers:
    """Headers of an answer, without those of the framing, which the client's side makes itself."""
    named = set(tokens(answer.headers, b"connection"))
    dropped = _HOP | {b"trailer"} | (named - {b"content-length"})
    found = []
    for name, value in answer.headers:
        lower = name.lower()
        if (lower == b"upgrade" and upgrade) or (lower not in dropped and lower != b"content-length"):
            found.append((name, value))
    if upgrade:
        found.append((b"Connection", b"Upgrade"))
    return tuple(found)


# ------------------------------------------------------------------ tokens


def is_our_authorization(value: bytes) -> bool:
    """A token of the API or of a preview, which no guest may see whether it was needed or not."""
    return (token := bearer(value)) is not None and (is_token(token) or looks_like_token(token))


def bearer(value: bytes) -> str | None:
    scheme, _, token = value.decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def cookie_tokens(head: RequestHead) -> list[str]:
    found = []
    for value in head.all(b"cookie"):
        for pair in value.split(b";"):
            name, _, text = pair.strip(b" \t").partition(b"=")
            if name == _COOKIE:
                found.append(text.decode("latin-1"))
    return found


def without_cookie(value: bytes) -> bytes:
    """A Cookie header without ours."""
    pairs = [pair for pair in value.split(b";") if pair.strip(b" \t").partition(b"=")[0] != _COOKIE]
    return b";".join(pairs).strip(b" \t")


def query_tokens(target: bytes) -> list[str]:
    return [unquote_to_bytes(value).decode("latin-1") for name, value in _pairs(target) if _is_token_name(name)]


def without_query(target: bytes) -> bytes:
    """A target without our parameter; all else byte for byte."""
    path, mark, query = target.partition(b"?")
    if not mark or not any(_is_token_name(name) for name, _ in _pairs(target)):
        return target
    kept = [part for part in query.split(b"&") if not _is_token_name(part.partition(b"=")[0])]
    return path + (b"?" + b"&".join(kept) if kept else b"")


def _pairs(target: bytes) -> list[tuple[bytes, bytes]]:
    query = target.partition(b"?")[2]
    return [(name, value) for name, _, value in (part.partition(b"=") for part in query.split(b"&"))]


def _is_token_name(name: bytes) -> bool:
    return unquote_to_bytes(name) == _QUERY


def wants_page(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """A browser that shows what it gets, and not a program that reads it."""
    return any(b"text/html" in value.lower() for name, value in headers if name.lower() == b"accept")
