"""Who may come in: by the rule of the port, by a token, by a password, or by a token of the API."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from typing import Final, Protocol

from cloche_server.app.callers import Owner
from cloche_server.app.ports import Ports
from cloche_server.core.errors import ClocheError
from cloche_server.core.http1 import RequestHead
from cloche_server.core.previews import (
    COOKIE,
    TOKEN_HEADER,
    PortAccess,
    PortRule,
    PreviewToken,
    check_password,
    path_allowed,
)
from cloche_server.core.records import Sandbox
from cloche_server.gateway.brakes import Brakes
from cloche_server.gateway.exchange import Exchange
from cloche_server.gateway.headers import bearer, cookie_tokens, query_tokens, wants_page, without_query
from cloche_server.gateway.routes import Route, Way
from cloche_server.host.clock import Clock, random_bytes

#: Passwords that were right, so that the slow check is not made for each request.
_KNOWN_MAX: Final = 1024
#: Checks of passwords at once: guessing must not take the processors of the host.
_CHECKS: Final = 2
#: What is said of a token or password that opens nothing.
_WRONG: Final = frozenset({"preview.unauthorized", "auth.invalid_token"})


class Callers(Protocol):
    async def owner(self, token: str, sandbox_id: str) -> Owner | None:
        """Whose a token of the API is that may use the sandbox; None for one that is unknown.

        Raises `auth.*` for one that has ended or may not, `sandbox.not_found` for one of another sandbox.
        """


class Records(Protocol):
    def find(self, workspace: str | None, sandbox_id: str) -> Sandbox:
        """The record of a living sandbox. Raises `sandbox.not_found`."""


@dataclass(frozen=True, slots=True)
class Grant:
    """`until` (Unix seconds): when it ends. `location`: where a browser goes on, with `cookie` set."""

    record: Sandbox
    rule: PortRule
    route: Route
    until: float | None = None
    by_authorization: bool = False
    location: bytes | None = None
    cookie: bytes | None = None
    #: Whose token of the API it was that opened it.
    owner: Owner | None = None


class Gate:
    def __init__(self, ports: Ports, records: Records, callers: Callers, clock: Clock, brakes: Brakes) -> None:
        self._brakes = brakes
        self._ports = ports
        self._records = records
        self._callers = callers
        self._clock = clock
        self._secret = random_bytes(32)
        self._known: set[bytes] = set()
        self._checks = asyncio.Semaphore(_CHECKS)

    async def admit(self, exchange: Exchange, route: Route, scheme: str) -> Grant:
        """Raises `sandbox.not_found`, `auth.*`, `preview.unauthorized`, `preview.path_forbidden`,
        `request.rate_limited`."""
        try:
            grant = await self._admit(exchange, route, scheme)
        except ClocheError as error:
            if error.code in _WRONG and _tried(exchange.head, route):
                self._brakes.wrong(route.sandbox_id, exchange.client, self._clock.monotonic())
            raise
        self._brakes.request(grant.record.id, self._clock.monotonic())
        return grant

    async def _admit(self, exchange: Exchange, route: Route, scheme: str) -> Grant:
        if route.way in {Way.API, Way.TUNNEL}:
            return await self._by_api(exchange.head, route)
        if route.way is Way.TOKEN:
            token = self._ports.read(route.token)
            if token is None:
                raise _unauthorized("the token is not valid, or has expired")
            record = self._records.find(token.workspace, token.sandbox_id)
            there = Route(route.way, token.sandbox_id, token.port, route.target, route.prefix, route.token)
            _check_path(token, there)
            return Grant(record, self._ports.rule_of(record, token.port), there, token.expires_at)
        record = self._records.find(None, route.sandbox_id)
        rule = self._ports.rule_of(record, route.port)
        if rule.access is PortAccess.PUBLIC:
            return Grant(record, rule, route)
        if rule.access is PortAccess.BASIC and await self._knows_password(exchange, rule):
            return Grant(record, rule, route, by_authorization=True)
        return await self._by_token(exchange, record, rule, route, scheme)

    async def _by_api(self, head: RequestHead, route: Route) -> Grant:
        sent = head.all(b"authorization")
        token = bearer(sent[0]) if len(sent) == 1 else None
        if token is None:
            raise ClocheError("auth.missing_token", "no bearer token was sent")
        owner = await self._callers.owner(token, route.sandbox_id)
        if owner is None:
            raise ClocheError("auth.invalid_token", "the bearer token is unknown or revoked")
        record = self._records.find(owner.workspace, route.sandbox_id)
        return Grant(record, self._ports.rule_of(record, route.port), route, by_authorization=True, owner=owner)

    async def _by_token(self, exchange: Exchange, record: Sandbox, rule: PortRule, route: Route, scheme: str) -> Grant:
        head = exchange.head
        for text, origin in _candidates(head, route):
            token = self._ports.read(text)
            if token is None:
                if origin == "authorization" and (owner := await self._owner(text, record)) is not None:
                    return Grant(record, rule, route, by_authorization=True, owner=owner)
                continue
            if (token.sandbox_id, token.port, token.workspace) != (record.id, route.port, record.workspace):
                continue
            _check_path(token, route)
            location = cookie = None
            if origin == "query" and head.method == b"GET" and exchange.upgrade is None and wants_page(head.headers):
                # Absolute: a path that begins with two slashes would lead somewhere else.
                location = f"{scheme}://".encode() + head.host + without_query(route.target)
                cookie = _cookie(text, token, self._clock.now(), scheme)
            return Grant(record, rule, route, token.expires_at, origin == "authorization", location, cookie)
        if rule.access is PortAccess.BASIC:
            raise _unauthorized("this preview asks for a name and a password", basic=True)
        raise _unauthorized("this preview asks for a token, and none that is valid was sent")

    async def _owner(self, token: str, record: Sandbox) -> Owner | None:
        try:
            found = await self._callers.owner(token, record.id)
        except ClocheError:
            return None
        return found if found is not None and found.workspace == record.workspace else None

    async def _knows_password(self, exchange: Exchange, rule: PortRule) -> bool:
        sent = exchange.head.all(b"authorization")
        given = _basic(sent[0]) if len(sent) == 1 else None
        if given is None or rule.username is None or rule.password is None:
            return False
        name, password = given
        if not hmac.compare_digest(name.encode(), rule.username.encode()) or len(password) > 1024:
            return False
        key = hmac.new(self._secret, f"{rule.password}\0{password}".encode(), hashlib.sha256).digest()
        if key in self._known:
            return True
        async with self._checks:
            # Here, so that guesses that were sent all at once do not all get a slow check.
            self._brakes.check_guess(rule.sandbox_id, exchange.client, self._clock.monotonic())
            right = await asyncio.to_thread(check_password, rule.password, password)
        if right:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known.add(key)
        return right


def _tried(head: RequestHead, route: Route) -> bool:
    """Something was sent that might have opened it; who comes with nothing has guessed nothing."""
    return route.way is Way.TOKEN or bool(head.all(b"authorization") or _candidates(head, route))


def _candidates(head: RequestHead, route: Route) -> list[tuple[str, str]]:
    """Tokens that came with a request, and how."""
    found = [(value.decode("latin-1").strip(), "header") for value in head.all(TOKEN_HEADER.lower().encode())]
    found += [(token, "authorization") for value in head.all(b"authorization") if (token := bearer(value)) is not None]
    found += [(token, "query") for token in query_tokens(route.target)]
    found += [(token, "cookie") for token in cookie_tokens(head)]
    return found[:8]


def _check_path(token: PreviewToken, route: Route) -> None:
    if not path_allowed(token.paths, route.target):
        raise ClocheError("preview.path_forbidden", "the token is not for this path")


def _unauthorized(sentence: str, *, basic: bool = False) -> ClocheError:
    return ClocheError("preview.unauthorized", sentence, details={"access": "basic" if basic else "token"})


def _cookie(text: str, token: PreviewToken, now: float, scheme: str) -> bytes:
    age = max(1, int(token.expires_at - now))
    secure = "; Secure" if scheme == "https" else ""
    return f"{COOKIE}={text}; Path=/; Max-Age={age}; HttpOnly; SameSite=Lax{secure}".encode("latin-1")


def _basic(value: bytes) -> tuple[str, str] | None:
    scheme, _, encoded = value.partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        text = base64.b64decode(encoded.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    name, colon, password = text.partition(":")
    return (name, password) if colon else None
