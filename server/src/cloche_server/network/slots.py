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
from typing import Final, Protocol

from cloche_server.core.errors import ClocheError
from cloche_server.core.netctl import MAX_FDS
from cloche_server.core.network import DNS_PORT, TAP, TCP_PORT
from cloche_server.host import netns
from cloche_server.network.rules import LINKS, RULES, SYSCTLS
from cloche_server.telemetry import log

_log = log.get("slots")

_READY: Final = "ready-"
#: After a slot was taken the next one is made this much later (seconds): whoever took it is still at work.
SETTLE: Final = 0.5
#: After a failure (seconds).
BACKOFF: Final = 5.0


@dataclass(frozen=True, slots=True)
class SlotSockets:
    """What a slot's traffic arrives at: TCP of either family, and datagrams to the resolver."""

    tcp4: socket.socket
    tcp6: socket.socket
    dns4: socket.socket
    dns6: socket.socket

    def all(self) -> tuple[socket.socket, ...]:
        return self.tcp4, self.tcp6, self.dns4, self.dns6

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
        cancelled: asyncio.CancelledError | None = None
        while not opening.done():
            try:
                await asyncio.wait({opening})
            except asyncio.CancelledError as error:  # the thread cannot be stopped
                cancelled = error
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
        return await asyncio.to_thread(netns.inside, self.path(machine_id), _sockets)

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
                try:
                    await asyncio.to_thread(_make, path)
                except (OSError, ClocheError) as error:
                    _log.error("slot.not_made", error=str(error))
                    await asyncio.sleep(BACKOFF)
                    continue
                self._ready.append(path)
            await self._wanted.wait()
            await asyncio.sleep(SETTLE)

    async def drain(self) -> None:
        """Removes those that are ready."""
        while self._ready:
            await asyncio.to_thread(netns.remove, self._ready.popleft())


def _make(path: Path) -> None:
    def furnish() -> None:
        os.close(netns.open_tap(TAP, make=True))
        netns.configure(LINKS, RULES, SYSCTLS)

    netns.create(path, furnish)


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


def _sockets() -> SlotSockets:
    made: list[socket.socket] = []
    try:
        for kind, port in ((socket.SOCK_STREAM, TCP_PORT), (socket.SOCK_DGRAM, DNS_PORT)):
            for family in (socket.AF_INET, socket.AF_INET6):
                made.append(netns.bound(kind, family, port))
    except BaseException:
        for one in made:
            one.close()
        raise
    return SlotSockets(*made)
