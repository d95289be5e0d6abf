"""What the tests of snapshots share."""

from __future__ import annotations

from typing import Any

from app_host import Host

from cloche_server.app.create import CreateRequest
from cloche_server.core.records import Sandbox


async def create_from(host: Host, snapshot_id: str, **options: Any) -> Sandbox:
    async with host.snapshots.source("w", snapshot_id) as (snapshot, source):
        return await host.creator.create(
            CreateRequest("w", template=snapshot.template, source=source, snapshot_id=snapshot.id, **options)
        )


async def end(host: Host) -> None:
    assert await host.untrue() == []
    for snapshot in host.snapshots.list("w"):
        await host.snapshots.remove("w", snapshot.id)
        assert await host.untrue() == []
    for record in host.access.list("w"):
        await host.lifecycle.delete("w", record.id)
        assert await host.untrue() == []
    assert await host.left() == []
