"""Around every request: its id, its token, one log line, and an answer whatever happens. Pure ASGI."""

from __future__ import annotations

import asyncio
import time
from functools import cache
from typing import Any, Final

from prometheus_client import Counter, Histogram
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche_server.api.errors import error_body, error_response, internal_error
from cloche_server.api.guards import (
    NO_STORE,
    PREFLIGHT,
    SECURITY,
    STRICT,
    Header,
    Hosts,
    Origins,
    RateLimits,
    address_of,
    bearer,
    below_v1,
    limit_headers,
    too_fast,
)
from cloche_server.api.open_calls import OpenCalls
from cloche_server.api.respond import ClientGone
from cloche_server.api.sockets import SOCKET, SocketAnswer, socket_bearer
from cloche_server.api.sse import SseEvent
from cloche_server.app.audit import AuditEntry
from cloche_server.app.calls import Call, revoked
from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError
from cloche_server.core.filelinks import PREFIX
from cloche_server.core.ids import is_sandbox_id
from cloche_server.core.records import TokenInfo
from cloche_server.host.clock import random_bytes
from cloche_server.telemetry import log, metrics

_log = log.get("http")

#: Whose reader is stuck is not waited for when its token has ended (seconds).
_LAST_WORD_SECONDS: Final = 1.0
_MUTATING: Final = frozenset({"POST", "PUT", "PATCH", "DELETE", SOCKET})


class _Answer:
    """What is sent for one request: adds the headers of every answer, and knows how far it has come."""

    def __init__(self, scope: Scope, send: Send, more: list[Header]) -> None:
        self._send = send
        self._secure = scope.get("scheme") == "https"
        self.more = more
        self.status = 0
        self.complete = False
        self.streams_events = False
        self.location = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), *self.more, *SECURITY]
            named = dict(headers)
            if b"cache-control" not in named:
                headers.append(NO_STORE)
            if self._secure:
                headers.append(STRICT)
            self.location = named.get(b"location", b"")
            self.streams_events = named.get(b"content-type", b"").startswith(b"text/event-stream")
            message["headers"] = headers
        self.complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)


class RequestMiddleware:
    """Outermost: request id, log line, metrics, and JSON for what nobody has caught."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services
        self._hosts = Hosts(services.settings)
        self._origins = Origins(services.settings)
        self._limits = RateLimits(services.settings)
        settings = services.settings
        self._open = OpenCalls(settings.open_requests_per_workspace, settings.open_requests_per_sandbox)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["cloche.request_id"] = request_id
        began = time.perf_counter()
        for_pages, is_page = self._origins.headers(scope)
        answer = _Answer(scope, send, [(b"x-request-id", request_id.encode("latin-1")), *for_pages])
        problem: str | None = None
        try:
            if is_page and scope["method"] == "OPTIONS":
                await Response(status_code=204, headers=PREFLIGHT)(scope, receive, answer.send)
            else:
                await self._let_in(scope, receive, answer)
        except ClientGone:
            problem = "client gone"
            answer.status = answer.status or 499
        except ClocheError as error:
            problem = error.code
            if answer.status:
                raise
            await error_response(error, request_id)(scope, receive, answer.send)
        except asyncio.CancelledError:
            problem = await self._cut_off(scope, receive, answer)
        except Exception as error:
            problem = "internal"
            _log.exception("request.crashed", request_id=request_id, error=repr(error))
            if answer.status and not answer.complete:
                raise  # the answer has begun; the server cuts the connection, and the client sees that
            if not answer.status:
                await error_response(internal_error(), request_id)(scope, receive, answer.send)
        finally:
            self._finish(scope, answer, time.perf_counter() - began, request_id, problem)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket: whoever may not open it gets the answer of a request. It ends with its token."""
        scope["cloche.request_id"] = request_id = _request_id(scope)
        scope["method"] = SOCKET
        began = time.perf_counter()
        answer = SocketAnswer(send)
        problem: str | None = None
        try:
            await self._let_in(scope, receive, answer)
        except ClocheError as error:
            problem = error.code
            await answer.refuse(error, scope, receive)
        except asyncio.CancelledError:
            call: Call | None = scope.get("cloche.call")
            if call is not None and call.ended is not None:
                problem = call.ended.code
                call.task.uncancel()
                await answer.refuse(call.ended, scope, receive)
            else:
                problem = "server.shutting_down"
        except Exception as error:  # noqa: BLE001 - nobody above would tell the client
            problem = "internal"
            _log.exception("request.crashed", request_id=request_id, error=repr(error))
            await answer.refuse(internal_error(), scope, receive)
        finally:
            self._finish(scope, answer, time.perf_counter() - began, request_id, problem)

    async def _let_in(self, scope: Scope, receive: Receive, answer: _Answer | SocketAnswer) -> None:
        self._hosts.check(scope)
        if not below_v1(scope["path"]):
            await self._app(scope, receive, answer.send)
            return
        if self._services.stopping.is_set():
            raise ClocheError("server.shutting_down", "the server is shutting down; try again", retry_after=2)
        if scope["path"].startswith(PREFIX):
            await self._by_link(scope, receive, answer)
            return
        token = await self._token(scope)
        scope["cloche.token"] = token
        verdict = self._limits.take(token.prefix, time.monotonic())
        if verdict is not None:
            answer.more += limit_headers(verdict)
            if not verdict.allowed:
                raise too_fast(verdict)
        calls = self._services.tokens.calls
        call = calls.begin(token)
        scope["cloche.call"] = call
        try:
            with self._open.enter(token.workspace, scope["method"], scope["path"]):
                await self._app(scope, receive, answer.send)
        finally:
            calls.finish(call)

    async def _by_link(self, scope: Scope, receive: Receive, answer: _Answer | SocketAnswer) -> None:
        """A signed link to a file: it needs no token, and one that is not good counts as a failure to have one."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        try:
            scope["cloche.link"] = self._services.file_links.read(scope["path"].removeprefix(PREFIX), method)
        except ClocheError:
            self._limits.check_failure(address_of(scope), time.monotonic())
            raise
        await self._app(scope, receive, answer.send)

    async def _token(self, scope: Scope) -> TokenInfo:
        try:
            carried = socket_bearer(scope) if scope["type"] == "websocket" else bearer(scope)
            found = await self._services.tokens.find(carried)
            if found is None:
                raise revoked()
        except ClocheError as error:
            if error.code.startswith("auth."):
                self._limits.check_failure(address_of(scope), time.monotonic())
            raise
        return found

    async def _cut_off(self, scope: Scope, receive: Receive, answer: _Answer) -> str:
        """A request is cancelled when its token has ended, or at the end of the grace of a shutdown."""
        request_id = scope["cloche.request_id"]
        call: Call | None = scope.get("cloche.call")
        why = call.ended if call is not None else None
        if call is None or why is None:
            if not answer.status:
                told = ClocheError("server.shutting_down", "the server is shutting down; try again", retry_after=2)
                await error_response(told, request_id)(scope, receive, answer.send)
            return "server.shutting_down"
        call.task.uncancel()
        if answer.complete:
            return why.code
        try:
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                if not answer.status:
                    await error_response(why, request_id)(scope, receive, answer.send)
                elif answer.streams_events:
                    last = SseEvent("error", error_body(why, request_id)).encode()
                    await answer.send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            pass  # nobody reads; the server cuts the connection of an answer that is not complete
        return why.code

    def _finish(
        self, scope: Scope, answer: _Answer | SocketAnswer, seconds: float, request_id: str, problem: str | None
    ) -> None:
        route = scope.get("route")
        name = getattr(route, "path", "other")
        _count(scope["method"], name, answer.status, seconds)
        token: TokenInfo | None = scope.get("cloche.token")
        named = scope.get("path_params", {}).get("sandbox_id", "")
        sandbox = named if is_sandbox_id(named) else None
        code = problem or scope.get("cloche.code")
        fields: dict[str, Any] = {"sandbox": sandbox, "code": code}
        _log.info(
            "request",
            method=scope["method"],
            route=name,
            status=answer.status,
            ms=round(seconds * 1000, 2),
            request_id=request_id,
            token=token.prefix[:8] if token else None,
            **{k: v for k, v in fields.items() if v},
        )
        audit = self._services.audit
        if audit is None or scope["method"] not in _MUTATING or not below_v1(scope["path"]):
            return
        if token is None and code == "request.rate_limited":
            return  # a flood from strangers must not push out what is worth reading
        made = answer.location.removeprefix(b"/v1/sandboxes/").decode("latin-1")
        audit.record(
            AuditEntry(
                at=self._services.clock.now(),
                request_id=request_id,
                token=token.prefix if token else None,
                workspace=token.workspace if token else None,
                method=scope["method"],
                route=f"/v1{name}" if route is not None else "other",
                sandbox_id=sandbox or (made if is_sandbox_id(made) else None),
                status=answer.status,
                code=code,
                client=address_of(scope),
            )
        )


@cache
def _meters(method: str, route: str, status: int) -> tuple[Counter, Histogram]:
    """Bounded: routes and methods are those that exist."""
    return metrics.http_requests.labels(method, route, str(status)), metrics.http_seconds.labels(method, route)


def _count(method: str, route: str, status: int, seconds: float) -> None:
    requests, times = _meters(method, route, status)
    requests.inc()
    times.observe(seconds)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = str(value.decode("latin-1"))
            if 0 < len(text) <= 64 and text.isascii() and text.isprintable():
                return text
    return random_bytes(8).hex()
