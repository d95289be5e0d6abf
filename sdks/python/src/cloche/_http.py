"""How the HTTP library is set up, for both kinds of client."""

from __future__ import annotations

import functools
import ssl
from typing import Any
from urllib.parse import urlsplit

import httpx

from ._call import USER_AGENT

#: Concurrent requests of one client. More wait for a free connection.
MAX_CONNECTIONS = 256
KEPT_IDLE = 20
#: Shorter than the usual five seconds of servers: a connection is not reused while the server closes it.
IDLE_SECONDS = 4.0


# A proxy named in the environment cannot reach what these mean.
_DIRECT = ("all://127.0.0.1", "all://localhost", "all://[::1]")


def client_options(secure: bool, max_connections: int | None) -> dict[str, Any]:
    """Keyword arguments for `httpx.Client` and `httpx.AsyncClient`."""
    limit = MAX_CONNECTIONS if max_connections is None else max_connections
    return {
        "verify": _tls() if secure else _no_tls(),
        "mounts": dict.fromkeys(_DIRECT),
        "follow_redirects": False,
        "headers": {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
        "limits": httpx.Limits(
            max_connections=limit,
            max_keepalive_connections=min(limit, KEPT_IDLE),
            keepalive_expiry=IDLE_SECONDS,
        ),
    }


def is_secure(url: str) -> bool:
    """Whether the address is one of https."""
    return url.startswith("https:")


def address(url: str) -> tuple[str, int, ssl.SSLContext | None]:
    """Host and port of a server, and how the connection is secured."""
    parts = urlsplit(url)
    secure = is_secure(url)
    return parts.hostname or "", parts.port or (443 if secure else 80), _tls() if secure else None


def _no_tls() -> ssl.SSLContext:
    """Trusts nobody, and costs nothing to make: for plain HTTP."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@functools.cache
def _tls() -> ssl.SSLContext:
    """Loading the certificate store takes tens of milliseconds: only for https, once in a process."""
    return httpx.create_ssl_context()
