"""Budgets: the sandboxes of one account may use so much together. Near a limit it is told, at a limit they are paused,
and when nobody raises it in time they are deleted.

An account is looked at when it could be at a limit at the earliest, and at least every few seconds; nothing is asked
of a machine for that but its counters. Its deeds are done by the tasks of the sandboxes, which look once more, so that
a raise that came before counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry
from cloche_server.app.meter import Meters
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.budgets import (
    Account,
    Amounts,
    amounts_of,
    earliest,
    reached,
    warns,
)
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.meters import Metered
from cloche_server.core.records import Sandbox, TerminationReason
from cloche_server.core.times import rfc3339
from cloche_server.host.clock import Clock
from cloche_server.store.meters import MeterStore
from cloche_server.telemetry import log

_log = log.get("budget")

#: Between two looks at an account (seconds).
SHORTEST: Final = 0.2
LONGEST: Final = 10.0
#: To see whether what was asked for was done.
AGAIN_AFTER: Final = 1.0
GONE: Final = frozenset({Status.DELETING, Status.DELETED})

OnEvent = Callable[[Entry, str, Mapping[str, Any]], None]
Sharing = Literal["share", "split"]


class Budgets:
    """All accounts of this host."""

    def __init__(
        self,
        store: MeterStore,
        meters: Meters,
        access: Access,
        supervisor: Supervisor,
        pause: Callable[[Entry, str], Awaitable[Sandbox]],
        clock: Clock,
    ) -> None:
        self._store = store
        self._meters = meters
        self._access = access
        self._supervisor = supervisor
        self._pause = pause
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._dirty: set[str] = set()
        self._dropped: set[str] = set()
        #: Accounts whose time is up, and sandboxes whose task was told to do something.
        self.ending: set[str] = set()
        self._asked: set[str] = set()
        #: Sandboxes that are about to be deleted.
        self._told: set[str] = set()
        #: Forks are being made that will belong to these.
        self._held: Counter[str] = Counter()
        #: When each account is looked at next (monotonic); what is not here is looked at now.
        self._due: dict[str, float] = {}
        self._poke = asyncio.Event()
        #: Told of what happens: `budget.warning`, `budget.paused`, `budget.exceeded`. It neither waits nor raises.
        self.on_event: OnEvent | None = None
        meters.ledger = self
        access.guard = self._guard
        access.exec_guard = self._exec_guard
        supervisor.observers.append(self._moved)

    # ---------------------------------------------------------------- a start of the server

    async def load(self) -> None:
        """Reads the accounts. Before sandboxes are taken over."""
        self._accounts = {account.id: account for account in await self._store.accounts()}

    async def settle(self, ends: Iterable[tuple[Sandbox, Metered]]) -> None:
        """Takes what sandboxes that ended meanwhile have used, and forgets accounts of nobody."""
        for record, metered in ends:
            self.close(record, metered)
        for account_id in list(self._accounts):
            self.drop_if_unused(account_id)
        try:
            await self._meters.flush()
        except ClocheError as error:
            # A server that does not start with a full disk can delete nothing that would make room.
            _log.error("meter.failed", error=error.message)

    # ---------------------------------------------------------------- the sums

    def members(self, account_id: str) -> list[Entry]:
        return [e for e in self._supervisor.entries() if e.record.account_id == account_id]

    def of(self, entry: Entry) -> Account | None:
        if entry.account is not None:
            account, entry.account = entry.account, None
            self._accounts[account.id] = account
        return self._accounts.get(entry.record.account_id) if entry.record.account_id is not None else None

    def _share(self, account: Account, record: Sandbox, metered: Metered) -> Amounts:
        offset = account.offsets.get(record.id, Amounts())
        return amounts_of(metered, self._clock.now()).minus(offset)

    def used(self, account: Account, members: Iterable[Entry]) -> Amounts:
        used = account.closed
        for entry in members:
            used = used.plus(self._share(account, entry.record, self._meters.read_now(entry)))
        return used

    def put(self, account: Account) -> None:
        self._accounts[account.id] = account
        self._dirty.add(account.id)

    def get(self, account_id: str | None) -> Account | None:
        return None if account_id is None else self._accounts.get(account_id)

    def take(self, account: Account) -> None:
        """One that is stored already."""
        self._accounts[account.id] = account

    def close(self, record: Sandbox, metered: Metered) -> None:
        """A member is none any more; what it has used stays used."""
        account = self._accounts.get(record.account_id or "")
        if account is not None:
            closed = account.closed.plus(self._share(account, record, metered))
            offsets = {name: amounts for name, amounts in account.offsets.items() if name != record.id}
            self.put(replace(account, closed=closed, offsets=offsets))

    def drop_if_unused(self, account_id: str) -> None:
        if not self._held[account_id] and not self.members(account_id):
            self._accounts.pop(account_id, None)
            self.ending.discard(account_id)
            self._dirty.discard(account_id)
            self._dropped.add(account_id)

    def _moved(self, entry: Entry, event: Event, before: Status) -> None:
        account = self.of(entry)
        if account is None:
            return
        if entry.record.status is Status.DELETED:
            self.close(entry.record, self._meters.read_now(entry))
            self._told.discard(entry.record.id)
            self.look_soon(account.id)
        elif entry.record.status is Status.RUNNING:
            self.look_soon(account.id)

    def look_soon(self, account_id: str) -> None:
        self._due.pop(account_id, None)
        self._poke.set()

    def pending(self) -> tuple[list[Account], list[str]]:
        return [self._accounts[name] for name in self._dirty], list(self._dropped)

    def written(self, accounts: list[Account], dropped: list[str]) -> None:
        for account in accounts:
            if self._accounts.get(account.id) is account:
                self._dirty.discard(account.id)
        self._dropped -= set(dropped)

    @contextlib.contextmanager
    def holding(self, account_id: str) -> Iterator[None]:
        """While sandboxes are about to belong to it."""
        self._held[account_id] += 1
        try:
            yield
        finally:
            self._held[account_id] -= 1
            self.drop_if_unused(account_id)

    # ---------------------------------------------------------------- what is refused

    def _guard(self, entry: Entry) -> None:
        account = self.of(entry)
        if account is not None and account.exceeded_at is not None:
            raise exceeded(entry.record.id, account)

    def _exec_guard(self, entry: Entry) -> None:
        account = self.of(entry)
        if account is None or account.budget.exec_count is None:
            return
        count = account.closed.exec_count
        for one in self.members(account.id):
            count += one.traffic.execs - account.offsets.get(one.record.id, Amounts()).exec_count
        if count >= account.budget.exec_count:
            raise exceeded(entry.record.id, self._exceed(account, "exec_count"))

    def used_now(self, account: Account) -> Amounts:
        return self.used(account, self.members(account.id))

    def _exceed(self, account: Account, name: str) -> Account:
        account = replace(account, exceeded_at=self._clock.now(), exceeded_by=name)
        self.put(account)
        _log.warning("budget.reached", account=account.id, limit=name)
        self.look_soon(account.id)
        self._meters.soon()
        return account

    # ---------------------------------------------------------------- looking

    async def run(self) -> None:
        """For as long as the server runs; cancel to stop."""
        while True:
            wait = LONGEST
            try:
                self._poke.clear()
                wait = self.look(due=True)
            except Exception as error:  # noqa: BLE001 - one account must never take the server with it
                _log.error("budget.failed", error=repr(error))
            await asyncio.sleep(SHORTEST)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait - SHORTEST)):
                    await self._poke.wait()

    def look(self, *, due: bool = False) -> float:
        """Looks at all accounts, or at those whose time has come, and has done what has to be; the seconds until the
        next look."""
        members: dict[str, list[Entry]] = {}
        living = self._supervisor.entries()
        for entry in living:
            account = self.of(entry)
            if account is not None and entry.record.status not in GONE:
                members.setdefault(account.id, []).append(entry)
        self._asked &= {entry.record.id for entry in living}
        for account_id in self._accounts.keys() - members.keys():
            self.drop_if_unused(account_id)
        now = self._clock.monotonic()
        for account_id, entries in members.items():
            if not due or self._due.get(account_id, now) <= now:
                self._due[account_id] = now + self._look_at(self._accounts[account_id], entries)
        self._due = {name: moment for name, moment in self._due.items() if name in members}
        return min((moment - now for moment in self._due.values()), default=LONGEST)

    def _look_at(self, account: Account, entries: list[Entry]) -> float:
        used = self.used(account, self.members(account.id))
        if account.exceeded_at is None:
            account = self._warn(account, used, entries)
            if (name := reached(account.budget, used)) is not None:
                account = self._exceed(account, name)
        if account.exceeded_at is not None:
            for entry in entries:
                if entry.record.status is Status.RUNNING or self._is_over(account):
                    self._ask(entry)
            if any(entry.record.status is Status.RUNNING for entry in entries):
                return AGAIN_AFTER
            return max(SHORTEST, (account.ends_at or 0) - self._clock.now())
        running = [entry for entry in entries if entry.record.status is Status.RUNNING]
        self._set_alarms(account, used, running)
        cpus = sum(entry.record.resources.cpus for entry in running)
        return max(SHORTEST, min(LONGEST, earliest(account, used, len(running), cpus)))

    def _warn(self, account: Account, used: Amounts, entries: list[Entry]) -> Account:
        name = None if account.warned else warns(account.budget, used)
        if name is None:
            return account
        account = replace(account, warned=True)
        self.put(account)
        self._meters.soon()
        _log.warning("budget.warning", account=account.id, limit=name)
        for entry in entries:
            self._tell(entry, "budget.warning", account, name)
        return account

    def _set_alarms(self, account: Account, used: Amounts, running: list[Entry]) -> None:
        """No limit on bytes can be passed before one of those that run has sent its part of what is left."""
        limit = account.budget.bytes_out
        marks = [] if limit is None else [limit * (1.0 if account.warned else account.budget.warn_at), float(limit)]
        rest = min((mark - used.bytes_out for mark in marks if mark > used.bytes_out), default=math.inf)
        for entry in running:
            traffic = entry.traffic
            traffic.ring = partial(self.look_soon, account.id)
            traffic.alarm = traffic.bytes_out + max(1.0, rest / len(running))

    def _tell(self, entry: Entry, kind: str, account: Account, limit: str | None) -> None:
        if self.on_event is not None:
            used = self.used_now(account)
            payload = {
                "limit": limit,
                "used": getattr(used, limit or "", None),
                "allowed": getattr(account.budget, limit or "", None),
            }
            self.on_event(entry, kind, {name: value for name, value in payload.items() if value is not None})

    # ---------------------------------------------------------------- done by the tasks of the sandboxes

    def _is_over(self, account: Account) -> bool:
        return account.ends_at is not None and self._clock.now() >= account.ends_at

    def _ask(self, entry: Entry) -> None:
        """Once at a time; the task of the sandbox sees first whether it is still so."""
        if entry.record.id in self._asked:
            return
        self._asked.add(entry.record.id)

        async def work() -> None:
            try:
                account = self.of(entry)
                if account is not None and account.exceeded_at is not None:
                    await self._act(entry, account)
            finally:
                self._asked.discard(entry.record.id)

        self._supervisor.send(entry, Event.BOOTED, work=work)

    async def _act(self, entry: Entry, account: Account) -> None:
        if self._is_over(account):
            if entry.record.id not in self._told:
                self.ending.add(account.id)
                self._told.add(entry.record.id)
                self._tell(entry, "budget.exceeded", account, account.exceeded_by)
                self._supervisor.send(entry, Event.DELETE, reason=TerminationReason.BUDGET)
        elif entry.record.status is Status.RUNNING:
            await self._pause(entry, "budget")
            self._tell(entry, "budget.paused", account, account.exceeded_by)


def exceeded(sandbox_id: str, account: Account) -> ClocheError:
    ends = rfc3339(account.ends_at) if account.ends_at is not None else None
    return ClocheError(
        "budget.exceeded",
        f"the budget of the sandbox {sandbox_id} is used up ({account.exceeded_by}); raise it before {ends}, "
        "when the sandbox is deleted",
        details={"limit": account.exceeded_by, "deleted_at": ends},
    )
