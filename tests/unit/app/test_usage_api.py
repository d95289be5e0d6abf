"""Usage, budgets and lifetimes as the API shows them, over a host in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_host import Crew, Host, assemble
from app_states import status
from services_kit import services_on

from cloche_server.api.app import build_app
from cloche_server.app.exec import Execs
from cloche_server.app.filelinks import FileLinks
from cloche_server.app.files import Files
from cloche_server.app.filetools import FileTools
from cloche_server.app.git import Git
from cloche_server.app.lifecycle import Status
from cloche_server.app.names import NamedCreates
from cloche_server.app.tokens import Tokens
from cloche_server.store.db import Database
from cloche_server.store.tokens import TokenStore
from kit.fake_engine import World, settle

PRICES = {"price_cpu_hour": 3.6, "price_memory_gib_hour": 0.0144, "price_currency": "EUR"}


@pytest.fixture
def host(request: pytest.FixtureRequest, tmp_path: Path, database: Database, world: World, crew: Crew) -> Host:
    """A parameter is a dict of other settings."""
    changes = {"max_lifetime_seconds": 1000, **PRICES, **getattr(request, "param", {})}
    return assemble(tmp_path, database, world, crew, **changes)


@pytest.fixture
async def api(host: Host, tmp_path: Path, database: Database) -> AsyncIterator[httpx.AsyncClient]:
    tokens = TokenStore(database)

    services = services_on(
        host,
        creates=NamedCreates(host.creates, host.access, host.lifecycle),
        execs=Execs(host.access),
        files=Files(host.access),
        file_tools=FileTools(host.access),
        file_links=FileLinks(host.access, host.clock, b"k" * 32),
        git=Git(host.access, Execs(host.access)),
        tokens=Tokens(tokens, host.clock),
    )
    services.ready.set()
    token = await tokens.create("test", "w", bytes(16), 1.0)
    transport = httpx.ASGITransport(build_app(services))
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test/v1", headers=headers) as client:
        yield client


async def made(api: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await api.post("/sandboxes", json=body)
    assert response.status_code == 201, response.text
    return dict(response.json())


async def test_usage_with_costs(api: httpx.AsyncClient, host: Host) -> None:
    box = await made(api, metadata={"team": "a"})
    host.world.alive[box["id"]].cpu_seconds = 2.0004
    host.clock.time += 100
    told = (await api.get(f"/sandboxes/{box['id']}/usage")).json()
    assert told["wall_seconds"] == {"creating": 0, "running": 100}
    assert (told["cpu_seconds"], told["memory_provisioned_mib_seconds"]) == (2.0, 25600)
    assert told["cost"] == {"currency": "EUR", "cpu": 0.0020004, "memory": 0.0001, "disk": 0.0, "total": 0.0021004}
    assert (told["status"], told["starts"], "ended_at" in told) == ("running", 1, False)
    assert (await api.delete(f"/sandboxes/{box['id']}")).status_code == 204
    ended = (await api.get(f"/sandboxes/{box['id']}/usage")).json()
    assert (ended["status"], ended["cpu_seconds"]) == ("deleted", 2.0)
    assert ended["ended_at"] > ended["created_at"]
    for query, count, groups in (
        ({}, 1, 0),
        ({"group_by": "team"}, 1, 1),
        ({"since": "1970-01-12T13:48:20Z"}, 1, 0),
        ({"since": "1970-01-12T15:00:00+01:00"}, 0, 0),
        ({"until": "1970-01-01T00:00:00Z"}, 0, 0),
        ({"sandbox_id": "nope"}, 0, 0),
    ):
        answer = (await api.get("/usage", params=query)).json()
        assert (answer["count"], len(answer["groups"])) == (count, groups), query
    for bad in ({"since": "yesterday"}, {"until": "2030-01-01T00:00:00"}, {"group_by": "secret.x"}, {"group_by": ""}):
        response = await api.get("/usage", params=bad)
        assert (response.status_code, response.json()["code"]) == (400, "request.invalid"), bad
        assert next(iter(bad)) in response.text


async def test_a_budget_from_its_beginning_to_its_end(api: httpx.AsyncClient, host: Host) -> None:
    box = await made(api, budget={"cpu_seconds": 10, "grace_seconds": 30})
    path = f"/sandboxes/{box['id']}"
    told = (await api.get(f"{path}/budget")).json()
    assert (told["status"], told["cpu_seconds"], told["left"], told["sandboxes"]) == (
        "ok", 10, {"cpu_seconds": 10}, [box["id"]],
    )  # fmt: skip
    assert told["used"] == {"cpu_seconds": 0, "wall_seconds": 0, "exec_count": 0, "bytes_out": 0}
    assert "exceeded_at" not in told
    host.world.alive[box["id"]].cpu_seconds = 11
    host.budgets.look()
    await settle(lambda: status(host, box["id"]) is Status.PAUSED)
    assert (await api.get(path)).json()["status_reason"] == "budget"
    for verb, body in (("exec", {"cmd": "true"}), ("resume", {}), ("fork", {})):
        response = await api.post(f"{path}/{verb}", json=body)
        assert (response.status_code, response.json()["code"]) == (402, "budget.exceeded"), verb
        assert response.json()["details"]["limit"] == "cpu_seconds"
        assert response.json()["action"]
    told = (await api.get(f"{path}/budget")).json()
    assert (told["status"], told["exceeded_by"], told["left"]) == ("exceeded", "cpu_seconds", {"cpu_seconds": 0})
    assert told["deletes_at"] > told["exceeded_at"]
    raised = await api.put(f"{path}/budget", json={"cpu_seconds": 20, "exec_count": 5})
    assert (raised.status_code, raised.json()["status"]) == (200, "ok")
    assert raised.json()["left"] == {"cpu_seconds": 9, "exec_count": 5}
    assert (await api.post(f"{path}/resume")).status_code == 204
    for _ in range(2):
        assert (await api.delete(f"{path}/budget")).status_code == 204
    gone = await api.get(f"{path}/budget")
    assert (gone.status_code, gone.json()["code"]) == (404, "budget.not_found")


@pytest.mark.parametrize(
    "budget",
    [
        {}, {"warn_at": 0.5}, {"cpu_seconds": 0}, {"cpu_seconds": -1}, {"exec_count": 1.5}, {"exec_count": 0},
        {"cpu_seconds": 1, "warn_at": 0}, {"cpu_seconds": 1, "warn_at": 1.1}, {"cpu_seconds": 1, "grace_seconds": -1},
        {"cpu_seconds": "1"}, 5,
    ],
)  # fmt: skip
async def test_budgets_that_are_none(api: httpx.AsyncClient, host: Host, budget: Any) -> None:
    response = await api.post("/sandboxes", json={"budget": budget})
    assert (response.status_code, response.json()["code"]) == (400, "request.invalid")
    assert await host.rows() == []


async def test_null_is_absent_and_whole_numbers_are_whole(api: httpx.AsyncClient) -> None:
    budget = {"exec_count": 5.0, "cpu_seconds": None, "warn_at": None, "grace_seconds": None, "later": 1}
    box = await made(api, budget=budget)
    told = (await api.get(f"/sandboxes/{box['id']}/budget")).json()
    assert (told["left"], told["warn_at"], told["grace_seconds"]) == ({"exec_count": 5}, 0.8, 60)
    assert (await made(api, budget=None))["status"] == "running"


async def test_lifetimes_and_names_of_forks(api: httpx.AsyncClient, host: Host) -> None:
    box = await made(api, persistent=True)
    assert (box["max_lifetime_seconds"], "expires_at" in box) == (0, False)
    assert box["ends_at"] == (await api.get(f"/sandboxes/{box['id']}/lifecycle")).json()["ends_at"]
    refused = await api.post("/sandboxes", json={"max_lifetime_seconds": 1001})
    assert (refused.status_code, refused.json()["details"]) == (
        400, {"field": "max_lifetime_seconds", "maximum": 1000},
    )  # fmt: skip
    path = f"/sandboxes/{box['id']}"
    child = await api.post(f"{path}/fork", json={"name": "child", "max_lifetime_seconds": 10})
    assert (child.status_code, child.json()["name"]) == (201, "child")
    assert child.json()["ends_at"] < box["ends_at"]
    taken = await api.post(f"{path}/fork", json={"name": "child"})
    assert (taken.status_code, taken.json()["code"]) == (409, "sandbox.name_taken")
    two = await api.post(f"{path}/fork-tree", json={"name": "two"})
    assert (two.status_code, two.json()["details"]["field"]) == (400, "name")
    split = await api.post(f"{path}/fork", json={"budget": "split"})
    assert (split.status_code, split.json()["details"]["field"]) == (400, "budget")


@pytest.mark.parametrize("host", [{"max_ttl_seconds": 100, "max_lifetime_seconds": 0}], indirect=True)
async def test_nothing_goes_beyond_the_longest_ttl(api: httpx.AsyncClient, host: Host) -> None:
    """By no route, and not because the default is longer."""
    box = await made(api)
    assert box["ttl_seconds"] == 100
    path = f"/sandboxes/{box['id']}"
    for options in ({"persistent": True}, {"ttl_seconds": 0}, {"ttl_seconds": 101}):
        for method, where in (
            ("POST", "/sandboxes"),
            ("PATCH", path),
            ("PATCH", f"{path}/lifecycle"),
            ("POST", f"{path}/fork"),
            ("POST", f"{path}/fork-tree"),
        ):
            told = await api.request(method, where, json=options)
            assert told.status_code == 400, (method, where, options, told.text)
            assert told.json()["details"]["field"] == next(iter(options))
    assert len(host.supervisor.entries()) == 1
    assert host.access.list("w")[0].expires_at is not None
