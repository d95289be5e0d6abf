"""One connection of a guest, from its first byte to its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

import h11

from cloche_server.host.certificates import KeyPair
from cloche_server.netd.flow import Carrier, Refused, Target, Verdict
from cloche_server.netd.http.exchange import Exchange
from cloche_server.netd.http.link import Link, to_guest, to_server
from cloche_server.netd.http.refusal import Refusal, untrusted, upstream_failed
from cloche_server.netd.http.request import bad, read_request
from cloche_server.netd.http.trust import Leaves, client_context

#: A head has to come whole within so many seconds of its first byte; so long a connection may be idle before it.
HEAD_SECONDS: Final = 30.0
IDLE_SECONDS: Final = 300.0
DIAL_SECONDS: Final = 60.0
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
        session = Session(link, target, carrier, self._trust, self._kept)
        try:
            await session.run()
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

    def close(self) -> None:
        self._leaves.close()


def _note(carrier: Carrier, target: Target, refusal: Refusal, method: str = "", path: str = "") -> None:
    if refusal.rule:
        kind = "secret" if refusal.secret else "http"
        host = refusal.host or target.name or ""
        reason = f"{refusal} ({refusal.secret})" if refusal.secret else str(refusal)
        carrier.note(target, kind, Verdict(False, refusal.rule, reason), host=host, method=method, path=path)


def _note_distrust(carrier: Carrier, target: Target) -> None:
    """The most frequent reason for which TLS towards a guest fails, and one that is hard to find from inside."""
    sentence = "the program in the guest broke off TLS; it may not trust the authority of the workspace"
    carrier.note(target, "http", Verdict(False, "not-trusted", sentence), host=target.name or "")


class Session:
    """The requests of one connection, one after another, and the connection to the server that they use."""

    def __init__(
        self, guest: Link, target: Target, carrier: Carrier, trust: ssl.SSLContext, kept: Counter[str]
    ) -> None:
        self.guest = guest
        self.target = target
        self.carrier = carrier
        self._trust = trust
        self._kept = kept
        self._server: Link | None = None
        self._host = ""
        self._counted = [0, 0]

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
        await self.drop_server()
        if self.guest.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.guest.abort()
            return
        await self.guest.send(*refusal.events(method))
        await self.guest.linger()

    async def _again(self, exchange: Exchange) -> bool:
        """Makes both connections ready for the next request; False when the guest's has served."""
        self.count()
        if exchange.switched:
            return False
        server = self._server
        if server is not None:
            if server.http.our_state is h11.DONE and server.http.their_state is h11.DONE and not server.ended:
                server.http.start_next_cycle()
            else:
                await self.drop_server()
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

    # -------------------------------------------------------------- the server

    def has_server(self, host: str) -> bool:
        """There is a connection to it from a request before."""
        return self._server is not None and self._host == host and not self._server.ended

    async def server(self, host: str) -> Link:
        """A connection to this host, the one from before if it can be used. Raises `Refusal`."""
        if self._server is not None and (self._host != host or self._server.ended):
            await self.drop_server()
        if self._server is None:
            self._server, self._host = await self._connect(host), host
        return self._server

    async def _connect(self, host: str) -> Link:
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                dialed = await self.carrier.dial(self.target, host)
        except Refused as refused:
            rule = refused.verdict.rule
            raise Refusal(403, "network.denied", refused.verdict.reason, rule=rule, host=host) from None
        except (OSError, TimeoutError):
            raise upstream_failed(host, "no connection to the server could be made") from None
        try:
            return await to_server(dialed, self._trust if self.target.tls else None, host)
        except ssl.SSLCertVerificationError:
            dialed.close()
            raise untrusted(host) from None
        except (OSError, TimeoutError):
            dialed.close()
            raise upstream_failed(host, "the server does not speak TLS with us") from None
        except BaseException:
            dialed.close()
            raise

    async def drop_server(self) -> None:
        """Cuts the connection to the server: what was written and not sent yet is not sent any more."""
        self.count()
        server, self._server = self._server, None
        if server is not None:
            server.abort()
            self._counted = [0, 0]

    def count(self) -> None:
        """Tells what was carried since the last time."""
        if self._server is not None:
            sent, received = self._server.sent - self._counted[0], self._server.received - self._counted[1]
            self._counted = [self._server.sent, self._server.received]
            if sent or received:
                self.carrier.count(self.target, sent, received)

    async def aclose(self) -> None:
        await self.drop_server()
        with contextlib.suppress(OSError):
            await self.guest.aclose()
