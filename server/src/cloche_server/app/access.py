"""From an id in a request to a sandbox that may be used: one place, the same answer on every route."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator

from cloche_server.app.entry import Entry, find_named, not_found
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import is_sandbox_id
from cloche_server.core.lifecycle import LISTED, SERVING, SLEEPING, Status, verbs
from cloche_server.core.ports import MachineCondition
from cloche_server.core.records import Sandbox
from cloche_server.core.times import rfc3339
from cloche_server.guest.client import GuestClient
from cloche_server.host.clock import Clock
from cloche_server.store.sandboxes import SandboxStore

#: Commands and transfers of one sandbox at once. Each may hold a window of flow control in this process, and no
#: sandbox may take the memory of the others.
MAX_CALLS = 200


class Access:
    """Looks sandboxes up for a workspace. What belongs to another workspace does not exist."""

    #: Wakes a hibernated sandbox; set once, by what knows how.
    waker: Callable[[Entry], Awaitable[None]] | None = None
    #: Refuse what a budget does not allow: any use, and the start of a command; set once, by what knows budgets.
    guard: Callable[[Entry], None] | None = None
    exec_guard: Callable[[Entry], None] | None = None

    def __init__(self, supervisor: Supervisor, store: SandboxStore, clock: Clock) -> None:
        self._supervisor = supervisor
        self._store = store
        self._clock = clock
        #: When somebody began, or ended, something in any sandbox (monotonic).
        self.used_at = float("-inf")

    async def find(self, workspace: str, sandbox_id: str) -> Entry:
        """Raises `sandbox.not_found`; for a sandbox that has ended its details say how and when."""
        entry = self._supervisor.get(sandbox_id)
        if entry is not None and entry.record.workspace == workspace and entry.record.status in LISTED:
            return entry
        past = await self._store.get_of(workspace, sandbox_id) if is_sandbox_id(sandbox_id) else None
        if past is None or past.termination is None:
            raise not_found(_shown(sandbox_id))
        ended = {"reason": past.termination.reason.value, "at": rfc3339(past.ended_at or past.termination.at)}
        raise not_found(_shown(sandbox_id), {"termination": ended})

    def named(self, workspace: str, name: str) -> Entry | None:
        """The living sandbox of that name."""
        return find_named(self._supervisor.entries(), workspace, name)

    def list(self, workspace: str) -> list[Sandbox]:
        """The living sandboxes of a workspace, oldest first."""
        records = [e.record for e in self._supervisor.entries() if e.record.workspace == workspace]
        return sorted((r for r in records if r.status in LISTED), key=lambda r: (r.created_at, r.id))

    async def awake(self, workspace: str, sandbox_id: str) -> Entry:
        """The sandbox, after it has woken up if it was hibernated. Raises what a wake raises."""
        entry = await self.find(workspace, sandbox_id)
        if entry.record.status in SLEEPING and self.waker is not None:
            self.check_budget(entry)
            await self.waker(entry)
        return entry

    def check_budget(self, entry: Entry) -> None:
        """Raises `budget.exceeded`."""
        if self.guard is not None:
            self.guard(entry)

    def count_exec(self, entry: Entry) -> None:
        """A command is about to start. Raises `budget.exceeded`."""
        if self.exec_guard is not None:
            self.exec_guard(entry)
        entry.traffic.execs += 1

    async def serving(self, workspace: str, sandbox_id: str) -> tuple[Entry, GuestClient]:
        """A sandbox whose guest takes calls. Raises `sandbox.failed`, `sandbox.invalid_state`, `host.disk_full`,
        `budget.exceeded`."""
        entry = await self.awake(workspace, sandbox_id)
        record = entry.record
        if record.status is Status.FAILED or (entry.machine is not None and entry.machine.ended):
            why = record.termination.detail if record.termination else "the VMM process is gone"
            raise ClocheError(
                "sandbox.failed",
                f"sandbox {record.id} has failed: {why}",
                details={"status": Status.FAILED.value},
            )
        self.check_budget(entry)
        if record.status not in SERVING or entry.guest is None or entry.machine is None:
            raise ClocheError(
                "sandbox.invalid_state",
                f"sandbox {record.id} is {record.status.value} and cannot take calls now",
                details={"status": record.status.value, "allowed": verbs(record.status)},
            )
        if entry.machine.condition is MachineCondition.DISK_FULL:
            raise ClocheError(
                "host.disk_full",
                f"sandbox {record.id} is stopped because the disk of the host is full; it goes on when there is room",
                retry_after=10,
            )
        if entry.running_execs >= MAX_CALLS:
            raise ClocheError(
                "sandbox.busy",
                f"{entry.running_execs} calls run in sandbox {record.id} already, {MAX_CALLS} is the limit",
                details={"limit": MAX_CALLS},
                retry_after=1,
            )
        entry.last_activity = self._clock.monotonic()
        return entry, entry.guest

    @contextlib.contextmanager
    def busy(self, entry: Entry) -> Iterator[None]:
        """While something runs in the sandbox it is not idle."""
        entry.running_execs += 1
        self.used_at = self._clock.monotonic()
        try:
            yield
        finally:
            entry.running_execs -= 1
            entry.last_activity = self.used_at = self._clock.monotonic()

    def idle_seconds(self, entry: Entry) -> int:
        if entry.in_use:
            return 0
        return max(0, int(self._clock.monotonic() - entry.last_activity))


def _shown(sandbox_id: str) -> str:
    """The id as it may stand in a sentence: what is not an id is not repeated."""
    return sandbox_id if is_sandbox_id(sandbox_id) else "with this id"
