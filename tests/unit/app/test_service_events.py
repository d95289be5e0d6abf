"""Events of services: what agents say becomes events, bounded, in order and once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from app_host import Crew, Host
from journal_kit import happened

from cloche_server.app.entry import Entry
from cloche_server.app.service_events import BURST, Held, ServiceEvents
from cloche_server.core.errors import ClocheError
from cloche_server.core.happenings import Happening
from cloche_server.core.ratelimit import RateLimiter
from cloche_server.guest.service_events import GuestServiceEvents, events


def said(number: int, kind: str = "started", name: str = "web", **fields: Any) -> dict[str, Any]:
    return {"place": f"0a.{number}", "kind": kind, "name": name, "at_ns": 1, "restarts": number, **fields}


def answer(*found: dict[str, Any], lost: int = 0, services: int = 1) -> GuestServiceEvents:
    after = found[-1]["place"] if found else ""
    return events({"events": list(found), "lost": lost, "next": after, "services": services})


class Agent:
    """Answers what it was given, and then has no news."""

    def __init__(self, *answers: GuestServiceEvents | Exception) -> None:
        self.answers = deque(answers)
        self.asked: list[str] = []
        self.services = 1

    def stand_still(self, _: bool) -> None:
        pass

    async def service_events(self, after: str, seconds: float) -> GuestServiceEvents:
        self.asked.append(after)
        if not self.answers:
            await asyncio.sleep(min(seconds, 0.05))
            return answer(services=self.services)
        found = self.answers[0]
        if isinstance(found, Exception) or not (after == "" and seconds == 0):  # else it is asked whether it has any
            self.answers.popleft()
        if isinstance(found, Exception):
            raise found
        return found

    async def freeze(self, **_: object) -> None: ...

    async def aclose(self) -> None: ...


@pytest.fixture
async def hear(host: Host, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[], ServiceEvents]]:
    for name in ("AFTER_NEWS", "AFTER_NOTHING", "AGAIN_AFTER", "AFTER_FAILURE"):
        monkeypatch.setattr(f"cloche_server.app.service_events.{name}", 0.001)
    made: list[ServiceEvents] = []

    def build() -> ServiceEvents:
        group: Any = crew
        made.append(ServiceEvents(host.supervisor, host.clock, group, lambda _: False))
        return made[-1]

    yield build
    for one in made:
        await one.close()


async def with_agent(host: Host, agent: Agent) -> Entry:
    record = await host.create()
    entry = host.supervisor.get(record.id)
    assert entry is not None
    guest: Any = agent
    entry.guest = guest
    return entry


async def told(host: Host, entry: Entry, count: int) -> list[Happening]:
    """The events of services of a sandbox, once there are so many."""
    async with asyncio.timeout(20):
        while True:
            found = [one for one in await happened(host, entry.record.id) if one.type.startswith("service.")]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.01)


async def test_what_an_agent_says_is_told(host: Host, hear: Callable[[], ServiceEvents]) -> None:
    end = said(
        2, "exited", exit_code=3, signal="KILL\x1b[2J", detail="ended\nwith 3", retry_ms=1500, process_id="svc-1"
    )
    agent = Agent(answer(said(1)), answer(end, said(3, "gave_up", detail="no more")))
    entry = await with_agent(host, agent)
    hear().attend(entry)
    found = await told(host, entry, 3)
    assert [one.type for one in found] == ["service.started", "service.exited", "service.gave_up"]
    assert found[1].payload == {
        "service": "web", "process_id": "svc-1", "exit_code": 3, "signal": "KILL?[2J", "detail": "ended?with 3",
        "restarts": 2, "retry_in_seconds": 1.5, "at": "1970-01-01T00:00:00.000Z", "place": "0a.2",
    }  # fmt: skip
    assert agent.asked[:4] == ["", "", "0a.1", "0a.3"]


async def test_a_flood_does_not_reach_the_journal_and_its_end_does(
    host: Host, hear: Callable[[], ServiceEvents]
) -> None:
    flood = [answer(*(said(64 * n + k) for k in range(64))) for n in range(20)]
    agent = Agent(*flood, answer(said(2000, "gave_up")))
    entry = await with_agent(host, agent)
    hear().attend(entry)
    async with asyncio.timeout(20):
        while agent.answers:
            await asyncio.sleep(0.01)
    assert len(await told(host, entry, BURST)) == BURST
    host.clock.time += 60
    last = (await told(host, entry, BURST + 1))[-1]
    assert (last.type, last.payload["skipped"]) == ("service.gave_up", 20 * 64 - BURST)


def test_names_that_no_agent_has_take_no_memory() -> None:
    limiter = RateLimiter(1, 1)
    held = Held(limiter, "sb")
    found = answer(*(said(n, name=f"n{n}") for n in range(64))).events
    assert len(held.put(found, 5, now=0)) == 1
    assert held.left(0) is not None
    assert len(held._waiting) == 32
    (one,) = held.put((), 0, now=61)
    # 64 less the one that was told, the 32 that wait; what was lost before the first was counted with that one.
    assert one[1] == 64 - 1 - 32


async def test_a_server_goes_on_where_the_one_before_has_stopped(host: Host, hear: Callable[[], ServiceEvents]) -> None:
    agent = Agent(answer(said(1), said(2, "exited")))
    entry = await with_agent(host, agent)
    first = hear()
    first.attend(entry)
    await told(host, entry, 2)
    await first.close()
    agent.asked.clear()
    agent.answers.append(answer(said(3)))
    hear().take_over()
    assert [one.payload["place"] for one in await told(host, entry, 3)] == ["0a.1", "0a.2", "0a.3"]
    assert agent.asked[:2] == ["", "0a.2"]


async def test_it_stops_listening_when_there_is_nothing_to_hear(
    host: Host, crew: Crew, hear: Callable[[], ServiceEvents]
) -> None:
    def listening() -> list[str]:
        return [task.get_name() for task in crew.tasks if task.get_name().startswith("services of")]

    async def until(count: int) -> None:
        async with asyncio.timeout(20):
            while len(listening()) != count:
                await asyncio.sleep(0.01)

    agent = Agent(ClocheError("sandbox.unreachable", "gone"), answer(said(1)))
    entry = await with_agent(host, agent)
    heard = hear()
    heard.attend(entry)
    heard.attend(entry)
    await told(host, entry, 1)
    assert len(listening()) == 1
    agent.services = 0
    await until(0)
    # An agent that is older than this, and a sandbox that ends.
    agent.answers.append(ClocheError("not_implemented", "older"))
    heard.attend(entry)
    await until(0)
    agent.services = 1
    heard.attend(entry)
    await until(1)
    await host.sleep.pause("w", entry.record.id)
    await host.lifecycle.delete("w", entry.record.id)
    await until(0)


async def test_services_that_are_defined_while_it_stops_listening_are_heard(
    host: Host, hear: Callable[[], ServiceEvents]
) -> None:
    entry = await with_agent(host, Agent())
    heard = hear()
    again = asyncio.Event()
    looks = 0

    async def listen(_: Entry) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:  # between its last look and its removal from the table
            asyncio.get_running_loop().call_soon(heard.attend, entry)
        else:
            again.set()

    heard._listen = listen  # type: ignore[method-assign]
    heard.attend(entry)
    async with asyncio.timeout(20):
        await again.wait()


async def test_a_failure_of_the_journal_does_not_make_it_deaf(
    host: Host, hear: Callable[[], ServiceEvents], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = await with_agent(host, Agent(answer(said(1))))
    before, failures = host.supervisor.journal.store.before, [RuntimeError("of the database")]

    async def sometimes(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return await before(*given)

    monkeypatch.setattr(host.supervisor.journal.store, "before", sometimes)
    hear().attend(entry)
    assert len(await told(host, entry, 1)) == 1
    assert not failures


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "sandbox.deleted"},
        {"name": "../x"},
        {"place": "x"},
        {"at_ns": "1"},
        {"exit_code": 256},
        {"restarts": -1},
    ],
)
def test_nonsense_is_no_event(change: dict[str, Any]) -> None:
    body = {"events": [said(1)], "next": "0a.1", "services": 1}
    assert len(events(body).events) == 1
    with pytest.raises(ClocheError, match="nonsense"):
        events({**body, "events": [{**said(1), **change}]})
    for odd in ({**body, "next": "x" * 70}, {**body, "events": [said(1)] * 65}, {**body, "lost": -1}):
        with pytest.raises(ClocheError, match="nonsense"):
            events(odd)
