"""What the tests of budgets share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from app_host import Host
from app_states import status

from cloche_server.app.budget_verbs import Sharing
from cloche_server.app.entry import Entry
from cloche_server.app.fork import ForkRequest
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import Sandbox
from kit.fake_engine import settle

Events = list[tuple[str, str, Mapping[str, Any]]]


def entry_of(host: Host, record: Sandbox) -> Entry:
    entry = host.supervisor.get(record.id)
    assert entry is not None
    return entry


def work(host: Host, record: Sandbox, cpu_seconds: float) -> None:
    host.world.alive[record.id].cpu_seconds += cpu_seconds


async def becomes(host: Host, record: Sandbox, wanted: Status) -> None:
    await settle(lambda: status(host, record.id) is wanted)


async def gone(host: Host, record: Sandbox) -> None:
    await settle(lambda: host.supervisor.get(record.id) is None)


async def refused(host: Host, record: Sandbox, call: Any) -> ClocheError:
    with pytest.raises(ClocheError) as told:
        await call
    assert told.value.code == "budget.exceeded"
    assert told.value.details["limit"]
    return told.value


async def fork(host: Host, parent: Sandbox, count: int, sharing: Sharing | None = None) -> list[Sandbox]:
    return list((await host.forks.make("w", parent.id, ForkRequest(count=count, budget=sharing))).children)
