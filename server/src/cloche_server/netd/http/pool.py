"""Connections to servers that wait for the next request: of the same sandbox, to the same name and port, and to an
address that its policy allows then. Whoever takes one asks the policy first."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from cloche_server.netd.flow import Carrier
from cloche_server.netd.http.link import Link

#: So long a connection waits (seconds): less than most servers wait for a request.
WAITS: Final = 15.0
#: So many of one sandbox, and of all.
MOST_OF_ONE: Final = 16
MOST: Final = 512


@dataclass(frozen=True, slots=True)
class Place:
    """Where a connection goes. `host`: the name that its certificate was verified for."""

    host: str
    port: int
    tls: bool


@dataclass(eq=False, slots=True)
class _Waiting:
    carrier: Carrier
    place: Place
    address: str
    link: Link
    timer: asyncio.TimerHandle


class Pool:
    """A connection is nobody's but the sandbox's that made it: a `Carrier` is one attached sandbox."""

    def __init__(self) -> None:
        #: By the identity of the carrier, which each entry keeps alive; oldest first.
        self._of: dict[int, list[_Waiting]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def keep(self, carrier: Carrier, place: Place, address: str, link: Link) -> None:
        """Takes over a connection on which a request and its answer have come to their end."""
        loop = asyncio.get_running_loop()
        mine = self._of.get(id(carrier), [])
        if self._count >= MOST or link.ended:
            link.abort()
            return
        if len(mine) >= MOST_OF_ONE:
            self._drop(mine[0])
        one: _Waiting = _Waiting(carrier, place, address, link, loop.call_later(WAITS, lambda: self._drop(one)))
        self._of.setdefault(id(carrier), []).append(one)
        self._count += 1
        # A server that says something without being asked, or has closed it: of no use any more.
        link.rest(lambda: self._drop(one))

    def take(self, carrier: Carrier, place: Place, addresses: Collection[str]) -> tuple[Link, str] | None:
        """The one that was used last, to one of these addresses, and the address."""
        for one in reversed(self._of.get(id(carrier), [])):
            if one.place == place and one.address in addresses:
                self._remove(one)
                one.link.rest(None)
                return one.link, one.address
        return None

    def forget(self, carrier: Carrier) -> None:
        """Closes all of a sandbox."""
        for one in list(self._of.get(id(carrier), [])):
            self._drop(one)

    def close(self) -> None:
        for mine in list(self._of.values()):
            for one in list(mine):
                self._drop(one)

    def _remove(self, one: _Waiting) -> bool:
        mine = self._of.get(id(one.carrier), [])
        if one not in mine:
            return False
        mine.remove(one)
        if not mine:
            del self._of[id(one.carrier)]
        self._count -= 1
        one.timer.cancel()
        return True

    def _drop(self, one: _Waiting) -> None:
        if self._remove(one):
            one.link.rest(None)
            one.link.abort()
