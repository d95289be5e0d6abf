"""A boundary that a caller asks for is kept, or there is no sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from access_site import AccessSite, build
from app_host import Crew, Host, settings
from archive_site import Site

from cloche_server.core.records import Isolation

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
async def front(host: Host, crew: Crew, tmp_path: Path) -> AsyncIterator[AccessSite]:
    async with build(host, crew, Site(tmp_path / "t", host.world), settings(tmp_path)) as site:
        yield site


@pytest.mark.thorough
@pytest.mark.parametrize("field", ["isolation", "minimum_boundary"])
async def test_what_this_host_cannot_keep_makes_nothing(
    front: AccessSite, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    def asking_for(minimum: str) -> dict[str, Any]:
        return {field: {"minimum": minimum} if field == "isolation" else minimum}

    client, engine = front.own.client, front.host.machines.engine
    before, calls = front.state("w"), len(front.host.world.calls)
    answer = await client.post("/v1/sandboxes", json=asking_for("microvm-kvm"))
    assert (answer.status_code, answer.json()["code"]) == (422, "isolation.unavailable")
    assert "this host offers microvm (accel tcg)" in answer.json()["error"]
    assert "Engine.launch" not in front.host.world.calls[calls:]
    assert front.state("w") == before
    assert (await client.post("/v1/sandboxes", json=asking_for("microvm"))).status_code == 201
    monkeypatch.setattr(type(engine), "isolation", property(lambda _: Isolation(accel="kvm")))
    assert (await client.post("/v1/sandboxes", json=asking_for("microvm-kvm"))).status_code == 201
