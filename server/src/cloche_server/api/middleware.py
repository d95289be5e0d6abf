"""Around every request: its id, its token, one log line, and an answer whatever happens. Pure ASGI."""

from __future__ import annotations

import asyncio
import time
from functools import cache
from typing import Any, Final

from prometheus_client import Counter, Histogram
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche_server.api.errors import error_response, internal_error
from cloche_server.api.respond import ClientGone
from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import is_sandbox_id, is_token
from cloche_server.host.clock import random_bytes
from cloche_server.telemetry import log, metrics

_log = log.get("http")

_CORS: Final = (
    (b"access-control-allow-origin", b"*"),
    (
        b"access-control-expose-headers",
        b"X-Request-Id, X-Exec-Id, Location, Retry-After, X-Events-After, X-File-Mode, X-File-Mtime-Ns, "
        b"Content-Disposition",
    ),
)
_PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Idempotency-Key, Last-Event-ID, X-Request-Id",
    "Access-Control-Max-Age": "86400",
}


class RequestMiddleware:
    """Outermost: request id, log line, metrics, and JSON for what nobody has caught."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["cloche.request_id"] = request_id
        began = time.perf_counter()
        status = 0
        complete = False

        open_to_pages = _open_to_pages(scope["path"])
        more = [(b"x-request-id", request_id.encode("latin-1")), *(_CORS if open_to_pages else ())]

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        problem: str | None = None
        try:
            if scope["method"] == "OPTIONS" and open_to_pages:
                await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, send_with_id)
            else:
                await self._authenticated(scope, receive, send_with_id)
        except ClientGone:
            problem = "client gone"
            status = status or 499
        except ClocheError as error:
            problem = error.code
            if status:
                raise
            await error_response(error, request_id)(scope, receive, send_with_id)
        except asyncio.CancelledError:  # only the end of the grace at a shutdown cancels a request
            problem = "server.shutting_down"
            if not status:
                told = ClocheError("server.shutting_down", "the server is shutting down; try again", retry_after=2)
                await error_response(told, request_id)(scope, receive, send_with_id)
        except Exception as error:
            problem = "internal"
            _log.exception("request.crashed", request_id=request_id, error=repr(error))
            if status and not complete:
                raise  # the answer has begun; the server cuts the connection, and the client sees that
            if not status:
                await error_response(internal_error(), request_id)(scope, receive, send_with_id)
        finally:
            self._finish(scope, status, time.perf_counter() - began, request_id, problem)

    async def _authenticated(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/v1" or path.startswith("/v1/"):
            if self._services.stopping.is_set():
                raise ClocheError("server.shutting_down", "the server is shutting down; try again", retry_after=2)
            scope["cloche.token"] = await self._token(scope)
        await self._app(scope, receive, send)

    async def _token(self, scope: Scope) -> Any:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) > 1:
            raise ClocheError("auth.invalid_token", "more than one Authorization header was sent")
        scheme, _, token = sent[0].decode("latin-1").partition(" ") if sent else ("", "", "")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise ClocheError("auth.missing_token", "no bearer token was sent")
        found = await self._services.tokens.find(token) if is_token(token) else None
        if found is None:
            raise ClocheError("auth.invalid_token", "the bearer token is unknown or revoked")
        return found

    def _finish(self, scope: Scope, status: int, seconds: float, request_id: str, problem: str | None) -> None:
        route = scope.get("route")
        name = getattr(route, "path", "other")
        _count(scope["method"], name, status, seconds)
        token = scope.get("cloche.token")
        sandbox = scope.get("path_params", {}).get("sandbox_id", "")
        fields: dict[str, Any] = {"sandbox": sandbox if is_sandbox_id(sandbox) else None}
        if problem or scope.get("cloche.code"):
            fields["code"] = problem or scope.get("cloche.code")
        _log.info(
            "request",
            method=scope["method"],
            route=name,
            status=status,
            ms=round(seconds * 1000, 2),
            request_id=request_id,
            token=token.prefix[:8] if token else None,
            **{k: v for k, v in fields.items() if v},
        )


@cache
def _meters(method: str, route: str, status: int) -> tuple[Counter, Histogram]:
    """Bounded: routes and methods are those that exist."""
    return metrics.http_requests.labels(method, route, str(status)), metrics.http_seconds.labels(method, route)


def _count(method: str, route: str, status: int, seconds: float) -> None:
    requests, times = _meters(method, route, status)
    requests.inc()
    times.observe(seconds)


def _open_to_pages(path: str) -> bool:
    """What a page of any origin may call: the API, which needs a token that no browser sends by itself."""
    return path == "/v1" or path.startswith("/v1/") or path == "/openapi.json"


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = str(value.decode("latin-1"))
            if 0 < len(text) <= 64 and text.isascii() and text.isprintable():
                return text
    return random_bytes(8).hex()
