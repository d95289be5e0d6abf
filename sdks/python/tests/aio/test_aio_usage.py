"""Usage, budgets, lifetimes, and the power of a sandbox."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cloche_fake import FakeCloche, faults

from cloche import (
    AsyncClient,
    AsyncSandbox,
    Budget,
    BudgetExceeded,
    ConnectionLost,
    SandboxNotFound,
    TimeoutError,
)


async def test_usage(fake: FakeCloche) -> None:
    usage = await (await AsyncSandbox.create()).usage()
    assert usage.wall_seconds == {"running": 10.5, "paused": 2}
    assert (usage.cpu_seconds, usage.exec_count, usage.bytes_in, usage.bytes_out) == (1.25, 3, 0, 99)
    assert usage.first_started_at == datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert usage.cost is not None
    assert (usage.cost.currency, usage.cost.total) == ("EUR", 0.3)
    assert usage.raw["a_field_of_the_future"] == 1


async def test_usage_of_all(fake: FakeCloche) -> None:
    async with AsyncClient() as client:
        found = await client.usage()
        assert (found.count, found.usage.cpu_seconds) == (2, 1.25)
        assert fake.requests[-1].query == {}
        since = datetime(2025, 1, 1, tzinfo=UTC)
        found = await client.usage(group_by="team", since=since, until="2026-01-01T00:00:00Z", sandbox_id="sb1")
        assert fake.requests[-1].query == {
            "group_by": "team", "since": "2025-01-01T00:00:00+00:00", "until": "2026-01-01T00:00:00Z",
            "sandbox_id": "sb1",
        }  # fmt: skip
        assert [(group.value, group.count, group.usage.starts) for group in found.groups] == [("a", 1, 1), (None, 1, 1)]
        with pytest.raises(ValueError, match="time zone"):
            await client.usage(since=datetime(2025, 1, 1))


async def test_budgets(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create(budget=Budget(cpu_seconds=60, warn_at=0.5))
    assert fake.bodies[0]["budget"] == {"cpu_seconds": 60, "warn_at": 0.5}
    status = await sandbox.budget()
    assert status is not None
    assert (status.id, status.status, status.budget.cpu_seconds) == ("acc1", "ok", 60)
    assert (status.used["exec_count"], status.sandboxes) == (3, (sandbox.id,))
    raised = await sandbox.set_budget({"cpu_seconds": 90})
    assert (fake.bodies[-1], raised.budget.cpu_seconds) == ({"cpu_seconds": 90}, 90)
    await sandbox.delete_budget()
    assert await sandbox.budget() is None
    fake.on("GET", "/budget", faults.error(404, "sandbox.not_found"))
    with pytest.raises(SandboxNotFound):
        await sandbox.budget()


async def test_a_budget_that_is_used_up(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/exec", faults.error(402, "budget.exceeded", "used up", details={"limit": "cpu_seconds"}))
    with pytest.raises(BudgetExceeded) as caught:
        await sandbox.exec("true")
    assert (caught.value.limit, caught.value.retryable) == ("cpu_seconds", False)


async def test_lifetimes_and_what_children_get(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create(max_lifetime_seconds=3600)
    assert fake.bodies[0]["max_lifetime_seconds"] == 3600
    assert (sandbox.info.max_lifetime_seconds, sandbox.info.ends_at is not None) == (3600, True)
    (child,) = await sandbox.fork(name="child", budget="split", max_lifetime_seconds=60)
    assert fake.bodies[-1] == {"count": 1, "name": "child", "budget": "split", "max_lifetime_seconds": 60}
    assert child.name == "child"


async def test_stop_boot_restart(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    assert (await sandbox.stop()).status == "stopped"
    assert fake.bodies[-1] == {}
    assert (await sandbox.boot()).status == "running"
    await sandbox.stop(timeout_seconds=5, force=True)
    assert fake.bodies[-1] == {"timeout_seconds": 5, "force": True}
    assert (await sandbox.restart(timeout_seconds=7)).status == "running"
    assert fake.bodies[-1] == {"timeout_seconds": 7}
    fake.on("POST", "/stop", faults.error(504, "sandbox.stop_timeout", "the guest takes longer"))
    with pytest.raises(TimeoutError, match="longer"):
        await sandbox.stop()
    for verb, again in (("stop", 2), ("start", 2), ("restart", 1)):
        before = fake.count("POST", f"/{verb}")
        fake.on("POST", f"/{verb}", faults.abort, times=again)
        with pytest.raises(ConnectionLost):
            await getattr(sandbox, "boot" if verb == "start" else verb)()
        assert fake.count("POST", f"/{verb}") == before + again
