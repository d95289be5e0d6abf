"""The TCP sockets of one slot: every connection of a guest is judged, then carried, handed to the HTTP engine, or
refused in a way that its program can show."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import Final

from cloche_server.core.addresses import parse_address
from cloche_server.core.groups import Member
from cloche_server.core.policy import RAW, Claim, Decision, Outcome
from cloche_server.netd import resolver
from cloche_server.netd.firstbytes import MAX_BYTES, claim_of
from cloche_server.netd.flow import HttpEngine
from cloche_server.netd.groups import Unreachable, group_decision
from cloche_server.netd.origin import original_destination
from cloche_server.netd.refusal import refuse
from cloche_server.netd.relay import Pipes, Relay
from cloche_server.netd.session import SPEAK_FIRST, Flow, Session
from cloche_server.netd.waits import readable, reset

#: A guest's first bytes have to say what it wants in this time (seconds).
FIRST_BYTES: Final = 5.0
_ACCEPT_AT_ONCE: Final = 64
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_UNREAD: Final = Decision(
    Outcome.DENY, "unreadable", "the requests of this connection would have to be read one by one"
)
_DNS_PORT: Final = 53
#: So long a refusal waits for what a client that speaks first says (seconds).
_SHORT: Final = 1.0
#: What the engine has said last may take so long to pass under a limit of bandwidth (seconds).
_LAST_BYTES: Final = 60.0


class Intake:
    """`tasks` owns the connections that are under way."""

    def __init__(
        self, session: Session, listeners: tuple[socket.socket, ...], tasks: asyncio.TaskGroup, pipes: Pipes
    ) -> None:
        self._session = session
        self._listeners = listeners
        self._tasks = tasks
        self._pipes = pipes
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False
        for listener in listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                guest, _ = listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:  # asked again at once it would only burn the processor
                    self._loop.remove_reader(listener.fileno())
                    self._loop.call_later(0.1, self._listen_again, listener)
                return
            self._begin(guest)

    def _listen_again(self, listener: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _begin(self, guest: socket.socket) -> None:
        try:
            guest.setblocking(False)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host, port = original_destination(guest)
            address = parse_address(host)
        except (OSError, ValueError):
            reset(guest)
            return
        flow = self._session.open(address, port, lambda: None)
        task = self._tasks.create_task(self._serve(guest, flow))
        flow.cut = lambda: _cancel(task)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _serve(self, guest: socket.socket, flow: Flow) -> None:
        """One connection to its end. Nothing of it ends anything else."""
        try:
            if flow.port == _DNS_PORT and self._session.peer(flow.address) is None:
                if self._session.over_limit() is not None:
                    reset(guest)
                    return
                await resolver.serve_tcp(self._session, guest)
            else:
                await Connection(self._session, guest, flow, self._pipes).run()
        except (OSError, TimeoutError):
            reset(guest)
        except asyncio.CancelledError:
            reset(guest)
            if self._closed or not flow.was_cut:
                raise
        except Exception as error:  # noqa: BLE001 - a connection that fails in a way nobody thought of
            self._session.shared.report_failure("a connection", error)
            reset(guest)
        finally:
            guest.close()
            self._session.close(flow)

    def close(self) -> None:
        """No new connections; those that are open end."""
        self._closed = True
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener.fileno())
            listener.close()
        for task in self._running:
            task.cancel()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class Connection:
    """The way of one connection of a guest."""

    def __init__(self, session: Session, guest: socket.socket, flow: Flow, pipes: Pipes) -> None:
        self._session = session
        self._guest = guest
        self._flow = flow
        self._pipes = pipes
        self._upstream: socket.socket | None = None

    async def run(self) -> None:
        try:
            peer = self._session.peer(self._flow.address)
            if peer is not None:
                await self._call(peer)
            else:
                await self._act(await self._decide())
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    async def _call(self, peer: Member) -> None:
        """Into the slot of a member of the group. Neither policy nor secrets are asked, and nothing is read."""
        session, flow = self._session, self._flow
        flow.peer = peer
        flow.decided = decision = session.over_limit() or group_decision(session.shared.doors, peer)
        session.record(flow, decision)
        if not decision.allowed:
            reset(self._guest)
            return
        doors = session.shared.doors
        with doors.inside(peer.sandbox, self._left):
            try:
                own = session.shared.groups.own_address(session.sandbox)
                self._upstream = await doors.dial(peer, flow.port, own)
            except OSError as error:
                flow.was_cut = f"upstream: {_why(error)}"
                raise
            await self._carry()

    def _left(self) -> None:
        self._flow.was_cut = "cut: the member has gone"
        self._flow.cut()

    # ------------------------------------------------------------------ deciding

    async def _decide(self) -> Decision:
        session, flow = self._session, self._flow
        over = session.over_limit()
        if over is not None:
            return over
        decision = session.judge(flow)
        if decision.outcome in {Outcome.DENY, Outcome.PEEK} and await self._resolve_stated():
            decision = session.judge(flow)
        if decision.outcome is Outcome.WATCH:
            return await self._watch(decision)
        if decision.outcome is Outcome.PEEK:
            return await self._by_claim()
        if decision.outcome is Outcome.DENY and flow.port in SPEAK_FIRST:
            # For the log, and so that the refusal can be one that the program shows.
            claim = await read_claim(self._guest, _SHORT)
            decision = session.judge(flow)
            flow.claim = claim
            if decision.outcome is not Outcome.DENY:
                return await self._by_claim()
        return decision

    async def _resolve_stated(self) -> bool:
        """Names with a port of their own may be known to the guest from before (a fork, a restart of ours): their
        addresses are found again. Whether that is so for this connection."""
        session, flow = self._session, self._flow
        if session.names_of(flow.address):
            return False
        names = session.policy.names_for(flow.port)[:8]
        if not names:
            return False
        await asyncio.gather(*(session.lookups.addresses(name) for name in names))
        return bool(session.names_of(flow.address))

    async def _by_claim(self) -> Decision:
        session, flow = self._session, self._flow
        flow.claim = await read_claim(self._guest)
        flow.bound = True
        decision = session.judge(flow)
        name = flow.claim.name
        if name is None:
            return decision
        # Also where the name does not decide now: a later policy must not take it for more than it is.
        bound = session.pinned(name, flow.address)
        if not bound and decision.allowed and decision.by_name:
            bound = flow.address in await session.lookups.addresses(name)
        flow.bound = bound
        return session.judge(flow)

    async def _watch(self, decision: Decision) -> Decision:
        """Allowed unless the guest speaks first and claims a name that is not."""
        session, flow = self._session, self._flow
        try:
            await self._dial()
        except OSError:
            flow.decided = Decision(Outcome.ALLOW, decision.rule, decision.reason)
            session.record(flow, flow.decided)
            raise
        assert self._upstream is not None
        speaker = await readable(self._guest, self._upstream)
        if speaker is self._upstream:
            flow.claim = RAW
            return session.judge(flow)
        return await self._by_claim()

    # ------------------------------------------------------------------ acting

    async def _act(self, decision: Decision) -> None:
        session, flow = self._session, self._flow
        engine = session.shared.engine
        if decision.allowed and decision.reads_http and engine is None:
            decision = _UNREAD
        flow.decided = decision
        session.record(flow, decision)
        if not decision.allowed:
            await refuse(self._guest, flow.claim, decision, str(flow.address))
            return
        if decision.reads_http:
            assert engine is not None
            flow.engine = True
            self._hang_up()
            await self._read_by(engine)
            return
        await self._carry()

    async def _read_by(self, engine: HttpEngine) -> None:
        await engine.serve(self._guest, self._flow.target, self._session)

    async def _carry(self) -> None:
        session, flow = self._session, self._flow
        if self._upstream is None:
            await self._dial()
        upstream, self._upstream = self._upstream, None
        assert upstream is not None
        relay = Relay(
            self._guest,
            upstream,
            pipes=self._pipes,
            up=session.up,
            down=session.down,
            moved=lambda sent, received: session.carried(flow, sent, received),
            first=None if flow.claim is not None or flow.peer is not None else self._look,
        )
        flow.cut = relay.cut
        await relay.wait()

    async def _dial(self) -> None:
        flow = self._flow
        try:
            self._upstream = await self._session.shared.dialer.connect(flow.address, flow.port)
        except OSError as error:
            flow.was_cut = f"upstream: {_why(error)}"
            raise

    def _look(self) -> None:
        """Into the first bytes of a connection that is allowed by its address, for the log and later policies."""
        with contextlib.suppress(OSError):
            claim = claim_of(self._guest.recv(4096, socket.MSG_PEEK), final=True)
            if claim is not None and claim.name is not None:
                self._flow.claim = claim
                self._flow.bound = self._session.pinned(claim.name, self._flow.address)


def _why(error: OSError) -> str:
    if isinstance(error, Unreachable):
        return str(error.strerror)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return errno.errorcode.get(error.errno or 0, "the connection could not be made")


async def read_claim(guest: socket.socket, budget: float = FIRST_BYTES) -> Claim:
    """Peeks until the first bytes say what they are, or the time is over."""
    seen = -1
    try:
        async with asyncio.timeout(budget):
            while True:
                await readable(guest)
                data = guest.recv(MAX_BYTES, socket.MSG_PEEK)
                claim = claim_of(data, final=len(data) <= seen)
                if claim is not None:
                    return claim
                seen = len(data)
                # Readable again only when there is more than what was seen already, or the end.
                guest.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, seen + 1)
    except TimeoutError:
        with contextlib.suppress(BlockingIOError):
            return claim_of(guest.recv(MAX_BYTES, socket.MSG_PEEK), final=True) or RAW
        return RAW
    finally:
        guest.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
