"""Events of services: the agents tell what happens to those of their sandbox, and it is written into the journal.

One task listens to each sandbox that has services. A guest may say what it likes: each field is bounded and checked,
and no more than so many events a minute are written. What is held back is counted, and the last one of each service is
told when there is room again, so that the journal does not end with something that is long past.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from cloche_server.app.entry import Entry
from cloche_server.app.journal import PAGE
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.ratelimit import RateLimiter
from cloche_server.core.records import Sandbox
from cloche_server.core.services import SERVICES_MAX
from cloche_server.core.times import rfc3339
from cloche_server.guest.service_events import GuestServiceEvent, GuestServiceEvents
from cloche_server.host.clock import Clock
from cloche_server.telemetry import log

_log = log.get("services")

#: What an event of an agent is called in the journal.
TYPES: Final = {
    "started": "service.started",
    "exited": "service.exited",
    "healthy": "service.healthy",
    "unhealthy": "service.unhealthy",
    "gave_up": "service.gave_up",
}
#: Of one sandbox: so many at once, and so many a minute on average.
BURST: Final = 60
PER_MINUTE: Final = 10.0
#: An agent is asked anew after so long without news (seconds).
WAIT: Final = 20.0
#: At least so long between two questions, after an answer with events and after one without (seconds).
AFTER_NEWS: Final = 0.2
AFTER_NOTHING: Final = 1.0
#: After so long an agent that could not be asked is asked again (seconds).
AGAIN_AFTER: Final = 5.0
#: After a failure on this side (seconds).
AFTER_FAILURE: Final = 60.0
#: The last second that RFC 3339 can tell.
_LAST: Final = 253402300799.0
#: Pages of the journal that are looked through for what was told last.
_PAGES: Final = 3


class Held:
    """Events of one sandbox on their way to the journal."""

    def __init__(self, limiter: RateLimiter, key: str) -> None:
        self._limiter = limiter
        self._key = key
        self._waiting: OrderedDict[str, tuple[GuestServiceEvent, int]] = OrderedDict()
        #: Left out, and not counted with any event yet.
        self._lost = 0

    def put(self, events: Sequence[GuestServiceEvent], lost: int, now: float) -> list[tuple[GuestServiceEvent, int]]:
        """What may be told now, and how many before each were not. The rest is held back."""
        self._lost += lost
        told = []
        while self._waiting and self._may(now):
            _, (event, skipped) = self._waiting.popitem(last=False)
            told.append((event, self._skipped(skipped)))
        for event in events:
            if not self._waiting and self._may(now):
                told.append((event, self._skipped(0)))
            else:
                self._hold(event)
        return told

    def _may(self, now: float) -> bool:
        return self._limiter.take(self._key, now).allowed

    def _skipped(self, count: int) -> int:
        count, self._lost = count + self._lost, 0
        return count

    def _hold(self, event: GuestServiceEvent) -> None:
        _, skipped = self._waiting.pop(event.name, (None, -1))
        if len(self._waiting) >= SERVICES_MAX:  # no honest agent has so many
            _, (_, more) = self._waiting.popitem(last=False)
            self._lost += more + 1
        self._waiting[event.name] = event, skipped + 1

    def left(self, now: float) -> float | None:
        """Seconds until something may be told; None: nothing waits."""
        return self._limiter.look(self._key, now).retry_after if self._waiting else None


class ServiceEvents:
    """`inherits` says whether a new sandbox may have services that nobody has defined in it. Its tasks belong to
    `group`."""

    def __init__(
        self, supervisor: Supervisor, clock: Clock, group: asyncio.TaskGroup, inherits: Callable[[Sandbox], bool]
    ) -> None:
        self._supervisor = supervisor
        self._clock = clock
        self._group = group
        self._inherits = inherits
        self._limiter = RateLimiter(PER_MINUTE, BURST)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Somebody has defined services since the agent was asked last.
        self._defined: set[str] = set()
        supervisor.observers.append(self._moved)

    def attend(self, entry: Entry) -> None:
        """Listens to a sandbox that may have services, until it has none or ends."""
        key = entry.record.id
        self._defined.add(key)
        running = self._tasks.get(key)
        # One that is done has looked for the last time, even if it is still in the table.
        if running is None or running.done():
            self._tasks[key] = task = self._group.create_task(self._run(entry), name=f"services of {key}")
            task.add_done_callback(partial(self._left, key))

    def _left(self, key: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    def take_over(self) -> None:
        """What runs since before this server."""
        for entry in self._supervisor.entries():
            if entry.record.status is Status.RUNNING:
                self.attend(entry)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _moved(self, entry: Entry, event: Event, before: Status) -> None:
        if entry.record.status is not Status.RUNNING or before in {Status.RUNNING, Status.PAUSED}:
            return
        if before is not Status.CREATING or entry.has_services or self._inherits(entry.record):
            self.attend(entry)

    # ---------------------------------------------------------------- one sandbox

    async def _run(self, entry: Entry) -> None:
        try:
            while not await self._heard(entry):
                await self._pause(entry.ended, AFTER_FAILURE)
        finally:
            self._defined.discard(entry.record.id)

    async def _heard(self, entry: Entry) -> bool:
        """False: it has failed, and goes on later where the journal says that it was."""
        try:
            await self._listen(entry)
        except Exception as error:  # noqa: BLE001 - what a guest says must not take the server with it
            _log.error("services.not_heard", sandbox=entry.record.id, error=repr(error))
            return False
        return True

    async def _listen(self, entry: Entry) -> None:
        key = entry.record.id
        held = Held(self._limiter, key)
        place: str | None = None
        while self._supervisor.get(key) is entry and entry.record.status not in {Status.DELETING, Status.DELETED}:
            moved, guest = entry.moved, entry.guest
            if entry.record.status is not Status.RUNNING or guest is None:
                await moved.wait()
                continue
            self._defined.discard(key)
            began = self._clock.monotonic()
            left = held.left(began)
            wait = 0.0 if place is None else WAIT if left is None else min(WAIT, left)
            try:
                answer = await guest.service_events(place or "", wait)
            except ClocheError as error:
                if error.code == "not_implemented":
                    return
                await self._pause(moved, AGAIN_AFTER)
                continue
            if place is None and (answer.services or answer.events):
                place = await self._place(entry.record)  # not for each of the many that have none
                continue
            place = answer.next or place
            for event, skipped in held.put(answer.events, answer.lost, self._clock.monotonic()):
                await self._tell(entry.record, event, skipped)
            if self._over(key, answer, held):
                return
            took = self._clock.monotonic() - began
            await asyncio.sleep(AFTER_NEWS if answer.events else max(0.0, AFTER_NOTHING - took))

    def _over(self, key: str, answer: GuestServiceEvents, held: Held) -> bool:
        """No services are left, and all of them is told."""
        empty = not answer.services and not answer.events and held.left(self._clock.monotonic()) is None
        return empty and key not in self._defined

    async def _pause(self, sooner: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await sooner.wait()
        except TimeoutError:
            pass

    async def _tell(self, record: Sandbox, event: GuestServiceEvent, skipped: int) -> None:
        payload = _payload(event, skipped)
        await self._supervisor.journal.tell(TYPES[event.kind], record.workspace, record.id, payload)

    async def _place(self, record: Sandbox) -> str:
        """Where a server before this one has stopped listening, as the journal says; "" if it does not."""
        before = sys.maxsize
        for _ in range(_PAGES):
            page = await self._supervisor.journal.store.before(record.workspace, record.id, before, PAGE)
            for told in page:
                if told.what.type in TYPES.values():
                    return str(told.what.payload.get("place", ""))
            if len(page) < PAGE:
                break
            before = page[-1].seq
        return ""


def _payload(event: GuestServiceEvent, skipped: int) -> dict[str, Any]:
    given = {
        "service": event.name,
        "process_id": event.process_id,
        "exit_code": event.exit_code,
        "signal": event.signal,
        "detail": event.detail or None,
        "restarts": event.restarts,
        "retry_in_seconds": event.retry,
        "at": rfc3339(min(event.at_ns / 1e9, _LAST)),
        "skipped": skipped or None,
        "place": event.place,
    }
    return {name: value for name, value in given.items() if value is not None}
