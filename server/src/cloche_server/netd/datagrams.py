"""Datagrams of one slot: each is judged by where it goes, and carried by a socket of its flow, or refused at once.

A flow is a port of the guest and a destination. Its socket is connected to that destination, so nobody else can answer
in it, and answers go to the guest in the name of the destination. Nothing in a datagram is read.

Between members of a network group no socket is needed: what one sends goes into the slot of the other in its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import OrderedDict
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address
from typing import Final

from cloche_server.core.addresses import Address
from cloche_server.core.datagrams import MAX_PAYLOAD, icmp_unreachable, udp_message
from cloche_server.core.network import GUEST_IP4, GUEST_IP6, Transport
from cloche_server.core.policy import Decision, Outcome
from cloche_server.host import datagrams
from cloche_server.netd.session import Flow, Session

#: Of one sandbox at once; another one takes the place of the one that has been idle longest.
MOST_FLOWS: Final = 512
#: Of all sandboxes together, where the one that has most gives way. Each flow takes one of the host's 28,000 ports for
#: datagrams, and without a free one nobody can ask for a name any more.
MOST_TOGETHER: Final = 16_000
#: So long a flow lives without a datagram, once it was answered (RFC 4787) and before (seconds).
IDLE_ANSWERED: Final = 120.0
IDLE_UNANSWERED: Final = 30.0
_SWEEP: Final = 5.0
#: Of one sandbox in a second: so many that belong to no flow are judged. More would take the time of all others.
MOST_JUDGED: Final = 2000
#: Taken from one socket before others have their turn.
_AT_ONCE: Final = 32
#: Flows whose names are being resolved, and datagrams that wait for it in each.
_MOST_WAITING: Final = 32
_MOST_KEPT: Final = 8
_MOST_NAMES: Final = 8
#: A refusal is told in the log once in so long for each flow (seconds).
_TOLD_AGAIN: Final = 10.0
_MOST_TOLD: Final = 256
_NOBODY: Final = frozenset({errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH})
_GUEST: Final[dict[int, Address]] = {4: ip_address(GUEST_IP4), 6: ip_address(GUEST_IP6)}

#: Port of the guest, destination, its port.
Key = tuple[int, Address, int]


class Voice:
    """What is said to the guest. `socks`: senders of UDP over IPv4 and IPv6, and of ICMP over both."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        self._socks = tuple(socks)
        self._udp = {4: socks[0], 6: socks[1]}
        self._icmp = {4: socks[2], 6: socks[3]}

    def answer(self, key: Key, payload: bytes) -> None:
        """A datagram from the destination of a flow."""
        guest_port, address, port = key
        guest = _GUEST[address.version]
        message = udp_message(address, port, guest, guest_port, payload)
        datagrams.send_as(self._udp[address.version], address, guest, message)

    def refuse(self, key: Key, size: int, *, nobody: bool = False) -> None:
        """A datagram with so many bytes may not go, or (`nobody`) nobody listens where it went."""
        guest_port, address, port = key
        guest = _GUEST[address.version]
        message = icmp_unreachable(guest, guest_port, address, port, size, port=nobody)
        datagrams.send_as(self._icmp[address.version], address if nobody else None, guest, message)

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


class UdpFlow:
    """One that is carried. Raises OSError when there is no way to its destination."""

    def __init__(self, table: Datagrams, key: Key, flow: Flow) -> None:
        self.key = key
        self.flow = flow
        self._table = table
        self._session = table.session
        self._loop = asyncio.get_running_loop()
        self.answered = False
        self.last = self._loop.time()
        self._size = 0
        _, address, port = key
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._sock.connect((str(address), port))
        except BaseException:
            self._sock.close()
            raise
        self._loop.add_reader(self._sock.fileno(), self._receive)

    def send(self, payload: bytes) -> None:
        """What does not go now is lost."""
        self.last = self._loop.time()
        self._size = len(payload)
        if not self._session.up.spend(len(payload), self.last):
            return
        try:
            sent = self._sock.send(payload)
        except OSError as error:
            self._failed(error)
        else:
            self._session.carried(self.flow, sent, 0)

    def _receive(self) -> None:
        for _ in range(_AT_ONCE):
            if self._sock.fileno() < 0:  # cut by what came before
                return
            try:
                payload = self._sock.recv(MAX_PAYLOAD + 1)
            except OSError as error:
                self._failed(error)
                return
            self.answered = True
            self.last = self._loop.time()
            self._table.used(self.key)
            if len(payload) <= MAX_PAYLOAD and self._session.down.spend(len(payload), self.last):
                self._table.voice.answer(self.key, payload)
                self._session.carried(self.flow, 0, len(payload))

    def _failed(self, error: OSError) -> None:
        if error.errno in _NOBODY:
            self._table.voice.refuse(self.key, self._size, nobody=True)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()


class MemberFlow:
    """To a member of the group: what is sent is said in its slot at once, and its answers come by `heard`."""

    def __init__(self, table: Datagrams, key: Key, flow: Flow) -> None:
        self.key = key
        self.flow = flow
        self._table = table
        self.answered = False
        self.last = asyncio.get_running_loop().time()

    def send(self, payload: bytes) -> None:
        """Lost where the member does not listen; refused once it cannot be called any more."""
        table, session = self._table, self._table.session
        self.last = asyncio.get_running_loop().time()
        decision = session.judge_datagram(self.key[1], self.key[2])
        if not decision.allowed:
            self.flow.was_cut = f"upstream: {decision.reason}"
            table.end(self.key)
            table.settle(self.key, [payload], decision)
        elif session.up.spend(len(payload), self.last) and table.to_member(self.key, payload):
            session.carried(self.flow, len(payload), 0)

    def heard(self, payload: bytes) -> bool:
        """An answer of the member; whether it may be told to the guest."""
        self.last = asyncio.get_running_loop().time()
        self.answered = True
        self._table.used(self.key)
        if not self._table.session.down.spend(len(payload), self.last):
            return False
        self._table.session.carried(self.flow, 0, len(payload))
        return True

    def close(self) -> None:
        """Nothing is held."""


class Datagrams:
    """`catchers`: the sockets of the slot at which datagrams arrive, v4 and v6. `tasks` owns what names are asked
    for because of some of them."""

    def __init__(
        self, session: Session, catchers: Sequence[socket.socket], voice: Voice, tasks: asyncio.TaskGroup
    ) -> None:
        self.session = session
        self.voice = voice
        self._catchers = tuple(catchers)
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        #: The one that has been idle longest comes first.
        self._flows: OrderedDict[Key, UdpFlow | MemberFlow] = OrderedDict()
        self._waiting: dict[Key, list[bytes]] = {}
        self._told: OrderedDict[Key, float] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._second = self._loop.time()
        self._judged = 0
        for catcher in self._catchers:
            self._loop.add_reader(catcher.fileno(), self._receive, catcher)
        self._opened: bool | None = None
        session.shared.datagrams[session.sandbox] = self
        session.changed = self._adjust
        self._adjust()

    def _adjust(self) -> None:
        """Where nothing carries datagrams, the slot refuses them without us."""
        self._told.clear()
        policy = self.session.policy
        wanted = policy.opens_udp or policy.source.learn or self.session.own_address is not None
        if wanted is self._opened:
            return
        self._opened = wanted
        for catcher in self._catchers:
            if wanted:
                datagrams.reopen(catcher)
            else:
                with contextlib.suppress(OSError):  # then it is we who refuse
                    datagrams.shut(catcher, GUEST_IP6 if catcher.family is socket.AF_INET6 else GUEST_IP4)

    # ------------------------------------------------------------------ what the guest sends

    def _receive(self, catcher: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                found = datagrams.receive(catcher)
            except OSError:
                return
            if found is not None:
                payload, (sender, guest_port), (address, port) = found
                mapped = isinstance(address, IPv6Address) and address.ipv4_mapped is not None
                if sender == _GUEST[address.version] and guest_port and port and not mapped:
                    self._take((guest_port, address, port), payload)

    def used(self, key: Key) -> None:
        """A flow that is carried was not idle."""
        self._flows.move_to_end(key)

    def _take(self, key: Key, payload: bytes) -> None:
        flow = self._flows.get(key)
        if flow is not None:
            self.used(key)
            flow.send(payload)
            return
        if self._answers(key, payload):
            return
        kept = self._waiting.get(key)
        if kept is not None:
            if len(kept) < _MOST_KEPT:
                kept.append(payload)
            return
        if self._too_many(key):
            return
        decision = self.session.judge_datagram(key[1], key[2])
        if decision.rule == "not-resolved" and len(self._waiting) < _MOST_WAITING:
            self._resolve_first(key, payload)
            return
        self.settle(key, [payload], decision)

    def _too_many(self, key: Key) -> bool:
        """Counts one that is to be judged; what is too much is lost, which the log tells once."""
        now = self._loop.time()
        if now - self._second >= 1.0:
            self._second, self._judged = now, 0
        self._judged += 1
        if self._judged == MOST_JUDGED + 1:
            why = f"more than {MOST_JUDGED} datagrams in a second belong to no flow; those that do are carried"
            self._tell(key, Decision(Outcome.DENY, "limit", why))
        return self._judged > MOST_JUDGED

    def _answers(self, key: Key, payload: bytes) -> bool:
        """Whether it is the answer to what a member has sent; then that is done with it. Limits of both hold."""
        own, theirs = self.session.own_address, self._table_of(key[1])
        if own is None or theirs is None:
            return False
        flow = theirs._flows.get((key[2], own, key[0]))
        if not isinstance(flow, MemberFlow):
            return False
        session = self.session
        if session.used_up:
            self.settle(key, [payload], Decision(Outcome.DENY, "limit", "the limit of bytes is used up"))
        elif session.up.spend(len(payload), self._loop.time()) and flow.heard(payload):
            self.to_member(key, payload)
            session.counted(len(payload), 0)
        return True

    def _table_of(self, address: Address) -> Datagrams | None:
        """Of the member with an address."""
        member = self.session.peer(address)
        return None if member is None else self.session.shared.datagrams.get(member.sandbox)

    def to_member(self, key: Key, payload: bytes) -> bool:
        """Says it to the member as if it came from our guest's address in the group; False: it has no slot, or we have
        no address there."""
        own, theirs = self.session.own_address, self._table_of(key[1])
        if own is None or theirs is None:
            return False
        theirs.voice.answer((key[2], own, key[0]), payload)
        return True

    def _resolve_first(self, key: Key, payload: bytes) -> None:
        """The guest may know the address from before (a fork, a restart of ours): names are found again."""
        self._waiting[key] = [payload]
        task = self._tasks.create_task(self._resolve(key))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _resolve(self, key: Key) -> None:
        _, address, port = key
        try:
            names = self.session.policy.names_for_datagrams(port)[:_MOST_NAMES]
            await asyncio.gather(*(self.session.lookups.addresses(name) for name in names))
        except Exception as error:  # noqa: BLE001 - whatever one datagram does, it ends none of the others
            self.session.shared.report_failure("the names of a datagram", error)
        finally:
            payloads = self._waiting.pop(key, [])
        self.settle(key, payloads, self.session.judge_datagram(address, port))

    def settle(self, key: Key, payloads: Sequence[bytes], decision: Decision) -> None:
        """What comes first in a flow, or after its end: carried in a new one, or refused and told."""
        flow = self._open(key, decision) if decision.allowed else None
        if flow is None:
            for payload in payloads:
                self.voice.refuse(key, len(payload))
            if not decision.allowed:
                self._tell(key, decision)
            return
        for payload in payloads:
            if key in self._flows:  # a limit may have been passed
                flow.send(payload)

    def _open(self, key: Key, decision: Decision) -> UdpFlow | MemberFlow | None:
        """A new flow; None for one that a limit or the way there forbids, which the log tells."""
        self._make_room()
        session = self.session
        registered = session.open(key[1], key[2], lambda: self.end(key), Transport.UDP)
        registered.peer = session.peer(key[1])
        over = session.over_limit()
        if over is None:
            try:
                kind = UdpFlow if registered.peer is None else MemberFlow
                made: UdpFlow | MemberFlow = kind(self, key, registered)
            except OSError as error:
                why = errno.errorcode.get(error.errno or 0, "no way there")
                over = Decision(Outcome.DENY, "upstream", f"the datagram could not be sent on ({why})")
        if over is not None:
            session.close(registered)
            self._tell(key, over)
            return None
        registered.decided = decision
        session.record(registered, decision)
        self._flows[key] = made
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP, self._sweep)
        return made

    def _make_room(self) -> None:
        while len(self._flows) >= MOST_FLOWS:
            self._end_oldest()
        tables = self.session.shared.datagrams.values()
        while sum(len(one._flows) for one in tables) >= MOST_TOGETHER:
            max(tables, key=lambda one: len(one._flows))._end_oldest()

    def _end_oldest(self) -> None:
        self.end(next(iter(self._flows)))

    def _tell(self, key: Key, decision: Decision) -> None:
        now = self._loop.time()
        if self._told.get(key, 0.0) > now:
            return
        self._told[key] = now + _TOLD_AGAIN
        while len(self._told) > _MOST_TOLD:
            self._told.popitem(last=False)
        peer = self.session.peer(key[1])
        self.session.record(Flow(0, key[1], key[2], lambda: None, Transport.UDP, peer=peer), decision)

    # ------------------------------------------------------------------ ends

    def _sweep(self) -> None:
        self._sweeper = None
        now = self._loop.time()
        for key, flow in list(self._flows.items()):
            if now - flow.last > (IDLE_ANSWERED if flow.answered else IDLE_UNANSWERED):
                self.end(key)
        if self._flows:
            self._sweeper = self._loop.call_later(_SWEEP, self._sweep)

    def end(self, key: Key) -> None:
        """The flow is over, if there is one."""
        flow = self._flows.pop(key, None)
        if flow is not None:
            flow.close()
            self.session.close(flow.flow)

    def close(self) -> None:
        """Nothing more is caught, and flows end."""
        self.session.changed = lambda: None
        if self.session.shared.datagrams.get(self.session.sandbox) is self:
            del self.session.shared.datagrams[self.session.sandbox]
        for catcher in self._catchers:
            with contextlib.suppress(ValueError, OSError):
                self._loop.remove_reader(catcher.fileno())
            catcher.close()
        for task in self._running:
            task.cancel()
        for key in list(self._flows):
            self.end(key)
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self.voice.close()
