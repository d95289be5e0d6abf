"""A living sandbox in memory, what its task is sent, and the sentences that are told about it."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cloche_server.app.process_table import ProcessTable
from cloche_server.core.budgets import Account
from cloche_server.core.errors import ClocheError
from cloche_server.core.expiry import expires_at, is_due
from cloche_server.core.happenings import LASTING, Happening, news
from cloche_server.core.lifecycle import LISTED, Event, Status, verbs
from cloche_server.core.ports import Machine, MachineExit
from cloche_server.core.records import Sandbox, Termination, TerminationReason
from cloche_server.guest.client import GuestClient
from cloche_server.host.clock import Clock
from cloche_server.telemetry import metrics


@dataclass(slots=True)
class Traffic:
    """What has gone into a sandbox and out of it. `ring` is called once when `bytes_out` has come to `alarm`."""

    execs: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    alarm: float = math.inf
    ring: Callable[[], None] | None = None

    def out(self, count: int) -> None:
        self.bytes_out += count
        if self.bytes_out >= self.alarm:
            self.alarm = math.inf
            if self.ring is not None:
                self.ring()


@dataclass(slots=True)
class Entry:
    """A living sandbox in memory: its record, its machine and link, and who uses it now."""

    record: Sandbox
    machine: Machine | None = None
    guest: GuestClient | None = None
    creating: asyncio.Task[Any] | None = None
    #: Somebody deletes it while it is created.
    doomed: bool = False
    running_execs: int = 0
    #: Connections that lead to ports of the guest.
    open_streams: int = 0
    last_activity: float = 0.0
    #: The state has moved on, and could not be recorded yet; `record.version` is still the stored one.
    unsaved: bool = False
    layer_released: bool = False
    #: The state that the journal has told of last, and what it could not be told yet.
    told: Status | None = None
    untold: list[Happening] = field(default_factory=list)
    #: Why it is being deleted.
    ending: TerminationReason | None = None
    #: It is told that its time is up, and that was not looked at yet.
    expiring: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    #: The budget that was opened for it, until whoever minds budgets has taken it.
    account: Account | None = None
    processes: ProcessTable = field(default_factory=ProcessTable)
    #: A connection to the code interpreter that nobody uses now; what it is, `app.code` knows.
    code_link: object = None
    #: It was created with services.
    has_services: bool = False
    mailbox: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set at the next move, and then another one takes its place.
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def news(self, record: Sandbox, now: float) -> tuple[Happening, ...]:
        """What is told when `record` takes the place of the present one."""
        return news(self.told, self.record, record, now, self.ending.value if self.ending else None)

    def taken_back(self, now: float) -> tuple[Happening, ...]:
        """What is told of a create whose caller went away at the very moment at which it was told."""
        if self.told is None:
            return ()
        payload = {"reason": TerminationReason.CREATE_FAILED.value}
        return (Happening("sandbox.deleted", self.record.workspace, self.record.id, now, payload),)

    def now_told(self, status: Status) -> None:
        """The journal says so, or will as soon as it can be written."""
        if status in LASTING and (self.told is not None or status is Status.RUNNING):
            self.told = status

    @property
    def in_use(self) -> bool:
        """Commands run, or connections lead to its ports."""
        return bool(self.running_execs or self.open_streams)

    def idle_left(self, now: float) -> float | None:
        """Seconds until it has been idle for as long as it may be; None when that ends nothing. `now` is monotonic."""
        record = self.record
        if not record.idle_seconds or record.status is not Status.RUNNING:
            return None
        if self.in_use:
            return float(record.idle_seconds)
        return max(0.0, self.last_activity + record.idle_seconds - now)


@dataclass(slots=True)
class Message:
    """`change` replaces fields that are not the state; `work` is done in place of a move; else `event` is a move."""

    event: Event
    done: asyncio.Future[Sandbox]
    reason: TerminationReason | None = None
    exit: MachineExit | None = None
    change: Callable[[Sandbox], Sandbox] | None = None
    work: Callable[[], Awaitable[None]] | None = None


def explain_exit(exit_: MachineExit, now: float) -> Termination:
    """What is told about a machine that has ended by itself."""
    if exit_.guest_shutdown:
        return Termination(TerminationReason.GUEST_SHUTDOWN, now, detail="the guest powered itself off")
    if exit_.signal:
        return Termination(
            TerminationReason.VMM_DIED, now, exit_.signal, f"the VMM process was killed by {exit_.signal}"
        )
    if exit_.code is None:
        return Termination(TerminationReason.VMM_DIED, now, detail="the VMM process is gone")
    return Termination(TerminationReason.VMM_DIED, now, detail=f"the VMM process ended with code {exit_.code}")


def as_cloche(error: BaseException) -> ClocheError:
    if isinstance(error, ClocheError):
        return error
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ClocheError("host.disk_full", "the disk of the host is full")
    return ClocheError("internal", "the sandbox could not be changed; the log of the server has more")


def not_written(error: OSError, what: str) -> ClocheError:
    """`what` could not be written: for want of room, or for another reason."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ClocheError("host.disk_full", f"{what} could not be written: the disk of the host is full")
    return ClocheError("sandbox.capture_failed", f"{what} could not be written ({error.strerror or error})")


def illegal(record: Sandbox, event: Event) -> ClocheError:
    return ClocheError(
        "sandbox.invalid_state",
        f"the sandbox {record.id} is {record.status.value}, {event.value} is not possible now",
        details={"status": record.status.value, "allowed": verbs(record.status)},
    )


def not_found(sandbox_id: str, details: Mapping[str, Any] | None = None) -> ClocheError:
    return ClocheError("sandbox.not_found", f"sandbox {sandbox_id} not found", details=details)


def rearmed(record: Sandbox, now: float, ttl_seconds: int, persistent: bool) -> Sandbox:
    """The record with its TTL counted from `now`, which never takes it beyond its lifetime."""
    return replace(
        record,
        ttl_seconds=ttl_seconds,
        persistent=persistent,
        expires_at=expires_at(now, ttl_seconds, persistent, record.ends_at),
    )


def expiry_reason(record: Sandbox, now: float) -> TerminationReason:
    """Which of the two ends it was that has come."""
    return TerminationReason.MAX_LIFETIME if is_due(now, record.ends_at) else TerminationReason.TTL


def name_taken(name: str, sandbox_id: str, *, fork: bool = False) -> ClocheError:
    todo = "choose another one" if fork else "`if_exists` may be `connect` or `replace`"
    return ClocheError(
        "sandbox.name_taken",
        f"the sandbox {sandbox_id} has the name {name}; {todo}",
        details={"name": name, "id": sandbox_id},
    )


def count_states(entries: Iterable[Entry]) -> None:
    """Tells the metrics how many sandboxes are in each state."""
    counts: dict[str, int] = dict.fromkeys((s.value for s in Status if s is not Status.DELETED), 0)
    for entry in entries:
        if entry.record.status is not Status.DELETED:
            counts[entry.record.status.value] += 1
    for status, count in counts.items():
        metrics.sandboxes.labels(status).set(count)


def idle_message(entry: Entry, clock: Clock, act: Callable[[Entry], Awaitable[None]] | None) -> Message:
    """Has the task of a sandbox do what it was told to do with an idle one, if it still is idle then."""

    async def work() -> None:
        if act is None or entry.idle_left(clock.monotonic()) != 0:
            return  # somebody has come in the meantime
        try:
            await act(entry)
        finally:
            # What failed is tried again when it has been idle for as long once more.
            entry.last_activity = clock.monotonic()

    return Message(Event.BOOTED, asyncio.get_running_loop().create_future(), work=work)


def find_named(entries: Iterable[Entry], workspace: str, name: str) -> Entry | None:
    """The living sandbox of that name."""
    for entry in entries:
        record = entry.record
        if (record.workspace, record.name) == (workspace, name) and record.status in LISTED:
            return entry
    return None


def refuse_rest(entry: Entry) -> None:
    """Answers what nobody will do any more: it has ended, which is what a delete wanted."""
    while not entry.mailbox.empty():
        message = entry.mailbox.get_nowait()
        if message.event is Event.DELETE:
            message.done.set_result(entry.record)
        elif not message.done.done():
            message.done.set_exception(not_found(entry.record.id))
            message.done.exception()
