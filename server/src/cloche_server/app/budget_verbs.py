"""What callers ask about budgets: how they stand, other limits, none; and what the children of a fork get."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cloche_server.app.access import Access
from cloche_server.app.budget import GONE, Budgets, exceeded
from cloche_server.app.entry import Entry
from cloche_server.app.meter import Meters
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.budgets import Account, Amounts, Budget, amounts_of, divide, gather, left, used_up, warns
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import id_from_random
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import Sandbox
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.store.meters import MeterStore

Sharing = Literal["share", "split"]


@dataclass(frozen=True, slots=True)
class Standing:
    """An account as it is now."""

    account: Account
    used: Amounts
    left: Mapping[str, float]
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What the children of a fork get: the account of the parent, or each a budget of its own."""

    account_id: str | None = None
    budget: Budget | None = None


@dataclass(slots=True)
class Division:
    """`made`: so many children came to life."""

    inheritance: Inheritance
    made: int = 0


class BudgetVerbs:
    """Each method finds the sandbox, and answers with how its account stands then."""

    def __init__(
        self, store: MeterStore, budgets: Budgets, meters: Meters, access: Access, supervisor: Supervisor, clock: Clock
    ) -> None:
        self._store = store
        self._budgets = budgets
        self._meters = meters
        self._access = access
        self._supervisor = supervisor
        self._clock = clock

    # ---------------------------------------------------------------- what callers ask for

    async def get(self, workspace: str, sandbox_id: str) -> Standing:
        """Raises `budget.not_found`."""
        entry = await self._access.find(workspace, sandbox_id)
        account = self._budgets.of(entry)
        if account is None:
            raise ClocheError("budget.not_found", f"the sandbox {sandbox_id} has no budget")
        return self._standing(account)

    def _standing(self, account: Account) -> Standing:
        members = self._budgets.members(account.id)
        used = self._budgets.used(account, members)
        return Standing(account, used, left(account.budget, used), tuple(sorted(e.record.id for e in members)))

    async def set(self, workspace: str, sandbox_id: str, budget: Budget) -> Standing:
        """Other limits for the account of a sandbox: what was used stays used. One without gets an account that counts
        from now. Raises `budget.exceeded` when it is about to be deleted already."""
        entry = await self._access.find(workspace, sandbox_id)
        account = self._budgets.of(entry)
        if account is None:
            return self._standing(await self._open(entry, budget))

        async def change() -> Account:
            await self._store.write([], [self._with(entry, budget)])
            changed = self._with(entry, budget)  # what has happened to it meanwhile counts as well
            self._budgets.put(changed)
            self._budgets.look_soon(changed.id)
            self._meters.soon()
            return changed

        return self._standing(await self._supervisor.perform(entry, change))

    def _with(self, entry: Entry, budget: Budget) -> Account:
        """The account of a sandbox with other limits: its members may go on unless one of these is used up, too."""
        now = self._budgets.of(entry)
        if now is None or entry.record.status in GONE:
            raise ClocheError("sandbox.not_found", f"sandbox {entry.record.id} not found")
        if now.id in self._budgets.ending:
            raise exceeded(entry.record.id, now)
        return self._limited(now, budget)

    def _limited(self, account: Account, budget: Budget) -> Account:
        """With other limits, and as it stands then."""
        used = self._budgets.used_now(account)
        over = account.exceeded_at is not None and bool(used_up(budget, used))
        return replace(
            account,
            budget=budget,
            warned=account.warned and warns(budget, used) is not None,
            exceeded_at=account.exceeded_at if over else None,
            exceeded_by=used_up(budget, used)[0] if over else None,
        )

    async def _open(self, entry: Entry, budget: Budget) -> Account:
        metered = self._meters.read_now(entry)
        used = amounts_of(metered, self._clock.now())
        account = Account(
            id_from_random(random_bytes(16)), entry.record.workspace, budget, offsets={entry.record.id: used}
        )
        with self._budgets.holding(account.id):
            # With the meter: what a server that is killed has not written would be free of charge for the next one.
            await self._store.write([] if metered.status is Status.CREATING else [metered], [account])
            self._budgets.take(account)
            record = await self._supervisor.change(entry, lambda record: _joined(record, account.id))
            self._budgets.look_soon(account.id)
            # Somebody else may have given it one at the same time; the last one counts.
            return self._budgets.get(record.account_id) or account

    async def remove(self, workspace: str, sandbox_id: str) -> None:
        """The sandbox has no budget any more. Others that share its account go on with what it has used."""
        entry = await self._access.find(workspace, sandbox_id)
        account = self._budgets.of(entry)
        if account is None:
            return

        before: list[Sandbox] = []

        def change(record: Sandbox) -> Sandbox:
            if record.status in GONE or account.id in self._budgets.ending:
                raise ClocheError("sandbox.not_found", f"sandbox {sandbox_id} not found")
            before.append(record)
            return replace(record, account_id=None)

        await self._supervisor.change(entry, change)
        entry.traffic.alarm = math.inf
        if before[0].account_id is not None:  # else somebody else was faster
            self._budgets.close(before[0], self._meters.read_now(entry))
            self._budgets.drop_if_unused(before[0].account_id)
            self._meters.soon()
            with contextlib.suppress(ClocheError):  # without room for it now it is written before long
                await self._meters.flush()

    # ---------------------------------------------------------------- forks

    @contextlib.asynccontextmanager
    async def inherited(self, entry: Entry, sharing: Sharing | None, count: int) -> AsyncIterator[Division]:
        """What `count` children of a sandbox get, while they are made. With `split`, each that was not made (see
        `Division.made`) gives its part back."""
        account = self._budgets.of(entry)
        if account is None:
            if sharing == "split":
                raise ClocheError(
                    "request.invalid",
                    f"the sandbox {entry.record.id} has no budget to split",
                    details={"field": "budget"},
                )
            yield Division(Inheritance())
            return
        with self._budgets.holding(account.id):
            if sharing != "split":
                yield Division(Inheritance(account_id=account.id))
                return
            share = await self._divide(entry, account, count + 1)
            division = Division(Inheritance(budget=share))
            try:
                yield division
            finally:
                self._give_back(account.id, share, count - division.made)

    async def _divide(self, entry: Entry, account: Account, parts: int) -> Budget:
        mine, share = divide(account.budget, self._budgets.used_now(account), parts)
        empty = [name for name, limit in share.limits().items() if limit <= 0]
        if empty:
            raise ClocheError(
                "budget.exceeded",
                f"what is left of {empty[0]} in the budget of {entry.record.id} is too little for {parts} parts",
                details={"limit": empty[0]},
            )
        self._budgets.put(replace(account, budget=mine))
        try:
            # Before there are children: a server that is killed now leaves less to use, never more.
            await self._meters.flush()
        except BaseException:
            self._give_back(account.id, share, parts - 1)
            raise
        return share

    def _give_back(self, account_id: str, share: Budget, times: int) -> None:
        account = self._budgets.get(account_id)
        if account is None or not times:
            return
        budget = gather(account.budget, share, times)
        if account_id in self._budgets.ending:
            self._budgets.put(replace(account, budget=budget))
        else:
            # It may have come to the end of the part that was its own meanwhile.
            self._budgets.put(self._limited(account, budget))
            self._budgets.look_soon(account_id)
        self._meters.soon()


def _joined(record: Sandbox, account_id: str) -> Sandbox:
    if record.status in GONE:
        raise ClocheError("sandbox.not_found", f"sandbox {record.id} not found")
    return replace(record, account_id=account_id)
