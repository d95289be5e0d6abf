"""Events and webhooks."""

from __future__ import annotations

import pytest
from cloche_fake import FakeCloche, faults

from cloche import (
    AsyncClient,
    AsyncSandbox,
    ConflictError,
    ConnectionLost,
    EventGap,
    NotFoundError,
    SandboxEvent,
)


def _fill(fake: FakeCloche, count: int) -> None:
    for number in range(count):
        fake.events.happen("sandbox.paused", reason="asked", number=number)


async def test_the_events_of_a_sandbox(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    _fill(fake, 3)
    fake.events.happen("sandbox.resumed")
    fake.events.happen("sandbox.paused", "another")
    found = await sandbox.events(tail=2, types="sandbox.paused")
    assert [event.payload["number"] for event in found] == [1, 2]
    assert (found[0].sandbox_id, found[0].type, found[0].id) == (sandbox.id, "sandbox.paused", "2")
    assert found[0].time is not None
    assert len(await sandbox.events()) == 4


async def test_what_there_is_now(fake: FakeCloche) -> None:
    _fill(fake, 600)
    async with AsyncClient() as client:
        stream = client.events(tail=2)
        assert [event.id async for event in stream if isinstance(event, SandboxEvent)] == ["599", "600"]
        assert stream.position == "600"
        stream = client.events(since="10")
        assert [event.id async for event in stream if isinstance(event, SandboxEvent)] == [
            str(number) for number in range(11, 601)
        ]
        assert [request.query.get("since") for request in fake.requests[1:]] == ["10", "510", "600"]


async def test_a_stream_that_breaks_off_goes_on_where_it_broke(fake: FakeCloche) -> None:
    _fill(fake, 20)
    fake.events.happen("sandbox.deleted")
    fake.events.breaks = 6
    async with AsyncClient() as client:
        async with client.events(follow=True, since="0", sandbox_id="sb1") as stream:
            seen = [event.id async for event in stream if isinstance(event, SandboxEvent)]
        assert seen == [str(number) for number in range(1, 22)], "each once, and then the end"
        assert [request.query["since"] for request in fake.requests] == ["0", "6", "12", "18"]


async def test_without_a_position_it_begins_where_the_server_began(fake: FakeCloche) -> None:
    """A connection that breaks before the first event loses none."""
    _fill(fake, 5)
    async with AsyncClient() as client:
        stream = client.events(follow=True, tail=2)
        async for event in stream:
            assert isinstance(event, SandboxEvent)
            if event.id == "5":
                break
        await stream.aclose()
        assert stream.position == "5"


async def test_a_gap_is_told(fake: FakeCloche) -> None:
    body = b'id: 9\nevent: gap\ndata: {"first_id": "3", "last_id": "9"}\n\nevent: end\ndata: {}\n\n'
    fake.on("GET", "/events", faults.answer(200, body, kind="text/event-stream"))
    async with AsyncClient() as client:
        stream = client.events(follow=True, since="2")
        assert [event async for event in stream] == [EventGap("3", "9")]
        assert stream.position == "9"


async def test_a_server_that_is_gone_for_good(fake: FakeCloche, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche._async.events.RESUME_DELAYS", (0.0, 0.0))
    fake.on("GET", "/events", faults.abort, times=100)
    async with AsyncClient() as client:
        with pytest.raises(ConnectionLost):
            await anext(client.events(follow=True))


async def test_webhooks(fake: FakeCloche) -> None:
    async with AsyncClient() as client:
        made = await client.webhooks.create("https://x/", "sandbox.*", description="d")
        assert fake.bodies[-1] == {"url": "https://x/", "types": ["sandbox.*"], "description": "d"}
        assert (made.secret, made.types, made.lag) == ("whsec_c2VjcmV0", ("sandbox.*",), 2)
        assert "whsec" not in repr(made)
        assert "secret" not in made.raw
        assert [one.id for one in await client.webhooks.list()] == [made.id]
        assert (await client.webhooks.get(made.id)).secret is None
        assert not (await client.webhooks.update(made.id, enabled=False, types=[])).enabled
        assert fake.bodies[-1] == {"enabled": False, "types": []}
        tested = await client.webhooks.test(made.id)
        assert (tested.delivered, tested.status, tested.error) == (False, 500, "it answered 500")
        await client.webhooks.delete(made.id)
        with pytest.raises(NotFoundError):
            await client.webhooks.get(made.id)
        fake.on("POST", "/webhooks", faults.error(409, "webhook.too_many", "there are 50"))
        with pytest.raises(ConflictError, match="50"):
            await client.webhooks.create("https://x/")
