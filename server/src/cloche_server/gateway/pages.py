"""Answers of the gateway itself: JSON for programs, a small page for browsers. They say what is wrong."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Final

from cloche_server.core.errors import CATALOGUE, ClocheError

#: Where it differs from the API's: a preview has no callers that read our codes, but browsers and proxies.
_STATUS: Final[Mapping[str, int]] = {
    "sandbox.not_found": 404,
    "request.not_found": 404,
    "request.invalid": 400,
    "request.headers_too_large": 431,
    "auth.missing_token": 401,
    "auth.invalid_token": 401,
    "auth.token_expired": 401,
    "auth.forbidden": 403,
    "request.rate_limited": 429,
    "preview.unauthorized": 401,
    "preview.path_forbidden": 403,
    "budget.exceeded": 402,
    "port.timeout": 504,
    "sandbox.invalid_state": 503,
    "sandbox.failed": 503,
    "sandbox.busy": 503,
    "capacity.unavailable": 503,
    "host.disk_full": 503,
    "server.shutting_down": 503,
    "internal": 500,
}
_REASONS: Final[Mapping[int, str]] = {
    302: "Found",
    400: "Bad Request",
    401: "Unauthorized",
    402: "Payment Required",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
}
#: What may be done about it.
_HINTS: Final[Mapping[str, str]] = {
    "port.closed": "Start the server, and bind it to 0.0.0.0 or 127.0.0.1 with this port. Reload once it runs.",
    "port.timeout": "The server may be busy, or stand still.",
    "port.bad_answer": "The port has to speak plain HTTP/1.1.",
    "sandbox.not_found": "Look at the address: its first part is the port, a dash, and the id of the sandbox.",
    "preview.unauthorized": "Ask whoever runs it for a link that is signed.",
}
_COMMON: Final = (
    (b"Cache-Control", b"no-store"),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Content-Security-Policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors *"),
    (b"Referrer-Policy", b"no-referrer"),
)
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{status} {reason}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:4em auto;padding:0 1em;color:#222}}
h1{{font-size:1.4em}}code{{color:#666}}</style></head>
<body><h1>{status} {reason}</h1><p>{sentence}</p><p>{hint}</p><p><code>{code}</code></p></body></html>
"""

Answer = tuple[int, bytes, list[tuple[bytes, bytes]], bytes]


def reason(status: int) -> bytes:
    return _REASONS.get(status, "Error").encode()


def status_of(error: ClocheError) -> int:
    """What is not in the table went wrong between here and the guest."""
    return _STATUS.get(error.code, 502)


def of_error(error: ClocheError, *, page: bool, request_id: str, status: int | None = None) -> Answer:
    """Status, reason, headers and body."""
    number = status_of(error) if status is None else status
    spec = CATALOGUE[error.code]
    sentence = error.message or spec.summary
    headers = [*_COMMON, (b"X-Request-Id", request_id.encode())]
    if number == 401:
        basic = error.details.get("access") == "basic"
        headers.append((b"WWW-Authenticate", b'Basic realm="preview", charset="UTF-8"' if basic else b"Bearer"))
    if error.retry_after is not None:
        headers.append((b"Retry-After", b"%d" % max(1, round(error.retry_after))))
    if page:
        text = _PAGE.format(
            status=number,
            reason=_REASONS.get(number, "Error"),
            sentence=html.escape(sentence[:1].upper() + sentence[1:]),
            hint=html.escape(_HINTS.get(error.code, spec.action)),
            code=html.escape(error.code),
        )
        return number, reason(number), [(b"Content-Type", b"text/html; charset=utf-8"), *headers], text.encode()
    details = {
        name: value for name, value in error.details.items() if not isinstance(value, bytes) and name != "status"
    }
    body: dict[str, object] = {
        "error": "unauthorized" if error.code.startswith("auth.") else sentence,
        "code": error.code,
        "retryable": spec.retryable,
        "request_id": request_id,
        "details": details,
    }
    if error.code.startswith("auth."):
        body["detail"] = sentence
    if hint := _HINTS.get(error.code, spec.action):
        body["action"] = hint
    return number, reason(number), [(b"Content-Type", b"application/json"), *headers], json.dumps(body).encode()
