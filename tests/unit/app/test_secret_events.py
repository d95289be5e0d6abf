"""What happens to secrets, and with them, is told to streams and webhooks; the values are not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from app_host import Crew, Host
from events_server import Front, serve

from cloche_server.app.violations import Violations

VALUE = "marker-5d21-value"


@pytest.fixture
async def front(host: Host, crew: Crew) -> AsyncIterator[Front]:
    async with serve(host, crew) as front:
        yield front


async def told(front: Front, path: str = "/v1/events?type=secret.*") -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = (await front.get(path))["events"]
    return events


async def test_a_secret_that_comes_changes_and_goes_is_told_without_its_value(front: Front) -> None:
    for number in (1, 2):
        body = {"value": f"{VALUE}{number}", "description": "not told either"}
        assert (await front.http.put("/v1/secrets/KEY", json=body)).is_success
    assert (await front.http.delete("/v1/secrets/KEY")).status_code == 204
    assert (await front.http.delete("/v1/secrets/KEY")).status_code == 404
    events = await told(front)
    assert [(one["type"], one["payload"]) for one in events] == [
        ("secret.created", {"name": "KEY", "version": 1}),
        ("secret.rotated", {"name": "KEY", "version": 2}),
        ("secret.deleted", {"name": "KEY"}),
    ]
    assert all("sandbox_id" not in one for one in events)
    assert VALUE not in json.dumps(events)
    assert (await front.other.get("/v1/events")).json()["events"] == []


async def test_a_violation_is_told_of_its_sandbox(front: Front, host: Host) -> None:
    sandbox = await host.create()
    network: Any = host.machines.network
    network.violated.append(
        {"sandbox": sandbox.id, "workspace": "w", "secret": "KEY", "host": "evil.test", "method": "GET", "count": 3,
         "at": 1.0}
    )  # fmt: skip
    watch = asyncio.ensure_future(Violations(network, host.supervisor.journal).run())
    try:
        async with asyncio.timeout(20):
            while not (events := await told(front, f"/v1/sandboxes/{sandbox.id}/events?type=secret.violation")):
                await asyncio.sleep(0.02)
    finally:
        watch.cancel()
        await asyncio.wait({watch})
    assert [one["payload"] for one in events] == [{"secret": "KEY", "host": "evil.test", "method": "GET", "count": 3}]
    assert events[0]["sandbox_id"] == sandbox.id
