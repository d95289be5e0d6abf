"""From clients to ports of guests: its own listener, and connections that the API's hands over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from cloche_server.app.audit import AuditEntry
from cloche_server.app.dialing import GuestDialer
from cloche_server.app.ports import Ports
from cloche_server.core.errors import ClocheError
from cloche_server.core.http1 import Framing, HttpError, RequestHead, format_response
from cloche_server.core.previews import PreviewBase, is_port
from cloche_server.gateway import pages
from cloche_server.gateway.admission import Gate, Grant
from cloche_server.gateway.door import Door
from cloche_server.gateway.exchange import Exchange
from cloche_server.gateway.forward import Pulse, Truncated, forward
from cloche_server.gateway.headers import to_guest, wants_page
from cloche_server.gateway.http1 import H1Exchange, serve
from cloche_server.gateway.routes import Route, Way, by_name, by_path
from cloche_server.gateway.sessions import Session, Sessions
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.host.sockets import SocketStream
from cloche_server.telemetry import log

_log = log.get("gateway")

#: Connections of clients at once, whether anything is under way on them or not.
MAX_CLIENTS: Final = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """`answer`: seconds for the head of an answer; `idle`: without a byte in either direction."""

    answer: float = 300.0
    idle: float = 3600.0


class Gateway:
    """`run` it; it serves until `stop`."""

    def __init__(
        self, dialer: GuestDialer, gate: Gate, ports: Ports, clock: Clock, limits: Limits, base: PreviewBase | None
    ) -> None:
        self._dialer = dialer
        self._gate = gate
        self._ports = ports
        self._clock = clock
        self._limits = limits
        self._base = base
        self._sessions = Sessions(limits.idle)
        self._group: asyncio.TaskGroup | None = None
        self._clients: set[SocketStream] = set()
        self._stopping = asyncio.Event()
        #: Carries on a connection that has begun with TLS and chosen HTTP/2; set once, where that is spoken.
        self.http2: Callable[[SocketStream, Callable[[Exchange], Awaitable[None]]], Awaitable[None]] | None = None
        #: Carries on what is to be a raw connection in a WebSocket; set once.
        self.tunnel: Callable[[Exchange, Grant, GuestDialer, Session], Awaitable[None]] | None = None
        #: Takes what the audit log is to tell; set once, where one is kept.
        self.audit: Callable[[AuditEntry], None] | None = None
        #: Answers who proves names to an authority, and all on the listener without TLS; set once, with ACME.
        self.door: Door | None = None
        ports.on_change = self._sessions.revoke

    @property
    def protocols(self) -> tuple[str, ...]:
        """Of HTTP, the preferred one first."""
        return ("h2", "http/1.1") if self.http2 is not None else ("http/1.1",)

    # ---------------------------------------------------------------- life

    async def run(
        self,
        listener: socket.socket | None,
        tls: ssl.SSLContext | None,
        grace: float,
        plain: socket.socket | None = None,
    ) -> None:
        """Serves until `stop`, and then at most `grace` seconds more what is under way. `plain`: for the door alone."""
        loop = asyncio.get_running_loop()
        servers = []
        async with asyncio.TaskGroup() as group:
            self._group = group
            if listener is not None:
                servers.append(await loop.create_server(lambda: SocketStream(self._made), sock=listener, ssl=tls))
            if plain is not None:
                servers.append(await loop.create_server(lambda: SocketStream(self._made_plain), sock=plain))
            await self._stopping.wait()
            for server in servers:
                server.close()
            await self._drain(grace)
            self._group = None

    def stop(self) -> None:
        self._stopping.set()

    async def _drain(self, grace: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._sessions.wait_empty()
        self._sessions.stop()
        for stream in list(self._clients):
            stream.close()

    # ---------------------------------------------------------------- connections

    def _made(self, stream: SocketStream) -> None:
        self._start(stream, own=True)

    def _made_plain(self, stream: SocketStream) -> None:
        self._start(stream, own=True, plain=True)

    def adopt(self, transport: asyncio.Transport, data: bytes) -> None:
        """Takes a connection of the API's listener over, with the bytes of the request that it has begun."""
        stream = SocketStream()
        transport.set_protocol(stream)
        stream.connection_made(transport)
        stream.data_received(data)
        self._start(stream, own=False)

    def _start(self, stream: SocketStream, *, own: bool, plain: bool = False) -> None:
        if self._group is None or self._stopping.is_set() or len(self._clients) >= MAX_CLIENTS:
            stream.close()
            return
        self._clients.add(stream)
        task = self._group.create_task(self._serve(stream, own=own, plain=plain), name="preview")
        task.add_done_callback(lambda _: self._clients.discard(stream))

    async def _serve(self, stream: SocketStream, *, own: bool, plain: bool) -> None:
        tls = stream.transport.get_extra_info("ssl_object")
        try:
            if tls is not None and self.http2 is not None and tls.selected_alpn_protocol() == "h2":
                await self.http2(stream, lambda exchange: self.handle(exchange, own=True))
                return
            await serve(
                stream,
                lambda exchange: self.handle(exchange, own=own, plain=plain),
                self._refuse,
                secure=tls is not None,
                once=not own,
            )
        except asyncio.CancelledError:
            stream.abort()  # its token has ended
            raise
        except Exception as error:  # noqa: BLE001 - one connection must never take the others with it
            # Without the values of variables, which an exception's usual picture shows: there are tokens among them.
            _log.error("preview.crashed", error=repr(error), trace="".join(traceback.format_exception(error)))
            stream.abort()

    async def _refuse(self, exchange: H1Exchange | None, stream: SocketStream, error: HttpError) -> None:
        told, status = _told(error)
        number, reason, headers, body = pages.of_error(told, page=False, request_id=_new_id(), status=status)
        headers += [(b"Content-Length", b"%d" % len(body)), (b"Connection", b"close")]
        await stream.write(format_response(number, reason, headers) + body)

    # ---------------------------------------------------------------- one request

    async def handle(self, exchange: Exchange, *, own: bool, plain: bool = False) -> None:
        """Answers one request, whatever happens."""
        request_id = _new_id()
        why = None
        try:
            if not (own and await self._at_door(exchange, plain=plain)):
                why = await self._attempt(exchange, own, request_id)
        except ClocheError as error:
            why = error.code
            await self._answer(exchange, error, request_id)
        except HttpError as error:
            told, status = _told(error)
            why = told.code
            await self._answer(exchange, told, request_id, status)
        except (Truncated, ConnectionError) as error:
            why = "truncated" if isinstance(error, Truncated) else "broken"
            exchange.cut()
        if why is not None:
            _log.info("preview.failed", why=why, request_id=request_id)

    async def _at_door(self, exchange: Exchange, *, plain: bool) -> bool:
        """Whether that was all. On the listener without TLS it always is. Raises `sandbox.not_found`."""
        if self.door is None:
            return False
        told = self.door.plain(exchange.head) if plain else self.door.proof(exchange.head)
        if told is not None:
            await _send(exchange, told.status, told.reason, told.headers, told.body)
        return told is not None

    async def _attempt(self, exchange: Exchange, own: bool, request_id: str) -> str | None:
        route = self._route(exchange.head, own)
        if self._stopping.is_set():
            raise ClocheError("server.shutting_down", "the server is shutting down; try again", retry_after=2)
        grant = await self._gate.admit(exchange, route, self._scheme(exchange))
        if grant.location is not None and grant.cookie is not None:
            headers = [(b"Location", grant.location), (b"Set-Cookie", grant.cookie), (b"Cache-Control", b"no-store")]
            await _send(exchange, 302, b"Found", headers, b"")
            return None
        session = None
        try:
            async with self._sessions.open(grant.record.id, grant.route.port) as session:
                with grant.owner.hold() if grant.owner is not None else contextlib.nullcontext():
                    await self._under_way(exchange, grant, session, request_id)
        except TimeoutError:
            exchange.cut()
            return session.why if session is not None else "timeout"
        return None

    def _note(self, exchange: Exchange, grant: Grant, request_id: str) -> None:
        """A tunnel reaches what HTTP does not, so that it was opened is kept; single requests are not."""
        if self.audit is not None:
            self.audit(
                AuditEntry(
                    at=self._clock.now(),
                    request_id=request_id,
                    token=grant.owner.prefix if grant.owner is not None else None,
                    workspace=grant.record.workspace,
                    method="GET",
                    route="/v1/sandboxes/{sandbox_id}/tunnel/{port}",
                    sandbox_id=grant.record.id,
                    status=101,
                    code=None,
                    client=exchange.client,
                )
            )

    async def _under_way(self, exchange: Exchange, grant: Grant, session: Session, request_id: str) -> None:
        exchange.watch(lambda: session.end("gone"))
        if grant.until is not None:
            session.ends_in(grant.until - self._clock.now())
        route = grant.route
        if route.way is Way.TUNNEL:
            if self.tunnel is None or exchange.upgrade != b"websocket":
                raise HttpError(400, "a tunnel is opened with a WebSocket")
            self._note(exchange, grant, request_id)
            await self.tunnel(exchange, grant, self._dialer, session)
            return
        target, headers = to_guest(
            exchange, route, grant.rule, opened_by_authorization=grant.by_authorization, scheme=self._scheme(exchange)
        )
        upstream = await self._dialer.dial(grant.record.workspace, grant.record.id, route.port)
        try:
            await forward(exchange, upstream, target, headers, route.port, Pulse(session.beat, self._limits.answer))
        finally:
            upstream.close()

    def _route(self, head: RequestHead, own: bool) -> Route:
        if own and self._base is not None:
            route = by_name(head, self._base.domain, self._ports.at_domain)
        else:
            route = by_path(head)
        if route is None:
            raise ClocheError("sandbox.not_found", "there is no preview at this address")
        if route.way in {Way.API, Way.TUNNEL} and not is_port(route.port):
            raise ClocheError("request.invalid", "the port must be from 1 to 65535", details={"field": "port"})
        return route

    def _scheme(self, exchange: Exchange) -> str:
        """As the client sees it: a proxy of the operator may stand before this one."""
        if exchange.secure:
            return "https"
        return self._base.scheme if self._base is not None else "http"

    async def _answer(self, exchange: Exchange, error: ClocheError, request_id: str, status: int | None = None) -> None:
        if exchange.begun:
            exchange.cut()
            return
        page = exchange.upgrade is None and wants_page(exchange.head.headers)
        number, reason, headers, body = pages.of_error(error, page=page, request_id=request_id, status=status)
        with contextlib.suppress(ConnectionError):
            await _send(exchange, number, reason, headers, body)


async def _send(
    exchange: Exchange, status: int, reason: bytes, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    await exchange.begin(status, reason, headers, Framing(length=len(body)))
    await exchange.send(body)
    await exchange.finish()


def _told(error: HttpError) -> tuple[ClocheError, int]:
    code = "request.headers_too_large" if error.status == 431 else "request.invalid"
    return ClocheError(code, error.sentence), error.status


def _new_id() -> str:
    return random_bytes(8).hex()
