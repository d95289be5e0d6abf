"""The slots of a data directory: a namespace with a tap device for each machine, and some ready for the next.

A slot lies at `<data>/net/<machine id>`, so whatever becomes of the server, what belongs to whom can be seen.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from cloche_server.core.errors import ClocheError
from cloche_server.core.netctl import MAX_FDS
from cloche_server.core.network import DNS_PORT, TAP, TCP_PORT, UDP_MARK, UDP_PORT, UDP_TABLE
from cloche_server.host import datagrams, netns
from cloche_server.network.rules import LINKS, RENEWED_RULES, RULES, SYSCTLS, UDP_LINKS
from cloche_server.telemetry import log

_log = log.get("slots")

_READY: Final = "ready-"
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
#: After a slot was taken the next one is made this much later (seconds): whoever took it is still at work.
SETTLE: Final = 0.5
#: After a failure (seconds).
BACKOFF: Final = 5.0


@dataclass(frozen=True, slots=True)
class SlotSockets:
    """What a slot's traffic arrives at, of IPv4 and IPv6: TCP, datagrams to the resolver, other datagrams; and what the
    answers to those and their refusals leave by."""

    tcp4: socket.socket
    tcp6: socket.socket
    dns4: socket.socket
    dns6: socket.socket
    udp4: socket.socket
    udp6: socket.socket
    udp_out4: socket.socket
    udp_out6: socket.socket
    icmp_out4: socket.socket
    icmp_out6: socket.socket

    def all(self) -> tuple[socket.socket, ...]:
        """In the order of the control link."""
        first = (self.tcp4, self.tcp6, self.dns4, self.dns6)
        return *first, self.udp4, self.udp6, self.udp_out4, self.udp_out6, self.icmp_out4, self.icmp_out6

    def close(self) -> None:
        for one in self.all():
            one.close()


class Handed(Protocol):
    """Sockets that netd is given copies of."""

    def all(self) -> Sequence[socket.socket]: ...


@dataclass(frozen=True, slots=True)
class Doors:
    """Sockets in a slot that are connected to nothing yet, and can reach nothing but its guest."""

    sockets: tuple[socket.socket, ...]

    def all(self) -> tuple[socket.socket, ...]:
        return self.sockets

    def close(self) -> None:
        for one in self.sockets:
            one.close()


class Slots:
    """Makes, hands out and removes slots. `prepared`: so many are kept ready."""

    def __init__(self, root: Path, prepared: int) -> None:
        self.root = root
        self._prepared = prepared
        self._ready: deque[Path] = deque()
        self._numbers = itertools.count(1)
        self._wanted = asyncio.Event()

    def path(self, machine_id: str) -> Path:
        return self.root / machine_id

    async def open(self, machine_id: str) -> int:
        """A slot for a machine, in place of one that it may have; returns a descriptor of its tap device, which is the
        caller's. Raises OSError, `host.unsupported`; then, and when it is cancelled, nothing goes on, and `close`
        removes what there is."""
        ready = self._ready.popleft() if self._ready else None
        self._wanted.set()
        opening = asyncio.get_running_loop().run_in_executor(None, self._open, self.path(machine_id), ready)
        cancelled = await _done(opening)
        if cancelled is not None:
            if opening.exception() is None:
                os.close(opening.result())
            raise cancelled
        return opening.result()

    def _open(self, path: Path, ready: Path | None) -> int:
        netns.remove(path)
        if ready is None:
            _make(path)
        else:
            netns.rename(ready, path)
        return netns.inside(path, lambda: netns.open_tap(TAP))

    async def sockets(self, machine_id: str) -> SlotSockets:
        """New sockets of a slot. Raises OSError: for one that is not there, and when its sockets are open already."""
        return await asyncio.to_thread(netns.inside, self.path(machine_id), make_sockets)

    async def doors(self, machine_id: str, count: int) -> Doors:
        """Sockets by which the guest of a slot is reached. Raises OSError."""
        return await asyncio.to_thread(netns.inside, self.path(machine_id), lambda: _doors(count))

    async def close(self, machine_id: str) -> None:
        """Fine when there is none. Raises OSError."""
        await asyncio.to_thread(netns.remove, self.path(machine_id))

    def has(self, machine_id: str) -> bool:
        return netns.is_held(self.path(machine_id))

    def held(self) -> set[str]:
        """The machines that have one. Blocks."""
        return {path.name for path in self.root.iterdir() if not path.name.startswith(_READY)}

    async def take_stock(self, living: Collection[str]) -> int:
        """At a start: removes every slot but those of `living`; returns how many."""
        return await asyncio.to_thread(self._take_stock, living)

    def _take_stock(self, living: Collection[str]) -> int:
        gone = [path for path in self.root.iterdir() if path.name not in living]
        for path in gone:
            netns.remove(path)
        return len(gone)

    async def run(self) -> None:
        """Keeps slots ready for as long as the server runs; cancel to stop."""
        while True:
            self._wanted.clear()
            while len(self._ready) < self._prepared:
                path = self.root / f"{_READY}{next(self._numbers)}"
                making = asyncio.get_running_loop().run_in_executor(None, _make, path)
                cancelled = await _done(making)
                error = making.exception()
                if error is None:
                    self._ready.append(path)  # also of one that is cancelled: `drain` finds it
                if cancelled is not None:
                    raise cancelled
                if isinstance(error, OSError | ClocheError):
                    _log.error("slot.not_made", error=str(error))
                    await asyncio.sleep(BACKOFF)
                elif error is not None:
                    raise error
            await self._wanted.wait()
            await asyncio.sleep(SETTLE)

    async def drain(self) -> None:
        """Removes those that are ready."""
        while self._ready:
            await asyncio.to_thread(netns.remove, self._ready.popleft())


async def _done(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Waits for a thread, which cannot be stopped; whether somebody has cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


def _make(path: Path) -> None:
    def furnish() -> None:
        os.close(netns.open_tap(TAP, make=True))
        furnish_slot()

    netns.create(path, furnish)


def furnish_slot() -> None:
    """Everything but the tap itself, in this thread's namespace. Raises OSError, `host.unsupported`, `internal`."""
    netns.configure(LINKS + UDP_LINKS, RULES, SYSCTLS)
    datagrams.route_marked(UDP_MARK, UDP_TABLE)


def _doors(count: int) -> Doors:
    made: list[socket.socket] = []
    try:
        for _ in range(max(1, min(count, MAX_FDS))):
            made.append(netns.unbound())
    except BaseException:
        for one in made:
            one.close()
        raise
    return Doors(tuple(made))


def make_sockets() -> SlotSockets:
    """The sockets of this thread's namespace. One that an earlier server has made is brought up to date. Raises
    OSError, `host.unsupported`, `internal`."""
    if not datagrams.has_table(UDP_TABLE):
        datagrams.route_marked(UDP_MARK, UDP_TABLE)
        netns.configure("", RENEWED_RULES)
        netns.configure(UDP_LINKS, "")  # last: by the table it is known that everything is done
    made: list[socket.socket] = []
    try:
        for kind, port in ((socket.SOCK_STREAM, TCP_PORT), (socket.SOCK_DGRAM, DNS_PORT)):
            for family in _FAMILIES:
                made.append(netns.bound(kind, family, port))
        for family in _FAMILIES:
            made.append(datagrams.catcher(family, UDP_PORT))
        for family in _FAMILIES:
            made.append(datagrams.sender(family, socket.IPPROTO_UDP, TAP))
        made.append(datagrams.sender(socket.AF_INET, socket.IPPROTO_ICMP, TAP))
        made.append(datagrams.sender(socket.AF_INET6, socket.IPPROTO_ICMPV6, TAP))
    except BaseException:
        for one in made:
            one.close()
        raise
    return SlotSockets(*made)
