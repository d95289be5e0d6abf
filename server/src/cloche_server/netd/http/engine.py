"""One connection of a guest, from its first byte to its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol

import h11

from cloche_server.host.certificates import KeyPair
from cloche_server.netd.flow import Carrier, Target, Verdict
from cloche_server.netd.http.exchange import Exchange
from cloche_server.netd.http.link import Link, to_guest
from cloche_server.netd.http.pool import Pool
from cloche_server.netd.http.refusal import HTTP2, PREFACE, VIOLATION, Refusal, goaway, http2
from cloche_server.netd.http.request import bad, read_request
from cloche_server.netd.http.servers import Servers
from cloche_server.netd.http.trust import Leaves, client_context

#: A head has to come whole within so many seconds of its first byte; so long a connection may be idle before it.
HEAD_SECONDS: Final = 30.0
IDLE_SECONDS: Final = 300.0
#: Bytes of request bodies that are kept whole at once, for each sandbox.
MAX_KEPT: Final = 32 * 1024 * 1024


class Authority(Protocol):
    """The certificate authority of a workspace, PEM."""

    @property
    def certificate(self) -> str: ...
    @property
    def key(self) -> str: ...


class Engine:
    """The HTTP of all guests (`flow.HttpEngine`). `authority` gives that of a workspace, None as long as it is not
    known. `extra_ca`: a PEM file of authorities that are trusted besides those of the host.
    `now`: Unix seconds. Raises OSError when the file cannot be read."""

    def __init__(
        self, authority: Callable[[str], Authority | None], *, now: Callable[[], float], extra_ca: Path | None = None
    ) -> None:
        self._authority = authority
        self._leaves = Leaves(now)
        #: Bytes of request bodies that are kept whole, by sandbox.
        self._kept: Counter[str] = Counter()
        self._trust = client_context(extra_ca)
        self._pool = Pool()

    async def serve(self, guest: socket.socket, target: Target, carrier: Carrier) -> None:
        """As in `flow.HttpEngine`. What guest and server do wrong ends the connection, and raises nothing."""
        try:
            context = await self._towards_guest(target, carrier)
            link = await to_guest(guest, context)
        except Refusal as refusal:
            _note(carrier, target, refusal)
            guest.close()
            return
        except OSError:
            if target.tls:
                _note_distrust(carrier, target)
            guest.close()
            return
        except BaseException:
            guest.close()
            raise
        session = Session(link, target, carrier, Servers(carrier, target, self._trust, self._pool), self._kept)
        try:
            await session.run()
            session.servers.keep()
            if target.tls and not session.asked and link.ended:
                _note_distrust(carrier, target)
        except (OSError, h11.ProtocolError, TimeoutError) as error:
            link.abort()
            if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
                _note_distrust(carrier, target)
        except BaseException:
            link.abort()
            raise
        finally:
            await session.aclose()

    async def _towards_guest(self, target: Target, carrier: Carrier) -> ssl.SSLContext | None:
        if not target.tls:
            return None
        if target.name is None:
            raise Refusal(403, "network.denied", "the connection names no host, so it cannot be read", rule="no-name")
        authority = self._authority(carrier.workspace)
        if authority is None:
            raise Refusal(403, "network.denied", "the authority of the workspace is not there", rule="no-authority")
        try:
            pair = KeyPair(authority.certificate.encode("ascii"), authority.key.encode("ascii"))
            return await self._leaves.context(pair, target.name)
        except ValueError:
            sentence = "no certificate can be made for the name of the connection"
            raise Refusal(403, "network.denied", sentence, rule="no-name") from None

    def prepare(self, workspace: str, names: Iterable[str]) -> None:
        authority = self._authority(workspace)
        if authority is not None:
            pair = KeyPair(authority.certificate.encode("ascii"), authority.key.encode("ascii"))
            for name in names:
                self._leaves.prepare(pair, name)

    def forget(self, carrier: Carrier) -> None:
        self._pool.forget(carrier)

    @property
    def waiting(self) -> int:
        """Connections to servers that wait for a next request."""
        return len(self._pool)

    def close(self) -> None:
        self._pool.close()
        self._leaves.close()


def _note(carrier: Carrier, target: Target, refusal: Refusal, method: str = "", path: str = "") -> None:
    if refusal.rule:
        kind = "secret" if refusal.secret else "http"
        host = refusal.host or target.name or ""
        reason = f"{refusal} ({refusal.secret})" if refusal.secret else str(refusal)
        if refusal.code == VIOLATION:
            carrier.violated(refusal.secret, host, method)
        carrier.note(target, kind, Verdict(False, refusal.rule, reason), host=host, method=method, path=path)


def _note_distrust(carrier: Carrier, target: Target) -> None:
    """The most frequent reason for which TLS towards a guest fails, and one that is hard to find from inside."""
    sentence = (
        "the program in the guest ended TLS before it asked for anything; it may not trust the authority of the "
        "workspace, or know the certificate of the server and want no other"
    )
    carrier.note(target, "http", Verdict(False, "not-trusted", sentence), host=target.name or "")


class Session:
    """The requests of one connection, one after another, and the connection to the server that they use (`servers`)."""

    def __init__(self, guest: Link, target: Target, carrier: Carrier, servers: Servers, kept: Counter[str]) -> None:
        self.guest = guest
        self.target = target
        self.carrier = carrier
        self.servers = servers
        #: It has begun to ask for something.
        self.asked = False
        self._kept = kept

    async def run(self) -> None:
        """Raises OSError, `h11.ProtocolError`, TimeoutError: the connection is broken then."""
        while True:
            method: bytes | None = None
            path = ""
            try:
                request = await self._head()
                if request is None:
                    return
                method = request.method
                asked = read_request(request, self.target)
                path = asked.path
                exchange = Exchange(self, request, asked)
                await exchange.run()
            except Refusal as refusal:
                _note(self.carrier, self.target, refusal, (method or b"").decode("ascii"), path)
                await self._refuse(refusal, method)
                return
            if not await self._again(exchange):
                return

    async def _head(self) -> h11.Request | None:
        """None: the guest has closed the connection, or it was idle for too long. Raises `Refusal`."""
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                if self.guest.http.trailing_data[0] == b"":
                    self.guest.http.receive_data(await self.guest.read())
        except TimeoutError:
            return None
        begun = self.guest.http.trailing_data[0]
        if not self.asked and begun.startswith(PREFACE):
            raise http2()
        self.asked = self.asked or bool(begun)
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                event = await self.guest.next_event(HEAD_SECONDS)
        except TimeoutError:
            raise Refusal(408, "network.bad_request", "the head of the request did not come in time") from None
        except h11.RemoteProtocolError as error:
            if self.guest.ended:
                return None
            if error.error_status_hint == 431:
                raise Refusal(431, "network.bad_request", "the head of the request is too large") from None
            raise bad("this is not a request of HTTP/1.1") from None
        return event if isinstance(event, h11.Request) else None

    async def _refuse(self, refusal: Refusal, method: bytes | None) -> None:
        """Answers, where an answer can still be given."""
        self.servers.drop()
        if refusal.rule == HTTP2:
            self.asked = True
            await self.guest.write(goaway(refusal))
            await self.guest.linger()
            return
        if self.guest.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.guest.abort()
            return
        await self.guest.send(*refusal.events(method))
        await self.guest.linger()

    async def _again(self, exchange: Exchange) -> bool:
        """Makes both connections ready for the next request; False when the guest's has served."""
        self.servers.count()
        if exchange.switched:
            return False
        self.servers.again()
        if self.guest.http.our_state is h11.DONE and self.guest.http.their_state is h11.DONE:
            self.guest.http.start_next_cycle()
            return True
        if self.guest.http.their_state is not h11.MUST_CLOSE:
            await self.guest.linger()
        return False

    @contextlib.contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Memory for a body that has to be kept whole, so that no guest can take all of it. Raises `Refusal`."""
        sandbox = self.carrier.sandbox
        if self._kept[sandbox] + size > MAX_KEPT:
            sentence = "too many large requests that a secret may be put into run at once; try again"
            raise Refusal(503, "network.busy", sentence)
        self._kept[sandbox] += size
        try:
            yield
        finally:
            self._kept[sandbox] -= size
            if not self._kept[sandbox]:
                del self._kept[sandbox]

    async def aclose(self) -> None:
        self.servers.drop()
        with contextlib.suppress(OSError):
            await self.guest.aclose()
