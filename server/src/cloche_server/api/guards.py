"""Who may ask at all: the bearer token, the name in `Host`, how fast, and pages of other origins."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import parse_qsl

from starlette.types import Scope

from cloche_server.app.calls import revoked
from cloche_server.core.errors import ClocheError
from cloche_server.core.filelinks import PREFIX
from cloche_server.core.ids import is_token
from cloche_server.core.ratelimit import RateLimiter, Verdict
from cloche_server.settings import Settings

Header = tuple[bytes, bytes]

#: Of every answer. `Cache-Control` only where an answer says nothing of it itself.
SECURITY: Final[tuple[Header, ...]] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
NO_STORE: Final[Header] = (b"cache-control", b"no-store")
#: Only where the client came by TLS, as the proxy in front says.
STRICT: Final[Header] = (b"strict-transport-security", b"max-age=31536000")
#: Probes of load balancers name the server in any way.
_ANY_NAME: Final = frozenset({"/healthz", "/readyz"})
_EXPOSED: Final = (
    b"X-Request-Id, X-Exec-Id, Location, Retry-After, X-Events-After, X-File-Mode, X-File-Mtime-Ns, ETag, "
    b"Content-Range, Accept-Ranges, X-Archive-Entries, X-Archive-Bytes, X-Archive-Skipped, "
    b"Content-Disposition, X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset"
)
PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Idempotency-Key, If-Match, If-None-Match, If-Range, "
    "Last-Event-ID, Range, X-Request-Id",
    "Access-Control-Max-Age": "600",
}


def below_v1(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")


def bearer(scope: Scope) -> str:
    """The token that a request carries. Raises `auth.missing_token`, `auth.invalid_token`."""
    sent = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(sent) > 1:
        raise ClocheError("auth.invalid_token", "more than one Authorization header was sent")
    scheme, _, token = sent[0].decode("latin-1").partition(" ") if sent else ("", "", "")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        in_url = any(name == "access_token" for name, _ in parse_qsl(scope["query_string"].decode("latin-1")))
        why = "; one in the URL is not accepted, because URLs are logged" if in_url else ""
        raise ClocheError("auth.missing_token", f"no bearer token was sent{why}")
    if not is_token(token):
        raise revoked()
    return token


def address_of(scope: Scope) -> str:
    """The client's address, as the proxy in front says when there is one."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


class RateLimits:
    """Of each token, and of failed authentications from each address."""

    def __init__(self, settings: Settings) -> None:
        per_minute, failures = settings.rate_limit_per_minute, settings.auth_failures_per_minute
        self._tokens = RateLimiter(per_minute, settings.rate_limit_burst) if per_minute else None
        self._failures = RateLimiter(failures, failures) if failures else None

    def take(self, prefix: str, now: float) -> Verdict | None:
        """One request by a token; None when there is no limit."""
        return self._tokens.take(prefix, now) if self._tokens is not None else None

    def check_failure(self, address: str, now: float) -> None:
        """One failed authentication. Raises `request.rate_limited`. A token that is valid is never refused for what
        others at its address did: that would let anybody lock out all who come through one proxy."""
        if self._failures is None:
            return
        verdict = self._failures.take(_network(address), now)
        if not verdict.allowed:
            raise ClocheError(
                "request.rate_limited",
                "too many requests without a valid token came from this address",
                retry_after=verdict.retry_after,
            )


def _network(address: str) -> str:
    """Of IPv6 the /64: one machine has as many addresses in it as it likes."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


def limit_headers(verdict: Verdict) -> Sequence[Header]:
    return (
        (b"x-ratelimit-limit", b"%d" % verdict.limit),
        (b"x-ratelimit-remaining", b"%d" % verdict.remaining),
        (b"x-ratelimit-reset", b"%d" % verdict.reset),
    )


def too_fast(verdict: Verdict) -> ClocheError:
    return ClocheError(
        "request.rate_limited",
        f"this token sends more requests than the server allows ({verdict.limit} at once); "
        f"try again in {verdict.retry_after} s",
        retry_after=verdict.retry_after,
    )


class Hosts:
    """Under which names the server answers.

    A page whose name was made to mean 127.0.0.1 sends that name in `Host`. It has no token, so below `/v1` it gets
    nowhere; what needs none is told only to whoever names the server by a loopback name or one of `allowed_hosts`.
    With `allowed_hosts` set, all requests must, wherever the server listens.
    """

    def __init__(self, settings: Settings) -> None:
        listed = [name.strip().lower() for name in settings.allowed_hosts.split(",") if name.strip()]
        self._exact = frozenset(name for name in listed if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in listed if name.startswith("*."))
        self._strict = bool(listed)
        self._guarded = self._strict or is_loopback(settings.host)

    def check(self, scope: Scope) -> None:
        """Raises `request.host_refused`."""
        path = scope["path"]
        if not self._guarded or path in _ANY_NAME or (not self._strict and below_v1(path)):
            return
        sent = [value for name, value in scope["headers"] if name == b"host"]
        if not sent or (len(sent) == 1 and self._known(host_name(sent[0].decode("latin-1")))):
            return
        raise ClocheError(
            "request.host_refused",
            "the name in the Host header is not one of this server; its operator lists names in `allowed_hosts`",
        )

    def _known(self, name: str) -> bool:
        return is_loopback(name) or name in self._exact or name.endswith(self._suffixes or ("\0",))


def host_name(value: str) -> str:
    """The name in a `Host` header: without its port, its brackets and the dot at its end."""
    text = value.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def is_loopback(name: str) -> bool:
    """Whether a name or address means this machine and nothing else, for every resolver."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Origins:
    """Which pages of other origins may call `/v1` and `/openapi.json`: none, or those of `cors_origins`."""

    def __init__(self, settings: Settings) -> None:
        self._allowed = frozenset(settings.origins)

    def headers(self, scope: Scope) -> tuple[Iterable[Header], bool]:
        """What an answer carries, and whether the page that asks is one that may."""
        path = scope["path"]
        if path.startswith(PREFIX):
            # Whoever has the link may follow it, from any page: it is all that is needed, and no cookie is looked at.
            asks = any(name == b"origin" for name, _ in scope["headers"])
            exposed = (b"access-control-expose-headers", _EXPOSED)
            return ((b"access-control-allow-origin", b"*"), exposed), asks
        if not self._allowed or not (below_v1(path) or path == "/openapi.json"):
            return (), False
        sent = [value for name, value in scope["headers"] if name == b"origin"]
        vary: Header = (b"vary", b"Origin")
        if len(sent) != 1 or sent[0].decode("latin-1") not in self._allowed:
            return (vary,), False
        return (
            vary,
            (b"access-control-allow-origin", sent[0]),
            (b"access-control-expose-headers", _EXPOSED),
        ), True
