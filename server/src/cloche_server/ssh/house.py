"""What all clients share: their number, guesses, the audit log, and the tasks that carry them."""

from __future__ import annotations

import asyncio
import ipaddress
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cloche_server.app.attached import Attachments
from cloche_server.app.audit import AuditEntry
from cloche_server.app.dialing import SocketDialer
from cloche_server.app.sshkeys import SshKeys, Visit
from cloche_server.core.ratelimit import RateLimiter
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.telemetry import log

_log = log.get("ssh")

#: Clients that have not said who they are: in all, and from one address.
MAX_STRANGERS: Final = 128
MAX_STRANGERS_OF_ONE: Final = 16
#: The longest that nobody looks whether something has ended (seconds).
LOOK_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """`sandbox` and `workspace`: connections at once. `failures`: in a minute, from one address; 0 = no limit.
    `login`: seconds to say who one is. `idle`: seconds in which nothing moves, 0 = for ever."""

    sandbox: int = 32
    workspace: int = 256
    failures: int = 30
    login: float = 30.0
    idle: float = 3600.0


class Guest(Protocol):
    """A client that is here."""

    def end(self, sentence: str) -> None: ...

    def cut(self) -> None: ...


class House:
    def __init__(
        self, keys: SshKeys, attachments: Attachments, dialer: SocketDialer, clock: Clock, limits: Limits
    ) -> None:
        self.keys = keys
        self.attachments = attachments
        self.dialer = dialer
        self.limits = limits
        self._clock = clock
        self._failures = RateLimiter(limits.failures, limits.failures) if limits.failures else None
        self._guests: set[Guest] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._strangers: dict[Guest, str] = {}
        self._of_sandbox: Counter[str] = Counter()
        self._of_workspace: Counter[str] = Counter()
        self._group: asyncio.TaskGroup | None = None
        #: Takes what the audit log is to tell; set once, where one is kept.
        self.audit: Callable[[AuditEntry], None] | None = None

    # ---------------------------------------------------------------- life

    def open(self, group: asyncio.TaskGroup) -> None:
        self._group = group

    def close(self) -> None:
        """Nobody comes in any more, and everybody is told to go."""
        self._group = None
        for guest in list(self._guests):
            guest.end("the server is shutting down")

    def cut(self) -> None:
        for guest in list(self._guests):
            guest.cut()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that never takes the others with it."""
        if self._group is None:
            task = asyncio.ensure_future(_nothing())
        else:
            task = self._group.create_task(_contained(work), name="ssh")
        # One that is cancelled before it has begun never gets to its work.
        task.add_done_callback(lambda _: work.close())
        return task

    # ---------------------------------------------------------------- coming and going

    def arrive(self, guest: Guest, client: str) -> bool:
        """False: too many of its address have not said who they are, or it guesses too much. When there are too many
        from everywhere, who has stood there for longest makes room: a login takes moments, and whoever only stands in
        the door cannot keep others out."""
        network = network_of(client)
        of_one = sum(1 for one in self._strangers.values() if one == network)
        now = self._clock.monotonic()
        if self._group is None or of_one >= MAX_STRANGERS_OF_ONE:
            return False
        if self._failures is not None and not self._failures.look(network, now).allowed:
            return False
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cut()
        self._guests.add(guest)
        self._empty.clear()
        self._strangers[guest] = network
        return True

    def leave(self, guest: Guest) -> None:
        self._guests.discard(guest)
        self._strangers.pop(guest, None)
        if not self._guests:
            self._empty.set()

    async def wait_empty(self) -> None:
        await self._empty.wait()

    def wrong(self, client: str, code: str) -> None:
        """A password that opens nothing."""
        if self._failures is not None:
            self._failures.take(network_of(client), self._clock.monotonic())
        self._note(None, client, 401, code)
        _log.info("ssh.refused", client=client, why=code)

    def admit(self, guest: Guest, visit: Visit, client: str) -> str | None:
        """Counts who has come in; or the sentence that refuses it. `release` must follow, unless it is refused."""
        record = visit.entry.record
        self._strangers.pop(guest, None)
        for count, limit, what in (
            (self._of_sandbox[record.id], self.limits.sandbox, f"sandbox {record.id}"),
            (self._of_workspace[record.workspace], self.limits.workspace, "sandboxes of this workspace"),
        ):
            if count >= limit:
                self._note(visit, client, 429, "request.rate_limited")
                return f"{limit} SSH connections lead to {what} already, which is the limit"
        self._of_sandbox[record.id] += 1
        self._of_workspace[record.workspace] += 1
        self._note(visit, client, 200, None)
        _log.info("ssh.opened", sandbox_id=record.id, by=visit.by, client=client)
        return None

    def release(self, visit: Visit) -> None:
        record = visit.entry.record
        for counter, key in ((self._of_sandbox, record.id), (self._of_workspace, record.workspace)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]

    def _note(self, visit: Visit | None, client: str, status: int, code: str | None) -> None:
        if self.audit is not None:
            self.audit(
                AuditEntry(
                    at=self._clock.now(),
                    request_id=random_bytes(8).hex(),
                    token=None if visit is None else visit.by,
                    workspace=None if visit is None else visit.entry.record.workspace,
                    method="SSH",
                    route="/ssh",
                    sandbox_id=None if visit is None else visit.entry.record.id,
                    status=status,
                    code=code,
                    client=client,
                )
            )

    # ---------------------------------------------------------------- when a connection is over

    def left(self, moved: float, now: float, expires_at: float | None) -> float:
        """Seconds until it has to be looked at again."""
        times = [LOOK_SECONDS]
        if self.limits.idle:
            times.append(moved + self.limits.idle - now)
        if expires_at is not None:
            times.append(expires_at - self._clock.now())
        return max(0.0, min(times))

    def over(self, moved: float, now: float, expires_at: float | None) -> str | None:
        """Why it is."""
        if self.limits.idle and now - moved >= self.limits.idle:
            return f"nothing has moved for {self.limits.idle:g} seconds"
        if expires_at is not None and expires_at <= self._clock.now():
            return "the token or key that opened this connection has expired"
        return None


async def _contained(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:  # noqa: BLE001 - one client must never take the others with it
        # Without the values of variables: there may be secrets among them.
        _log.error("ssh.crashed", error=repr(error), trace="".join(traceback.format_exception(error)))


async def _nothing() -> None:
    """In place of what is not begun any more."""


def network_of(address: str) -> str:
    """Of IPv6 the /64: one machine has as many addresses in it as it likes."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))
