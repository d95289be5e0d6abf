"""One task per sandbox is the only writer of its state.

Verbs post events to it and wait; the end of the VMM process and the TTL come to it by themselves. Each
move is looked up in the lifecycle table and written conditionally on the version it was derived from.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from cloche_server.app.capacity import Capacity
from cloche_server.app.entry import (
    Entry,
    Message,
    as_cloche,
    count_states,
    expiry_reason,
    explain_exit,
    idle_message,
    illegal,
    refuse_rest,
)
from cloche_server.app.journal import Journal
from cloche_server.app.machines import Machines
from cloche_server.app.steps import is_cancelled, to_the_end
from cloche_server.core.budgets import Account
from cloche_server.core.errors import ClocheError
from cloche_server.core.expiry import is_due
from cloche_server.core.lifecycle import Event, Status, step
from cloche_server.core.ports import Machine, MachineExit
from cloche_server.core.records import Sandbox, Termination, TerminationReason, with_status
from cloche_server.guest.client import GuestClient
from cloche_server.host.clock import Clock
from cloche_server.store.sandboxes import IdempotencyKey, SandboxStore
from cloche_server.telemetry import log, metrics

_log = log.get("supervisor")
_T = TypeVar("_T")

#: A wait is cut into pieces so that a jump of the wall clock is noticed (seconds).
LONGEST_WAIT = 30.0
#: After a failure that may pass, such as a full disk (seconds).
AGAIN_AFTER = 1.0


class Supervisor:
    """All living sandboxes of this host."""

    def __init__(
        self,
        store: SandboxStore,
        machines: Machines,
        capacity: Capacity,
        clock: Clock,
        group: asyncio.TaskGroup,
    ) -> None:
        self._store = store
        self._machines = machines
        self._capacity = capacity
        self._clock = clock
        self._group = group
        #: Where everything that happens is told.
        self.journal = Journal(store.events, clock)
        self._entries: dict[str, Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Does the idle action of a sandbox, inside its task; set once, by what knows how.
        self.on_idle: Callable[[Entry], Awaitable[None]] | None = None
        #: Told of every move after it was made: what happened, and the state before. They neither wait nor raise.
        self.observers: list[Callable[[Entry, Event, Status], None]] = []

    def get(self, sandbox_id: str) -> Entry | None:
        return self._entries.get(sandbox_id)

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    # ---------------------------------------------------------------- the beginning

    async def admit(self, record: Sandbox, key: IdempotencyKey | None = None, account: Account | None = None) -> Entry:
        """Records a sandbox that is about to be made, with the key it is made for and the budget that is opened for
        it. Raises `Conflict`."""
        await self._store.insert(record, key, account)
        entry = Entry(record, last_activity=self._clock.monotonic(), account=account)
        self._entries[record.id] = entry
        self._gauge()
        return entry

    async def withdraw(self, sandbox_id: str) -> None:
        """Forgets a sandbox whose create came to nothing."""
        entry = self._entries.pop(sandbox_id, None)
        if entry is not None:
            entry.ended.set()
            refuse_rest(entry)
        self._gauge()
        taken_back = entry.taken_back(self._clock.now()) if entry is not None else ()
        await self._store.forget(sandbox_id, taken_back)
        self.journal.written(taken_back)

    async def start(self, entry: Entry, machine: Machine, guest: GuestClient, **changes: Any) -> Sandbox:
        """The machine is ready: the sandbox runs, and its task begins."""
        entry.machine = machine
        entry.guest = guest
        entry.creating = None
        await self._move(entry, Event.BOOTED, **changes)
        self.watch(entry)
        return entry.record

    def resume_watch(self, record: Sandbox, machine: Machine | None, guest: GuestClient | None) -> Entry:
        """Takes over a sandbox that an earlier server has left."""
        entry = Entry(record, machine, guest, last_activity=self._clock.monotonic(), told=record.status)
        self._entries[record.id] = entry
        self.watch(entry)
        self._gauge()
        return entry

    def watch(self, entry: Entry) -> None:
        self._own(self._run(entry), f"sandbox {entry.record.id}")
        if entry.machine is not None:
            self._own(self._watch_exit(entry, entry.machine), f"exit of {entry.record.id}")

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---------------------------------------------------------------- what verbs call

    async def post(
        self,
        entry: Entry,
        event: Event,
        *,
        reason: TerminationReason | None = None,
        exit: MachineExit | None = None,
    ) -> Sandbox:
        """Sends `event` to the task of a sandbox and waits for what came of it."""
        message = Message(event, asyncio.get_running_loop().create_future(), reason, exit)
        entry.mailbox.put_nowait(message)
        return await asyncio.shield(message.done)

    async def change(self, entry: Entry, change: Callable[[Sandbox], Sandbox]) -> Sandbox:
        """Changes fields that are not the state (TTL, metadata)."""
        message = Message(Event.BOOTED, asyncio.get_running_loop().create_future(), change=change)
        entry.mailbox.put_nowait(message)
        return await asyncio.shield(message.done)

    async def perform(
        self, entry: Entry, work: Callable[[], Awaitable[_T]], undo: Callable[[_T], Awaitable[None]] | None = None
    ) -> _T:
        """Has the task of a sandbox do `work`: nothing else changes the sandbox meanwhile. It goes on when its
        caller is cancelled; what came of it is then given to `undo`."""
        results: list[_T] = []

        async def run() -> None:
            results.append(await work())

        message = Message(Event.BOOTED, asyncio.get_running_loop().create_future(), work=run)
        entry.mailbox.put_nowait(message)
        try:
            await asyncio.shield(message.done)
        except asyncio.CancelledError:
            if undo is not None:
                self._own(self._undo(message, results, undo), f"undo in {entry.record.id}")
            raise
        return results[0]

    async def _undo(self, message: Message, results: list[_T], undo: Callable[[_T], Awaitable[None]]) -> None:
        await asyncio.wait({message.done})
        for result in results:
            try:
                await undo(result)
            except Exception as error:  # noqa: BLE001 - nobody waits for it, and it must not end the server
                _log.error("undo.failed", error=repr(error))

    # ---------------------------------------------------------------- the task of one sandbox

    async def _run(self, entry: Entry) -> None:
        while entry.record.status is not Status.DELETED:
            message = await self._next(entry)
            if message is None:
                await self._save(entry)
                continue
            try:
                if message.work is not None:
                    await message.work()
                elif message.change is not None:
                    await self._write(entry, message.change(entry.record))
                else:
                    await self._handle(entry, message)
            except (Exception, asyncio.CancelledError) as error:  # one sandbox must never take the others with it
                if isinstance(error, asyncio.CancelledError) and is_cancelled():
                    raise
                # What is not possible now is for the caller to know; all else is for the operator.
                (_log.info if isinstance(error, ClocheError) else _log.error)(
                    "sandbox.move_failed",
                    sandbox=entry.record.id,
                    event_name=message.event.value,
                    error=repr(error),
                )
                if not message.done.done():
                    message.done.set_exception(as_cloche(error))
                    message.done.exception()  # nobody may be waiting: TTL and crash messages
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    return  # the server ends, and what failed was undoing a verb
                if entry.record.status is Status.DELETING or message.event is Event.EXPIRED:
                    await asyncio.sleep(AGAIN_AFTER)
                if entry.record.status is Status.DELETING:
                    self.send(entry, Event.DELETE)
            else:
                if not message.done.done():
                    message.done.set_result(entry.record)
        self._entries.pop(entry.record.id, None)
        self._gauge()
        refuse_rest(entry)

    async def _next(self, entry: Entry) -> Message | None:
        """The next message, or the expiry when the TTL has passed; None when it is time to look again."""
        if entry.record.status is Status.DELETING:
            return await entry.mailbox.get()
        deadline = entry.record.deadline
        now = self._clock.now()
        if is_due(now, deadline) and not entry.expiring:
            # Behind what came before it, and once: a renewal that was in time counts, and no number of calls keeps
            # the end from coming.
            entry.expiring = True
            self.send(entry, Event.EXPIRED)
        wait = LONGEST_WAIT if deadline is None else min(LONGEST_WAIT, max(0.0, deadline - now))
        idle = entry.idle_left(self._clock.monotonic())
        if idle is not None:
            if idle == 0 and entry.mailbox.empty():
                entry.mailbox.put_nowait(idle_message(entry, self._clock, self.on_idle))
            wait = min(wait, max(idle, 0.05))
        if entry.unsaved:
            wait = min(wait, AGAIN_AFTER)
        try:
            async with asyncio.timeout(wait):
                return await entry.mailbox.get()
        except TimeoutError:
            return None

    def send(self, entry: Entry, event: Event, **kwargs: Any) -> None:
        """As `post`, for those who do not wait."""
        entry.mailbox.put_nowait(Message(event, asyncio.get_running_loop().create_future(), **kwargs))

    async def _watch_exit(self, entry: Entry, machine: Machine) -> None:
        exit_ = await machine.wait_exit()
        if entry.machine is machine and entry.record.status not in {Status.DELETING, Status.DELETED}:
            self.send(entry, Event.CRASHED, exit=exit_)

    async def _handle(self, entry: Entry, message: Message) -> None:
        record = entry.record
        if message.event is Event.EXPIRED:
            entry.expiring = False
            if not is_due(self._clock.now(), record.deadline):
                return  # renewed in the meantime
            message.reason = expiry_reason(record, self._clock.now())
        if message.event is Event.CRASHED and record.status is Status.STOPPING:
            await self._lost(entry, Event.HALTED)
        elif message.event is Event.CRASHED:
            if step(record.status, Event.CRASHED) is None or (entry.machine is not None and not entry.machine.ended):
                return  # of a machine that it had before it was hibernated
            await self._fail(entry, explain_exit(message.exit or MachineExit(), self._clock.now()))
        elif message.event in {Event.DELETE, Event.EXPIRED}:
            await self._delete(entry, message.event, message.reason or TerminationReason.DELETED)
        else:
            raise illegal(record, message.event)

    async def _fail(self, entry: Entry, termination: Termination) -> None:
        await self._lost(entry, Event.CRASHED, termination=termination, ended_at=termination.at)
        metrics.ends.labels(termination.reason.value).inc()

    async def _lost(self, entry: Entry, event: Event, **changes: Any) -> None:
        """Its machine is gone."""
        machine, guest = entry.machine, entry.guest
        entry.machine = entry.guest = None
        await self._move_first(entry, event, process=None, **changes)
        self._capacity.without_memory(entry.record.id)
        entry.ended.set()
        if guest is not None:
            await guest.aclose()
        if machine is not None:
            machine.release()
        await self._machines.unplug(entry.record.id)

    async def _delete(self, entry: Entry, event: Event, reason: TerminationReason) -> None:
        if entry.record.status is not Status.DELETING:
            entry.ending = reason
            now = self._clock.now()
            termination = entry.record.termination or Termination(reason, now)
            await self._move_first(entry, event, termination=termination, ended_at=now)
            metrics.ends.labels(reason.value).inc()
        entry.ended.set()
        if entry.guest is not None:
            await entry.guest.aclose()
        if entry.machine is not None:
            await entry.machine.kill()
            entry.machine.release()
        await self._machines.remove_directory(entry.record.id)
        if not entry.layer_released:
            await self._machines.release_layer(entry.record.layer_id)
            entry.layer_released = True
        entry.machine = entry.guest = None
        self._capacity.release(entry.record.id)
        await self._move(entry, Event.RELEASED, process=None)

    # ---------------------------------------------------------------- for what `perform` does

    async def move(self, entry: Entry, event: Event, *, done: bool = False, **changes: Any) -> Sandbox:
        """Takes the sandbox to its next state. `done`: it is there already, whether or not that can be recorded now.
        Raises `sandbox.invalid_state`."""
        await (self._move_first if done else self._move)(entry, event, **changes)
        return entry.record

    async def fail(self, entry: Entry, detail: str) -> None:
        """The machine cannot go on: it is ended, and the sandbox has failed."""
        if entry.machine is not None:
            await entry.machine.kill()
        if step(entry.record.status, Event.CRASHED) is not None:
            now = self._clock.now()
            await self._fail(entry, Termination(TerminationReason.VMM_DIED, now, detail=detail))

    async def amend(self, entry: Entry, **changes: Any) -> None:
        """Records what is true already (such as the layer it writes to), in memory even if it cannot be stored yet."""
        record = replace(entry.record, **changes)
        try:
            await self._write(entry, record)
        except ClocheError as error:
            self._unsaved(entry, record, error)

    def attach(self, entry: Entry, machine: Machine, guest: GuestClient) -> None:
        """The sandbox has a machine again."""
        entry.machine, entry.guest = machine, guest
        self._own(self._watch_exit(entry, machine), f"exit of {entry.record.id}")

    # ---------------------------------------------------------------- the one place that moves

    async def _move(self, entry: Entry, event: Event, **changes: Any) -> None:
        before, moved = entry.record.status, self._moved(entry, event, changes)
        await self._write(entry, moved)
        self._tell(entry, event, before)

    async def _move_first(self, entry: Entry, event: Event, **changes: Any) -> None:
        """A move that is true whether or not it can be recorded now: the machine is gone, or has to go. With
        the disk full a delete is just what makes room. A server that starts before it is recorded finds no
        process, and comes to the same end."""
        before, moved = entry.record.status, self._moved(entry, event, changes)
        try:
            await self._write(entry, moved)
        except ClocheError as error:
            self._unsaved(entry, moved, error)
        self._tell(entry, event, before)

    def _unsaved(self, entry: Entry, record: Sandbox, error: ClocheError) -> None:
        _log.error("sandbox.not_recorded", sandbox=record.id, status=record.status.value, error=error.message)
        entry.untold += entry.news(record, self._clock.now())
        entry.record, entry.unsaved = record, True
        entry.now_told(record.status)

    def _moved(self, entry: Entry, event: Event, changes: Mapping[str, Any]) -> Sandbox:
        target = step(entry.record.status, event)
        if target is None:
            raise illegal(entry.record, event)
        return with_status(entry.record, target, self._clock.now(), **changes)

    async def _save(self, entry: Entry) -> None:
        """Records what could not be recorded when it happened; that was logged, and the next try is soon."""
        if entry.unsaved:
            with contextlib.suppress(Exception):
                await self._write(entry, entry.record)

    def _tell(self, entry: Entry, event: Event, before: Status) -> None:
        target = entry.record.status
        moved, entry.moved = entry.moved, asyncio.Event()
        moved.set()
        _log.info(
            "sandbox.moved",
            sandbox=entry.record.id,
            event_name=event.value,
            before=before.value,
            after=target.value,
            reason=entry.record.termination.reason.value if entry.record.termination else None,
        )
        self._gauge()
        for observer in self.observers:
            observer(entry, event, before)

    async def _write(self, entry: Entry, record: Sandbox) -> None:
        # A write cannot be taken back once it has begun: what is in memory would not be what is stored and told.
        await to_the_end(self._write_down(entry, record))

    async def _write_down(self, entry: Entry, record: Sandbox) -> None:
        record = replace(record, version=entry.record.version + 1)
        happenings = [*entry.untold, *entry.news(record, self._clock.now())]
        await self._store.update(record, happenings)
        entry.record, entry.unsaved, entry.untold = record, False, []
        entry.now_told(record.status)
        self.journal.written(happenings)

    def _gauge(self) -> None:
        count_states(self._entries.values())

    # ---------------------------------------------------------------- house-keeping

    async def close(self) -> None:
        """The server ends: every task of a sandbox ends, the machines run on for the next server."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        for entry in self.entries():
            if entry.guest is not None:
                await entry.guest.aclose()
            if entry.machine is not None:
                entry.machine.release()
