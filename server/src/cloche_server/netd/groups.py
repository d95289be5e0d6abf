"""Network groups in netd: who is in one with whom, and sockets of their slots to reach them by.

netd has no way into a slot. The server makes sockets there that are connected to nothing and hands them over; all that
they can reach is the guest of that slot. Some are kept for a member that is called often, so that most connections wait
for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Final

from cloche_server.core.addresses import Address
from cloche_server.core.groups import Group, Member, parse_member_address
from cloche_server.core.network import GUEST_IP4
from cloche_server.core.policy import Decision, Outcome

#: A connection waits so long for a socket that the server has to make (it may be starting just now), and then for the
#: guest to answer (seconds).
PATIENCE: Final = 5.0
#: Kept for a member that was called.
KEPT: Final = 8
#: Handed over at once.
MOST_AT_ONCE: Final = 16
_RUNS: Final = "running"
#: Its machine is there and would never answer.
_PAUSED: Final = "paused"


@dataclass(slots=True)
class _Pool:
    """Of one slot. `inbound`: ends the connections that others have to its guest."""

    idle: deque[socket.socket] = field(default_factory=deque)
    waiting: deque[asyncio.Future[socket.socket]] = field(default_factory=deque)
    inbound: dict[int, Callable[[], None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """A group as one of its members sees it."""

    group: Group
    own: IPv4Address
    by_address: Mapping[Address, Member]
    by_name: Mapping[str, Member]


class Groups:
    """The groups of all workspaces. A sandbox is in one at most."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], Group] = {}
        self._places: dict[str, _Place] = {}

    def replace(self, groups: Iterable[Group], *, whole: bool) -> None:
        """Takes the place of what was known of these groups; with `whole` of all. One without members is gone."""
        if whole:
            self._groups.clear()
            self._places.clear()
        for group in groups:
            key = (group.workspace, group.name)
            before = self._groups.pop(key, None)
            for member in before.members if before is not None else ():
                self._places.pop(member.sandbox, None)
            if group.members:
                self._groups[key] = group
                self._settle(group)

    def _settle(self, group: Group) -> None:
        by_name = group.named()
        by_address: dict[Address, Member] = {parse_member_address(one.address): one for one in group.members}
        for member in group.members:
            self._places[member.sandbox] = _Place(group, parse_member_address(member.address), by_address, by_name)

    def own_address(self, sandbox: str) -> IPv4Address | None:
        place = self._places.get(sandbox)
        return None if place is None else place.own

    def at(self, sandbox: str, address: Address) -> Member | None:
        """Who has an address, as a sandbox sees it."""
        place = self._places.get(sandbox)
        return None if place is None else place.by_address.get(address)

    def named(self, sandbox: str, name: str) -> Member | None:
        """Who has a canonical name, as a sandbox sees it."""
        place = self._places.get(sandbox)
        return None if place is None else place.by_name.get(name)

    def owns(self, sandbox: str, name: str) -> bool:
        """Whether a canonical name lies in the zone of the sandbox's group, so that nobody else is asked for it."""
        place = self._places.get(sandbox)
        return place is not None and (name == place.group.zone or name.endswith(f".{place.group.zone}"))


class Unreachable(OSError):
    """A member of the group that cannot be called now; the text is a sentence."""


class Doors:
    """The ways into the slots that are attached."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._wanted: set[str] = set()
        self._changed = asyncio.Event()
        self._numbers = itertools.count(1)

    def open(self, sandbox: str) -> None:
        """Its slot is attached."""
        self.close(sandbox)
        self._pools[sandbox] = _Pool()

    def close(self, sandbox: str) -> None:
        """It is not any more: connections into it end, and nothing holds its slot."""
        pool = self._pools.pop(sandbox, None)
        self._wanted.discard(sandbox)
        if pool is None:
            return
        _fail(pool)
        for sock in pool.idle:
            sock.close()
        for end in list(pool.inbound.values()):
            end()

    def close_all(self) -> None:
        for sandbox in list(self._pools):
            self.close(sandbox)

    def check(self, member: Member) -> None:
        """Raises Unreachable."""
        if member.status == _PAUSED:
            raise Unreachable(errno.ECONNREFUSED, "the member is paused")
        if member.sandbox not in self._pools:
            why = "has no network now" if member.status == _RUNS else f"is {member.status}"
            raise Unreachable(errno.ECONNREFUSED, f"the member {why}")

    async def dial(self, member: Member, port: int, caller: IPv4Address | None) -> socket.socket:
        """A connection to a port of a member's guest, which sees it come from `caller`. Raises OSError."""
        self.check(member)
        sock = await self._take(member.sandbox)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if caller is not None:
                with contextlib.suppress(OSError):  # a slot of an earlier release: it comes from the gateway
                    sock.bind((str(caller), 0))
            async with asyncio.timeout(PATIENCE):
                await asyncio.get_running_loop().sock_connect(sock, (GUEST_IP4, port))
        except BaseException:
            sock.close()
            raise
        return sock

    @contextlib.contextmanager
    def inside(self, sandbox: str, end: Callable[[], None]) -> Iterator[None]:
        """Registers a connection into a slot while it lasts; `end` is called when the slot goes. Raises Unreachable."""
        pool = self._pools.get(sandbox)
        if pool is None:
            raise Unreachable(errno.ECONNREFUSED, "the member has no network now")
        number = next(self._numbers)
        pool.inbound[number] = end
        try:
            yield
        finally:
            pool.inbound.pop(number, None)

    async def _take(self, sandbox: str) -> socket.socket:
        pool = self._pools[sandbox]
        if pool.idle:
            sock = pool.idle.popleft()
            if len(pool.idle) < KEPT // 2:
                self._want(sandbox)
            return sock
        waiter: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        pool.waiting.append(waiter)
        self._want(sandbox)
        try:
            async with asyncio.timeout(PATIENCE):
                return await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                if self._pools.get(sandbox) is pool:
                    pool.idle.append(waiter.result())
                else:
                    waiter.result().close()
            raise
        finally:
            if waiter in pool.waiting:
                pool.waiting.remove(waiter)

    def _want(self, sandbox: str) -> None:
        self._wanted.add(sandbox)
        self._changed.set()

    async def wanted(self, wait: float) -> dict[str, int]:
        """How many sockets which slots need, as soon as one does, or after `wait` seconds. Asked again without an
        answer to it, it says the same."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                while not self._wanted:
                    self._changed.clear()
                    await self._changed.wait()
        return {sandbox: self._lack(self._pools[sandbox]) for sandbox in list(self._wanted)[:64]}

    @staticmethod
    def _lack(pool: _Pool) -> int:
        return max(1, min(MOST_AT_ONCE, len(pool.waiting) + KEPT - len(pool.idle)))

    def supply(self, sandbox: str, socks: Iterable[socket.socket]) -> None:
        """Sockets that the server has made in a slot; none: it could not. They belong to us."""
        pool = self._pools.get(sandbox)
        self._wanted.discard(sandbox)
        made = list(socks)
        if pool is None:
            for sock in made:
                sock.close()
            return
        if not made:
            _fail(pool)
        for sock in made:
            while pool.waiting and pool.waiting[0].done():
                pool.waiting.popleft()
            if pool.waiting:
                pool.waiting.popleft().set_result(sock)
            else:
                pool.idle.append(sock)
        if pool.waiting:
            self._want(sandbox)


def group_decision(doors: Doors, peer: Member) -> Decision:
    """Whether a member of a sandbox's group can be called now."""
    try:
        doors.check(peer)
    except Unreachable as error:
        return Decision(Outcome.DENY, "group", str(error.strerror))
    return Decision(Outcome.ALLOW, "group", "a member of the network group of the sandbox")


def _fail(pool: _Pool) -> None:
    while pool.waiting:
        waiter = pool.waiting.popleft()
        if not waiter.done():
            waiter.set_exception(Unreachable(errno.ECONNREFUSED, "the member has no network now"))
