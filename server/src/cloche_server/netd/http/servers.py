"""The connection to the server that the requests of one connection of a guest use: taken from those that wait, made
when there is none, and left to the next one when all has come to its end."""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

import h11

from cloche_server.netd.flow import Carrier, Refused, Target
from cloche_server.netd.http.link import Link, to_server
from cloche_server.netd.http.pool import Place, Pool
from cloche_server.netd.http.refusal import Refusal, untrusted, upstream_failed, upstream_tls

DIAL_SECONDS: Final = 60.0


class Servers:
    """One connection at a time, for one connection of a guest."""

    def __init__(self, carrier: Carrier, target: Target, trust: ssl.SSLContext, pool: Pool) -> None:
        self._carrier = carrier
        self._target = target
        self._trust = trust
        self._pool = pool
        self._link: Link | None = None
        self._host = ""
        self._address = ""
        self._counted = (0, 0)
        self._own = False

    def has(self, host: str) -> bool:
        """There is a connection to it from a request before."""
        return self._link is not None and self._host == host and not self._link.ended

    def mark_own(self) -> None:
        """What the connection was used for binds it to this client (NTLM and its like): it is left to nobody else."""
        self._own = True

    async def get(self, host: str, *, waiting: bool) -> tuple[Link, bool]:
        """A connection to this host, the one from before if it can be used. `waiting`: it may be one that has waited
        for a request; whether it is (a server may just be closing it). Raises `Refusal`."""
        if self._link is not None and not self.has(host):
            self.drop()
        waited = False
        if self._link is None:
            found = None
            addresses = await self._addresses(host)
            if waiting:
                found = self._pool.take(self._carrier, self._place(host), addresses)
                waited = found is not None
            self._link, self._address = found or await self._connect(host, addresses)
            self._host = host
            self._counted = (self._link.sent, self._link.received)
        return self._link, waited

    def _place(self, host: str) -> Place:
        return Place(host, self._target.port, self._target.tls)

    async def _addresses(self, host: str) -> list[str]:
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                return list(await self._carrier.addresses(self._target, host))
        except Refused as refused:
            rule = refused.verdict.rule
            raise Refusal(403, "network.denied", refused.verdict.reason, rule=rule, host=host) from None
        except (OSError, TimeoutError):
            raise upstream_failed(host, "no connection to the server could be made") from None

    async def _connect(self, host: str, addresses: list[str]) -> tuple[Link, str]:
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                dialed = await self._carrier.dial(self._target, addresses)
        except (OSError, TimeoutError):
            raise upstream_failed(host, "no connection to the server could be made") from None
        try:
            return await to_server(dialed.sock, self._trust if self._target.tls else None, host), dialed.address
        except ssl.SSLCertVerificationError:
            dialed.sock.close()
            raise untrusted(host) from None
        except ssl.SSLError as error:
            dialed.sock.close()
            raise upstream_tls(host, error.reason or "") from None
        except (OSError, TimeoutError):
            dialed.sock.close()
            raise upstream_failed(host, "the server does not speak TLS with us") from None
        except BaseException:
            dialed.sock.close()
            raise

    def again(self) -> None:
        """After a request: the connection is made ready for the next one, or cut when it has served."""
        link = self._link
        if link is None:
            return
        if link.http.our_state is h11.DONE and link.http.their_state is h11.DONE and not link.ended:
            link.http.start_next_cycle()
        else:
            self.drop()

    def keep(self) -> None:
        """The guest is done: the connection waits for the next one of this sandbox, if nothing is under way on it."""
        link = self._link
        if link is None or self._own or link.http.our_state is not h11.IDLE or link.http.trailing_data[0]:
            return
        self.count()
        self._link = None
        self._pool.keep(self._carrier, self._place(self._host), self._address, link)

    def drop(self) -> None:
        """Cuts the connection: what was written and not sent yet is not sent any more."""
        self.count()
        link, self._link = self._link, None
        self._own = False
        if link is not None:
            link.abort()

    def count(self) -> None:
        """Tells what was carried since the last time."""
        if self._link is not None:
            sent, received = self._link.sent - self._counted[0], self._link.received - self._counted[1]
            self._counted = (self._link.sent, self._link.received)
            if sent or received:
                self._carrier.count(self._target, sent, received)
