"""Reading events over HTTP: lists, streams, and readers that come back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from app_host import Crew, Host, assemble
from app_states import VERBS, sandbox_in
from events_server import Front, Message, serve, stream, tell
from journal_kit import journal

from cloche_server.app import events as events_module

pytestmark = pytest.mark.thorough


@pytest.fixture
async def front(host: Host, crew: Crew) -> AsyncIterator[Front]:
    async with serve(host, crew) as front:
        yield front


def ids(messages: list[Message]) -> list[int]:
    return [int(message.data["id"]) for message in messages]


# ------------------------------------------------------------------ lists


async def test_the_newest_oldest_first(front: Front) -> None:
    record = await sandbox_in(front.host, "paused")
    found = (await front.get(f"/v1/sandboxes/{record.id}/events"))["events"]
    assert [one["type"] for one in found] == ["sandbox.created", "sandbox.running", "sandbox.paused"]
    assert found[2] == {
        "id": "3", "time": "1970-01-12T13:46:40.000Z", "sandbox_id": record.id, "type": "sandbox.paused",
        "payload": {"reason": "asked"},
    }  # fmt: skip
    assert (await front.get("/v1/events", params={"tail": 2}))["events"] == found[1:]
    assert (await front.get("/v1/events", params={"tail": 0})) == {"events": []}
    assert (await front.get("/v1/events", params={"type": "sandbox.created,snapshot.*"}))["events"] == found[:1]
    assert (await front.get("/v1/events", params={"sandbox_id": record.id}))["events"] == found
    assert (await front.http.get("/v1/events", params={"sandbox_id": "z" * 20})).status_code == 404


async def test_a_type_is_found_however_far_back(front: Front) -> None:
    record = await front.host.create()
    await tell(front.host, 450)
    found = await front.get("/v1/events", params={"type": "sandbox.*", "tail": 1})
    assert [one["type"] for one in found["events"]] == ["sandbox.running"]
    assert len((await front.get("/v1/events", params={"tail": 1000}))["events"]) == 452
    assert (await front.get(f"/v1/sandboxes/{record.id}/events"))["events"][0]["id"] == "1"


async def test_page_by_page(front: Front) -> None:
    await tell(front.host, 30)
    seen: list[int] = []
    while found := (await front.get("/v1/events", params={"since": str(seen[-1] if seen else 0), "tail": 7}))["events"]:
        seen += [int(one["id"]) for one in found]
    assert seen == list(range(1, 31))


async def test_it_stays_readable_after_the_end(front: Front) -> None:
    record = await front.host.create()
    await front.host.lifecycle.delete("w", record.id)
    front.host.clock.time += 1e6
    await front.host.store.prune(front.host.clock.time)  # the record of it is forgotten
    found = (await front.get(f"/v1/sandboxes/{record.id}/events"))["events"]
    assert found[-1]["type"] == "sandbox.deleted"
    assert (await front.http.get(f"/v1/sandboxes/{record.id}")).status_code == 404


async def test_other_workspaces_do_not_exist(front: Front) -> None:
    record = await front.host.create()
    random_id = await front.other.get(f"/v1/sandboxes/{'z' * 20}/events")
    foreign = await front.other.get(f"/v1/sandboxes/{record.id}/events")
    assert (foreign.status_code, foreign.json()["code"]) == (404, "sandbox.not_found")
    assert foreign.json()["details"] == random_id.json()["details"] == {}
    assert (await front.other.get("/v1/events", params={"sandbox_id": record.id})).status_code == 404
    for query in ({}, {"since": "0"}):
        assert (await front.other.get("/v1/events", params=query)).json() == {"events": []}
    async with stream(front.other, "/v1/events", since="0") as reader:
        await tell(front.host, 3)
        await tell(front.host, 1, workspace="foreign")
        assert ids(await reader.take(1)) == [6]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"since": "x"}, "since must be the id of an event"),
        ({"since": "-1"}, "since must be"),
        ({"since": "9" * 30}, "since must be"),
        ({"since": "٣"}, "since must be"),
        ({"since": "7"}, "there is no event 7 yet, the newest is 2"),
        ({"since": "7", "follow": "1"}, "there is no event 7 yet"),
        ({"type": "sandbox.dreamt"}, "type must be among sandbox.created"),
        ({"type": ""}, "type must be among"),
        ({"tail": "-1"}, "tail"),
        ({"tail": "1001"}, "tail"),
        ({"follow": "perhaps"}, "follow"),
    ],
)
async def test_bad_questions(front: Front, query: dict[str, str], says: str) -> None:
    await tell(front.host, 2)
    assert says in await front.refused("/v1/events", params=query)


async def test_a_bad_last_event_id(front: Front) -> None:
    assert "Last-Event-ID must be" in await front.refused("/v1/events", headers={"Last-Event-ID": "one"})


# ------------------------------------------------------------------ streams


async def test_a_stream_goes_on(front: Front) -> None:
    record = await front.host.create()
    async with stream(front.http, f"/v1/sandboxes/{record.id}/events", tail=1) as reader:
        assert reader.response.headers["x-events-after"] == "1"
        first = await reader.next()
        assert first is not None
        assert (first.event, first.id, first.data["type"]) == ("event", "2", "sandbox.running")
        await VERBS["pause"](front.host, record.id)
        told = await reader.next()
        assert told is not None
        assert told.data["type"] == "sandbox.paused"


async def test_accept_alone_asks_for_a_stream(front: Front) -> None:
    await tell(front.host, 1)
    headers = {"Accept": "text/event-stream"}
    async with front.http.stream("GET", "/v1/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")


async def test_it_ends_with_its_sandbox(front: Front) -> None:
    record = await front.host.create()
    path = f"/v1/sandboxes/{record.id}/events"
    async with stream(front.http, path, tail=0, type="sandbox.paused") as filtered:
        async with stream(front.http, path, tail=0) as reader:
            await front.host.lifecycle.delete("w", record.id)
            assert [m.event for m in await reader.take(2)] == ["event", "end"]
            assert await reader.next() is None
        end = await filtered.next()
        assert end is not None
        assert (end.event, end.data) == ("end", {"sandbox_id": record.id})
    async with stream(front.http, path, last="3") as again:
        assert [m.event for m in await again.take(1)] == ["end"], "it had seen everything"
    async with stream(front.http, path, last="2") as again:
        assert [m.event for m in await again.take(2)] == ["event", "end"]


async def test_it_ends_with_a_create_that_fails(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "LONGEST_LOOK", 0.02)
    reached = front.host.world.block["Machine.restore"] = asyncio.Event()
    creating = asyncio.ensure_future(front.host.create())
    await reached.wait()
    (entry,) = front.host.supervisor.entries()
    async with stream(front.http, f"/v1/sandboxes/{entry.record.id}/events") as reader:
        creating.cancel()
        assert [m.event for m in await reader.take(1)] == ["end"]


async def test_the_server_stops(front: Front) -> None:
    async with stream(front.http, "/v1/events") as reader:
        front.services.stopping.set()
        last = await reader.next()
        assert last is not None
        assert (last.event, last.data["code"]) == ("error", "server.shutting_down")
        assert await reader.next() is None


async def test_what_retention_has_removed_is_stated(front: Front) -> None:
    await tell(front.host, 10)
    await front.host.store.events.prune(0, 4)
    gap = {"first_id": "3", "last_id": "6"}
    assert (await front.get("/v1/events", params={"since": "2"}))["gap"] == gap
    assert "gap" not in await front.get("/v1/events", params={"since": "6"})
    async with stream(front.http, "/v1/events", last="2") as reader:
        first, *rest = await reader.take(5)
        assert (first.event, first.id, first.data) == ("gap", "6", gap)
        assert ids(rest) == [7, 8, 9, 10]
    async with stream(front.http, "/v1/events", last="6") as reader:
        assert ids(await reader.take(4)) == [7, 8, 9, 10]


async def test_a_list_has_no_hole_that_is_not_stated(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention removes what comes next while the list is gathered, page by page."""
    monkeypatch.setattr(events_module, "PAGE", 5)
    await tell(front.host, 20)
    store, calls = front.host.store.events, 0
    after = store.after

    async def pruning(*args: Any) -> Any:
        nonlocal calls
        page = await after(*args)
        calls += 1
        if calls == 1:
            await store.prune(0, 8)
        return page

    monkeypatch.setattr(store, "after", pruning)
    first = await front.get("/v1/events", params={"since": "0", "tail": "100"})
    assert [one["id"] for one in first["events"]] == ["1", "2", "3", "4", "5"]
    rest = await front.get("/v1/events", params={"since": "5", "tail": "100"})
    assert rest["gap"] == {"first_id": "6", "last_id": "12"}
    assert [one["id"] for one in rest["events"]] == [str(number) for number in range(13, 21)]


async def test_retention_by_age(front: Front) -> None:
    store, clock = front.host.store.events, front.host.clock
    await tell(front.host, 3)
    clock.time += 100
    await tell(front.host, 2)
    clock.time -= 500  # a clock that was set back makes no holes
    await tell(front.host, 2)
    assert await store.prune(1_000_050.0, 1000) == 3
    assert [told.seq for told in await journal(front.host)] == [4, 5, 6, 7]


# ------------------------------------------------------------------ readers that come back


@pytest.mark.parametrize("number", range(2))
async def test_readers_that_break_off_anywhere(front: Front, number: int) -> None:
    """Ten at once, each breaking off at random points and coming back: each sees every event once and in order."""
    total, sandboxes = 120, [(await front.host.create()).id for _ in range(2)]

    async def write() -> None:
        for n in range(total):
            await tell(front.host, 1, sandboxes[n % 2], "w" if n % 5 else "foreign")
            await asyncio.sleep(0 if n % 3 else 0.002)

    async def read(which: int) -> list[int]:
        mine = random.Random(number * 100 + which)
        wanted = len([n for n in range(total) if n % 5 and (which % 2 == 0 or n % 2 == 0)]) + (
            4 if which % 2 == 0 else 2
        )
        path = "/v1/events" if which % 2 == 0 else f"/v1/sandboxes/{sandboxes[0]}/events"
        seen: list[int] = []
        while len(seen) < wanted:
            after = str(seen[-1]) if seen else "0"
            async with stream(front.http, path, last=after, since="0") as reader:
                seen += ids(await reader.take(min(mine.randint(1, 30), wanted - len(seen))))
        return seen

    writing = asyncio.ensure_future(write())
    found = await asyncio.gather(*(read(which) for which in range(10)))
    await writing
    everything = [told.seq for told in await journal(front.host)]
    of_one = [told.seq for told in await journal(front.host, sandboxes[0])]
    for which, seen in enumerate(found):
        assert seen == (everything if which % 2 == 0 else of_one)


async def test_it_goes_on_with_the_next_server(front: Front, tmp_path: Path, crew: Crew) -> None:
    await tell(front.host, 5)
    async with stream(front.http, "/v1/events", since="0") as reader:
        last = (await reader.take(3))[-1].id
    other = assemble(tmp_path, front.host.database, front.host.world, crew)
    other.store.events = front.host.store.events
    await tell(other, 2)
    async with stream(front.http, "/v1/events", last=last) as reader:
        assert ids(await reader.take(4)) == [4, 5, 6, 7]


async def test_a_slow_reader_holds_nothing_up(front: Front) -> None:
    """Nothing is read ahead of it: what it has not taken is in the journal alone, and what it takes is whole."""
    reads = 0
    after = front.host.store.events.after

    async def counted(*args: object) -> object:
        nonlocal reads
        reads += 1
        return await after(*args)  # type: ignore[arg-type]

    front.host.store.events.after = counted  # type: ignore[method-assign,assignment]
    big = {"snapshot_id": "x" * 60_000}
    async with stream(front.http, "/v1/events", since="0", tail=0) as reader:
        for _ in range(600):
            await front.host.supervisor.journal.tell("snapshot.created", "w", "abcdefgh12", big)
        stuck = reads
        await asyncio.sleep(0.05)
        assert reads == stuck, "the connection is full, so the source stands still"
        assert ids(await reader.take(600)) == list(range(1, 601))
