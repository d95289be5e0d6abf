"""Webhooks over HTTP, with a real receiver: what arrives, what is tried again, and what is given up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from app_host import FULL, Crew, Host
from events_server import Front, hook, serve, tell
from receiver import Reaction, Receiver, answer, die, drip, hang, huge, listening, nonsense

from cloche_server.app import delivery as delivery_module
from cloche_server.core import webhooks as rules
from cloche_server.host import outbound
from cloche_server.host.outbound import Answer
from cloche_server.store.webhooks import WebhookStore
from kit.fake_engine import settle

pytestmark = pytest.mark.thorough

DAY = 86400.0


@pytest.fixture
async def front(host: Host, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    """Retries take no time, and silence is noticed soon."""
    monkeypatch.setattr(delivery_module, "delay", lambda failures, random: 0.0)
    monkeypatch.setattr(outbound, "TIMEOUT", 1.0)
    async with serve(host, crew, private=True) as front:
        yield front


async def state(front: Front, made: dict[str, Any]) -> dict[str, Any]:
    return dict((await front.get(f"/v1/webhooks/{made['id']}"))["state"])


# ------------------------------------------------------------------ what arrives


async def test_events_arrive_signed_and_in_order(front: Front, receiver: Receiver) -> None:
    await tell(front.host, 3)
    made = await hook(front, receiver.url, description="d")
    record = await front.host.create()
    await front.host.sleep.pause("w", record.id)
    await settle(lambda: len(receiver.got) == 3)
    events = (await front.get("/v1/events", params={"since": "3"}))["events"]
    assert [one.event for one in receiver.got] == events, "what happens from now on, as in the list"
    for one in receiver.got:
        assert one.signed_with(made["secret"])
        assert one.headers["webhook-id"] == f"{made['id']}-{one.event['id']}"
        assert one.headers["webhook-timestamp"] == str(int(front.host.clock.time))
        assert one.headers["content-type"] == "application/json"
    assert not receiver.got[0].signed_with(rules.secret_from_random(b"x" * 32))
    told = await state(front, made)
    assert (told["position"], told["lag"], told["delivered"], told["failures"]) == ("6", 0, 3, 0)
    assert "last_error" not in told


async def test_only_what_was_asked_for(front: Front, receiver: Receiver) -> None:
    first, second = await front.host.create(), await front.host.create()
    await hook(front, receiver.url + "/types", types=["sandbox.paused", "snapshot.*"])
    await hook(front, receiver.url + "/one", sandbox_id=first.id, types=["sandbox.*"])
    for record in (first, second):
        await front.host.sleep.pause("w", record.id)
        await front.host.sleep.resume("w", record.id)
    await tell(front.host, 1, second.id)
    await tell(front.host, 1, second.id, "foreign")
    await settle(lambda: len(receiver.got) == 5)
    by_path = {
        path: [one.event["type"] for one in receiver.got if one.path == path] for path in ("/hook/types", "/hook/one")
    }
    assert by_path["/hook/types"] == ["sandbox.paused", "sandbox.paused", "snapshot.created"]
    assert by_path["/hook/one"] == ["sandbox.paused", "sandbox.resumed"]


async def test_the_secret_is_shown_once_and_in_no_log(
    front: Front, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    made = await hook(front, receiver.url)
    receiver.reactions = [answer(500)]
    await tell(front.host, 1)
    await settle(lambda: len(receiver.got) == 2)
    patched = await front.http.patch(f"/v1/webhooks/{made['id']}", json={"description": "x"})
    tested = await front.http.post(f"/v1/webhooks/{made['id']}/test")
    shown = [patched.text, tested.text, str(await front.get("/v1/webhooks")), "".join(capsys.readouterr())]
    assert made["secret"].startswith("whsec_")
    assert not any(made["secret"][6:] in text for text in shown)
    assert made["secret"] not in repr(front.webhooks.list("w"))


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("reaction", "says"),
    [
        (answer(500), "the receiver answered 500"),
        (answer(404), "the receiver answered 404"),
        (answer(302, location="/elsewhere"), "the receiver answered 302; redirects are not followed"),
        (hang, "the receiver did not answer within 1 s"),
        (die, "the connection ended before the receiver had answered"),
        (nonsense, "the connection ended before the receiver had answered"),
    ],
)
async def test_what_fails_is_told_and_sent_again(
    front: Front, receiver: Receiver, reaction: Reaction, says: str
) -> None:
    reached, told_all = asyncio.Event(), asyncio.Event()

    async def second(writer: asyncio.StreamWriter) -> None:
        reached.set()
        await told_all.wait()
        await answer(200)(writer)

    made = await hook(front, receiver.url)
    receiver.reactions = [reaction, second]
    await tell(front.host, 2)
    async with asyncio.timeout(10):
        await reached.wait()
    told = await state(front, made)
    assert (told["failures"], says in told["last_error"]) == (1, True), told
    assert told["failing_since"] == told["last_attempt_at"] == "1970-01-12T13:46:40.000Z"
    assert (told["position"], told["lag"], told["delivered"]) == ("0", 2, 0)
    told_all.set()
    await settle(lambda: len(receiver.got) == 3)
    assert receiver.ids == [1, 1, 2]
    assert receiver.got[0].headers["webhook-id"] == receiver.got[1].headers["webhook-id"]
    assert [one.path for one in receiver.got] == ["/hook"] * 3, "no redirect was followed"
    async with asyncio.timeout(10):
        while (told := await state(front, made))["delivered"] != 2:
            await asyncio.sleep(0.01)
    assert (told["failures"], told["given_up"]) == (0, 0)
    assert "last_error" not in told


@pytest.mark.parametrize("reaction", [drip, huge])
async def test_an_answer_without_end_is_an_answer(front: Front, receiver: Receiver, reaction: Reaction) -> None:
    made = await hook(front, receiver.url)
    receiver.reactions = [reaction]
    await tell(front.host, 2)
    await settle(lambda: len(receiver.got) == 2)
    assert receiver.ids == [1, 2], "it was accepted, and not sent again"
    async with asyncio.timeout(10):
        while (await state(front, made))["delivered"] != 2:
            await asyncio.sleep(0.01)


async def test_nobody_is_there(front: Front) -> None:
    made = await hook(front, "http://127.0.0.1:9/")
    await tell(front.host, 1)
    async with asyncio.timeout(10):
        while (told := await state(front, made))["failures"] < 2:
            await asyncio.sleep(0.01)
    assert told["last_error"] == "no connection to the receiver could be made"


async def test_a_dead_receiver_delays_no_other(front: Front, receiver: Receiver) -> None:
    async with listening() as dead:
        dead.always = hang
        await hook(front, dead.url)
        await hook(front, receiver.url)
        await tell(front.host, 20)
        await settle(lambda: len(receiver.got) == 20)
        assert receiver.ids == list(range(1, 21))
        assert set(dead.ids) == {1}


async def test_410_disables(front: Front, receiver: Receiver) -> None:
    made = await hook(front, receiver.url)
    receiver.reactions = [answer(410)]
    await tell(front.host, 2)
    async with asyncio.timeout(10):
        while (told := await front.get(f"/v1/webhooks/{made['id']}"))["enabled"]:
            await asyncio.sleep(0.01)
    assert "410" in told["disabled_reason"]
    assert len(receiver.got) == 1
    again = await front.http.patch(f"/v1/webhooks/{made['id']}", json={"enabled": True})
    assert "disabled_reason" not in again.json()
    await settle(lambda: receiver.ids == [1, 1, 2])


async def test_time_in_which_nothing_was_tried_is_no_failure(front: Front, receiver: Receiver) -> None:
    """Disabled by its receiver for days, and enabled again: the event at which that was is tried as any other."""
    made = await hook(front, receiver.url)
    receiver.reactions = [answer(410), answer(503), answer(503)]
    await tell(front.host, 1)
    async with asyncio.timeout(10):
        while (await front.get(f"/v1/webhooks/{made['id']}"))["enabled"]:
            await asyncio.sleep(0.01)
    front.host.clock.time += 3 * DAY
    again = await front.http.patch(f"/v1/webhooks/{made['id']}", json={"enabled": True})
    assert again.json()["state"]["failures"] == 0
    await settle(lambda: len(receiver.got) == 4)
    async with asyncio.timeout(10):
        while (told := await state(front, made))["delivered"] != 1:
            await asyncio.sleep(0.01)
    assert (told["given_up"], told["position"]) == (0, "1")


async def test_given_up_after_a_day_and_the_next_goes_on(front: Front, receiver: Receiver) -> None:
    made = await hook(front, receiver.url)
    clock = front.host.clock

    async def later(writer: asyncio.StreamWriter) -> None:
        clock.time += DAY / 4
        await answer(503)(writer)

    receiver.reactions = [later] * 5
    await tell(front.host, 2)
    await settle(lambda: len(receiver.got) == 6)
    assert receiver.ids == [1] * 5 + [2]
    async with asyncio.timeout(10):
        while (told := await state(front, made))["delivered"] != 1:
            await asyncio.sleep(0.01)
    assert (told["given_up"], told["position"], told["failures"]) == (1, "2", 0)


async def test_what_retention_removed_is_counted(front: Front, receiver: Receiver) -> None:
    made = await hook(front, receiver.url)
    await front.http.patch(f"/v1/webhooks/{made['id']}", json={"enabled": False})
    await tell(front.host, 10)
    await front.host.store.events.prune(0, 3)
    assert (await state(front, made))["lag"] == 3
    await front.http.patch(f"/v1/webhooks/{made['id']}", json={"enabled": True})
    await settle(lambda: len(receiver.got) == 3)
    assert receiver.ids == [8, 9, 10]
    assert (await state(front, made))["missed"] == 7


# ------------------------------------------------------------------ ends of the server


async def test_a_server_that_ends_between_the_answer_and_the_record(
    host: Host, crew: Crew, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least once: the event whose acceptance was not recorded comes again, under its id, and none is left out."""
    async with serve(host, crew, private=True) as front:
        made = await hook(front, receiver.url)
        await tell(host, 2)
        await settle(lambda: len(receiver.got) == 2)
        async with asyncio.timeout(10):
            while (await state(front, made))["delivered"] != 2:
                await asyncio.sleep(0.01)
        reached = asyncio.Event()

        async def killed(*_: object) -> None:
            reached.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(WebhookStore, "update", killed)
        await tell(host, 2)
        await reached.wait()
        assert receiver.ids == [1, 2, 3]
    monkeypatch.undo()
    async with serve(host, crew, private=True) as front:
        await settle(lambda: len(receiver.got) == 5)
        assert receiver.ids == [1, 2, 3, 3, 4]
        ids = [one.headers["webhook-id"] for one in receiver.got]
        assert ids[2] == ids[3]
        assert all(one.signed_with(made["secret"]) for one in receiver.got)


async def test_a_full_disk_stops_nothing(front: Front, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await hook(front, receiver.url)
    update = WebhookStore.update

    async def full(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(WebhookStore, "update", full)
    await tell(front.host, 3)
    await settle(lambda: len(receiver.got) == 3)
    monkeypatch.setattr(WebhookStore, "update", update)
    await tell(front.host, 1)
    await settle(lambda: receiver.ids == [1, 2, 3, 4])
    async with asyncio.timeout(10):
        while (await WebhookStore(front.host.database).all())[0].delivered != 4:
            await asyncio.sleep(0.01)
    assert (await state(front, made))["position"] == "4"


async def test_positions_past_events_of_others_are_stored_now_and_then(
    front: Front, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "STORE_AFTER", 10)
    await hook(front, receiver.url, types=["sandbox.paused"])
    await tell(front.host, 25)
    store = WebhookStore(front.host.database)
    async with asyncio.timeout(10):
        while not 15 < (await store.all())[0].position <= 25:
            await asyncio.sleep(0.01)
    assert receiver.got == []


async def test_what_nobody_has_foreseen_ends_no_other(host: Host, crew: Crew) -> None:
    calls = itertools.count()

    class Broken:
        async def post(self, *_: object) -> Answer:
            next(calls)
            raise RuntimeError("as the test wants")

        async def aclose(self) -> None:
            return None

    async with serve(host, crew, private=True, sender=Broken) as front:
        made = await hook(front, "http://127.0.0.1:9/")
        await tell(host, 1)
        await settle(lambda: next(calls) > 0)
        assert (await state(front, made))["delivered"] == 0


# ------------------------------------------------------------------ calls


async def test_a_test_says_what_the_receiver_said(front: Front, receiver: Receiver) -> None:
    made = await hook(front, receiver.url)
    path = f"/v1/webhooks/{made['id']}/test"
    receiver.reactions = [answer(200, b"welcome"), answer(418, b"teapot"), die]
    first, second, third = [(await front.http.post(path)).json() for _ in range(3)]
    assert (first["delivered"], first["status"], first["body"]) == (True, 200, "welcome")
    assert (second["delivered"], second["status"], second["body"]) == (False, 418, "teapot")
    assert second["error"] == "the receiver answered 418"
    assert "connection ended" in third["error"]
    assert "status" not in third
    got = receiver.got[0]
    assert (got.event["type"], got.event["payload"]) == ("webhook.test", {"webhook_id": made["id"]})
    assert got.signed_with(made["secret"])
    assert (await state(front, made))["delivered"] == 0
    assert (await front.get("/v1/events"))["events"] == []


async def test_change_and_delete(front: Front, receiver: Receiver) -> None:
    made = await hook(front, receiver.url, types=["sandbox.paused", "sandbox.paused"])
    path = f"/v1/webhooks/{made['id']}"
    assert made["types"] == ["sandbox.paused"]
    patched = (await front.http.patch(path, json={"types": [], "url": receiver.url + "/2", "description": "d"})).json()
    assert (patched["types"], patched["url"], patched["description"]) == ([], receiver.url + "/2", "d")
    await tell(front.host, 1)
    await settle(lambda: len(receiver.got) == 1)
    assert receiver.got[0].path == "/hook/2"
    assert (await front.http.delete(path)).status_code == 204
    for call in (front.http.get(path), front.http.delete(path), front.http.post(path + "/test")):
        response = await call
        assert (response.status_code, response.json()["code"]) == (404, "webhook.not_found")
    await tell(front.host, 1)
    assert (await front.get("/v1/webhooks"))["webhooks"] == []
    assert len(receiver.got) == 1


async def test_foreign_ones_do_not_exist(front: Front, receiver: Receiver) -> None:
    made = await hook(front, receiver.url)
    record = await front.host.create()
    path = f"/v1/webhooks/{made['id']}"
    assert (await front.other.get("/v1/webhooks")).json() == {"webhooks": []}
    for call in (
        front.other.get(path),
        front.other.delete(path),
        front.other.patch(path, json={}),
        front.other.post(path + "/test"),
        front.other.post("/v1/webhooks", json={"url": receiver.url, "sandbox_id": record.id}),
    ):
        assert (await call).status_code == 404


async def test_there_is_a_limit(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche_server.app.webhooks.MAX_PER_WORKSPACE", 2)
    for _ in range(2):
        await hook(front, "http://127.0.0.1:9/")
    response = await front.http.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/"})
    assert (response.status_code, response.json()["code"]) == (409, "webhook.too_many")
    assert (await front.other.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/"})).status_code == 201


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "url"),
        ({"url": "ftp://x/"}, "must begin with http:// or https://"),
        ({"url": "https://"}, "name a host"),
        ({"url": "https://user:pass@x/"}, "user or a password"),
        ({"url": "https://x/#top"}, "fragment"),
        ({"url": "https://x:99999/"}, "cannot be understood"),
        ({"url": "https://exämple.com/"}, "ASCII"),
        ({"url": "https://x/a b"}, "ASCII"),
        ({"url": "https://x/" + "a" * 3000}, "2048"),
        ({"url": "https://x/", "types": ["sandbox.dreamt"]}, "no such type"),
        ({"url": "https://x/", "types": "sandbox.paused"}, "list"),
    ],
)
async def test_bad_bodies(front: Front, body: dict[str, Any], says: str) -> None:
    response = await front.http.post("/v1/webhooks", json=body)
    assert response.status_code == 400
    assert says in response.json()["error"]
    assert (await front.get("/v1/webhooks"))["webhooks"] == []
