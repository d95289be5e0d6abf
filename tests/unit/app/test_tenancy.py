"""What one workspace learns of another, on every route there is: nothing. And what scopes and tokens of one sandbox
may do: what the OpenAPI document says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from access_site import (
    PUBLIC_KEY,
    AccessSite,
    Operation,
    TalkingGuest,
    answer,
    build,
    call,
    operations,
    unknown_like,
)
from app_host import Crew, Host, settings
from archive_site import Site

from cloche_server.app import machines as machines_module
from cloche_server.core.scopes import Scope

OPERATIONS = operations()
IDS = [one.id for one in OPERATIONS]
KINDS = ["sandboxes", "snapshots", "webhooks", "templates", "tokens", "secrets", "run", "ssh-keys"]
NOT_FOUND = {f"{kind.removesuffix('s').replace('sandboxe', 'sandbox').replace('-', '')}.not_found" for kind in KINDS}
#: These make what they name, of the workspace that asks.
MAKE = {"secrets_put"}
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("quick_disk")]


@pytest.fixture
async def front(host: Host, crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AccessSite]:
    monkeypatch.setattr(machines_module, "GuestClient", TalkingGuest)
    templates = Site(tmp_path / "t", host.world)
    async with build(host, crew, templates, settings(tmp_path)) as site:
        yield site


def _about(kind: str) -> list[Operation]:
    return [one for one in OPERATIONS if one.kind == kind and one.id not in MAKE]


# ------------------------------------------------------------------ other workspaces


def test_every_kind_of_object_is_walked() -> None:
    """A new collection needs one of its objects in `furnish`."""
    kinds = {one.kind for one in OPERATIONS} - {""}
    assert kinds == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_foreign_does_not_exist(front: AccessSite, kind: str) -> None:
    """On every operation, what belongs to somebody else, what has ended there and what never was give one answer."""
    before, touched = front.state("w"), front.touched()
    theirs, gone = front.own.ids[kind], front.own.gone[kind]
    assert len(_about(kind)) > 0
    for operation in _about(kind):
        answers = [
            answer(await call(front.other.client, operation, one), one) for one in (theirs, gone, unknown_like(theirs))
        ]
        assert answers[0] == answers[1] == answers[2], operation
        status, body, _ = answers[0]
        assert status == (501 if operation.id.startswith("later_") else 404), (operation, body)
        assert "ID" not in body.replace('"ID', "").replace("ID ", "") or kind == "sandboxes", (operation, body)
    assert front.touched() == touched, "a guest or a machine of the other workspace was asked for something"
    assert front.state("w") == before


async def test_what_is_ones_own_exists(front: AccessSite) -> None:
    """The same calls on one's own objects: the walk above does not pass because nothing is ever found."""
    extra = {"tree_id": "t" * 20, "snapshot_id": front.own.ids["snapshots"]}
    for operation in sorted(OPERATIONS, key=lambda one: (one.method == "DELETE") + (one.id == "sandboxes_delete")):
        if operation.kind:
            response = await call(front.own.client, operation, front.own.ids[operation.kind], **extra)
            code = response.json()["code"] if response.status_code >= 400 else ""
            assert code not in NOT_FOUND | {"internal"}, (operation, response.text)


async def test_what_is_made_under_a_foreign_name_is_ones_own(front: AccessSite) -> None:
    name = front.own.ids["secrets"]
    assert (await front.other.client.put(f"/v1/secrets/{name}", json={"value": "other"})).status_code == 201
    assert (await front.own.client.get(f"/v1/secrets/{name}")).json()["version"] == 1
    assert (await front.other.client.delete(f"/v1/secrets/{name}")).status_code == 204
    assert (await front.own.client.get(f"/v1/secrets/{name}")).status_code == 200


async def test_lists_filters_and_cursors(front: AccessSite) -> None:
    """With every filter and cursor of the other workspace: as if there were nothing."""
    theirs, get = front.own.ids, front.other.client.get
    mine = front.other.ids
    nobody = unknown_like(theirs["sandboxes"])
    assert [one["id"] for one in (await get("/v1/sandboxes")).json()] == [mine["sandboxes"]]
    assert (await get("/v1/sandboxes?name=box-w")).json() == []
    assert (await get("/v1/sandboxes?metadata.of=w")).json() == []
    assert [one["id"] for one in (await get("/v1/snapshots")).json()["snapshots"]] == [mine["snapshots"]]
    assert [one["id"] for one in (await get("/v1/webhooks")).json()["webhooks"]] == [mine["webhooks"]]
    assert "made-by-w" not in {one["name"] for one in (await get("/v1/templates")).json()}
    assert "made-by-w" not in str((await get("/v1/secrets")).json())
    tokens = {one["prefix"] for one in (await get("/v1/tokens")).json()["tokens"]}
    assert tokens == {front.other.info.prefix, mine["tokens"]}
    assert [one["id"] for one in (await get("/v1/ssh-keys")).json()["keys"]] == [mine["ssh-keys"]]
    for query in ("sandboxes?after=", "snapshots?sandbox_id=", "events?sandbox_id=", "events?follow=1&sandbox_id=",
                  "usage?sandbox_id="):  # fmt: skip
        found = [answer(await get(f"/v1/{query}{one}"), one) for one in (theirs["sandboxes"], nobody)]
        assert found[0] == found[1], query
    events = (await get("/v1/events?since=0&tail=1000")).json()["events"]
    foreign = (await front.own.client.get("/v1/events?since=0&tail=1000")).json()["events"]
    sandboxes = [{one.get("sandbox_id") for one in of} - {None} for of in (events, foreign)]
    assert sandboxes[0] >= {mine["sandboxes"], front.other.gone["sandboxes"]}
    assert sandboxes[1] >= {theirs["sandboxes"], front.own.gone["sandboxes"]}
    assert not sandboxes[0] & sandboxes[1]
    assert not {one["id"] for one in events} & {one["id"] for one in foreign}
    newest = foreign[-1]["id"]
    assert (await get(f"/v1/events?since={int(newest) - 1}&sandbox_id={mine['sandboxes']}")).json()["events"] != [
        newest
    ]
    used = (await get("/v1/usage")).json()
    assert used["workspace"] == "x"
    assert theirs["sandboxes"] not in str(used)


async def test_names_in_bodies(front: AccessSite) -> None:
    """Ids of the other workspace in requests about one's own things."""
    theirs, mine, post = front.own.ids, front.other.ids, front.other.client.post
    before, touched = front.state("w"), len(front.touched())
    box = mine["sandboxes"]
    for path, field, kind in (
        ("sandboxes", "from_snapshot", "snapshots"),
        ("sandboxes", "template", "templates"),
        (f"sandboxes/{box}/restore", "snapshot_id", "snapshots"),
        ("webhooks", "sandbox_id", "sandboxes"),
        ("tokens", "sandbox_id", "sandboxes"),
        ("ssh-keys", "sandbox_id", "sandboxes"),
    ):
        answers = []
        for one in (theirs[kind], unknown_like(theirs[kind])):
            response = await post(f"/v1/{path}", json={**BODY_OF.get(path, {}), field: one})
            answers.append(answer(response, one))
        assert answers[0] == answers[1], (path, field)
        assert answers[0][0] == 404, answers[0]
    assert front.state("w") == before
    assert len(front.touched()) == touched


BODY_OF: dict[str, dict[str, Any]] = {
    "webhooks": {"url": "http://127.0.0.1:1/"},
    "tokens": {"scope": "read"},
    "ssh-keys": {"public_key": PUBLIC_KEY},
}


async def test_names_and_keys_are_those_of_a_workspace(front: AccessSite) -> None:
    made = []
    for who in (front.own, front.other):
        response = await who.client.post(
            "/v1/sandboxes", json={"name": "same", "if_exists": "connect"}, headers={"Idempotency-Key": "k"}
        )
        assert response.status_code == 201
        made.append(response.json()["id"])
    assert made[0] != made[1]
    taken = await front.other.client.post("/v1/sandboxes", json={"name": "box-w"})
    assert taken.status_code == 201, "a name of another workspace is free"


async def test_a_family_of_another_workspace_is_not_cleaned_up(front: AccessSite) -> None:
    parent = front.own.ids["sandboxes"]
    tree = (await front.own.client.post(f"/v1/sandboxes/{parent}/fork-tree", json={"count": 2})).json()
    before = front.state("w")
    await front.other.client.post(
        f"/v1/sandboxes/{front.other.ids['sandboxes']}/promote",
        json={"tree_id": tree["tree_id"], "cleanup_siblings": True},
    )
    assert front.state("w") == before


# ------------------------------------------------------------------ scopes


@pytest.mark.parametrize("scope", list(Scope))
async def test_every_operation_asks_for_its_scope(front: AccessSite, scope: Scope) -> None:
    text, _ = await front.token("x", scope=scope)
    touched = len(front.touched())
    async with front.client(text) as client:
        for operation in OPERATIONS:
            one = unknown_like(front.own.ids.get(operation.kind, "z" * 20))
            response = await call(client, operation, one)
            if scope.holds(Scope(operation.scope)):
                assert response.status_code != 403 or response.json()["code"] != "auth.forbidden", operation
                continue
            assert response.status_code == 403, operation
            told = response.json()
            assert (told["code"], told["details"]) == (
                "auth.forbidden",
                {"scope": operation.scope, "has": scope.value},
            )
    if scope is Scope.READ:
        assert len(front.touched()) == touched


async def test_reading_wakes_and_asks_nobody(front: AccessSite) -> None:
    text, _ = await front.token("w", scope=Scope.READ)
    mine = front.own.ids
    assert (await front.own.client.post(f"/v1/sandboxes/{mine['sandboxes']}/hibernate")).status_code == 200
    before, touched = front.state("w"), front.touched()
    async with front.client(text) as client:
        for operation in OPERATIONS:
            if operation.scope == "read" and not operation.id.startswith("later_"):
                query = "&timeout=0" if operation.id.endswith("_wait") else ""
                one = mine.get(operation.kind, "")
                response = await client.request(operation.method, operation.target(one) + query)
                expected = {404} if operation.id == "usage_get_budget" else {200}
                if operation.id.startswith("network_"):
                    expected = {200, 409}  # of one that sleeps some is not known, and nobody is woken for it
                assert response.status_code in expected, (operation, response.text)
    assert front.touched() == touched
    assert front.state("w") == before


def test_what_reads_is_a_get_and_what_is_not_asked_for_is_closed() -> None:
    from cloche_server.api.scopes import CLOSED, NEEDS, need_of

    assert {one.method for one in OPERATIONS if one.scope == "read"} == {"GET"}
    # HEAD is not walked: it is the route of a read, without a body to compare.
    assert set(NEEDS) - {"files_head"} == set(IDS), "every operation has a row, and every row an operation"
    assert need_of("new_operation") is CLOSED
    assert (CLOSED.scope, CLOSED.reach.value) == (Scope.ADMIN, "workspace")


# ------------------------------------------------------------------ tokens of one sandbox


async def test_a_token_of_one_sandbox_sees_no_other(front: AccessSite) -> None:
    """Another one of its own workspace is to it what one is that nobody has."""
    mine = front.own.ids["sandboxes"]
    other = (await front.own.client.post("/v1/sandboxes", json={"metadata": {"of": "w"}})).json()["id"]
    taken = (await front.own.client.post(f"/v1/sandboxes/{other}/snapshots")).json()["id"]
    text, _ = await front.token("w", sandbox_id=mine)
    before, touched = front.state("w"), front.touched()
    async with front.client(text) as client:
        for operation in OPERATIONS:
            if operation.kind not in {"sandboxes", "snapshots"}:
                continue
            known = other if operation.kind == "sandboxes" else taken
            answers = [answer(await call(client, operation, one), one) for one in (known, unknown_like(known))]
            assert answers[0] == answers[1], operation
            assert answers[0][0] == (403 if operation.reach == "workspace" else 404), (operation, answers[0])
        assert front.touched() == touched
        assert front.state("w") == before
        assert [one["id"] for one in (await client.get("/v1/sandboxes")).json()] == [mine]
        for query in ("snapshots?sandbox_id=", "events?sandbox_id=", "usage?sandbox_id=", "sandboxes?after="):
            found = [answer(await client.get(f"/v1/{query}{one}"), one) for one in (other, unknown_like(other))]
            assert found[0] == found[1], query
        assert {one["sandbox_id"] for one in (await client.get("/v1/snapshots")).json()["snapshots"]} == {mine}
        assert {one["sandbox_id"] for one in (await client.get("/v1/events?since=0")).json()["events"]} == {mine}
        assert (await client.get("/v1/usage")).json()["count"] == 1
        restored = [
            answer(await client.post(f"/v1/sandboxes/{mine}/restore", json={"snapshot_id": one}), one)
            for one in (taken, unknown_like(taken))
        ]
        assert restored[0] == restored[1]
        assert restored[0][0] == 404


async def test_a_token_of_one_sandbox_uses_it(front: AccessSite) -> None:
    mine = front.own.ids["sandboxes"]
    text, _ = await front.token("w", sandbox_id=mine, scope=Scope.EXEC)
    async with front.client(text) as client:
        assert (await client.get("/v1/me")).json()["sandbox_id"] == mine
        assert (await client.get(f"/v1/sandboxes/{mine}")).json()["id"] == mine
        ran = await client.post(f"/v1/sandboxes/{mine}/exec", json={"cmd": "id"})
        assert ran.json()["code"] == "guest.error", "it has reached the guest"
        assert (await client.post(f"/v1/sandboxes/{mine}/pause")).status_code == 204
        assert (await client.post(f"/v1/sandboxes/{mine}/resume")).status_code == 204
        taken = await client.post(f"/v1/sandboxes/{mine}/snapshots")
        assert (await client.get(f"/v1/snapshots/{taken.json()['id']}")).status_code == 200
        for path in ("sandboxes", f"sandboxes/{mine}/fork", f"snapshots/{taken.json()['id']}/promote"):
            refused = await client.post(f"/v1/{path}", json={"name": "n"})
            assert (refused.status_code, refused.json()["code"]) == (403, "auth.forbidden")
