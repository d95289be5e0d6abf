"""Creates under a name: one living sandbox per name, whoever asks and however often."""

from __future__ import annotations

import asyncio

import pytest
from app_host import Host

from cloche_server.app.create import CreateRequest
from cloche_server.app.names import IfExists, NamedCreates
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import Sandbox


@pytest.fixture
def named(host: Host) -> NamedCreates:
    return NamedCreates(host.creates, host.access, host.lifecycle)


async def ask(
    named: NamedCreates, if_exists: str = "error", name: str | None = "a", key: str | None = None, workspace: str = "w"
) -> tuple[Sandbox, bool]:
    request = CreateRequest(workspace, name=name)
    return await named.create(request, key, b"{}", IfExists(if_exists))


async def test_without_a_name_each_create_is_its_own(host: Host, named: NamedCreates) -> None:
    made = [await ask(named, "connect", name=None) for _ in range(2)]
    assert all(new for _, new in made)
    assert len({record.id for record, _ in made}) == 2


async def test_a_name_in_use_is_refused_and_nothing_is_made(host: Host, named: NamedCreates) -> None:
    first, _ = await ask(named)
    calls = list(host.world.calls)
    with pytest.raises(ClocheError) as told:
        await ask(named)
    assert told.value.code == "sandbox.name_taken"
    assert told.value.details["id"] == first.id
    assert host.world.calls == calls
    assert len(await host.rows()) == 1


async def test_it_is_refused_on_every_way_to_a_create(host: Host, named: NamedCreates) -> None:
    """The database has the last word, and what was made by then is undone."""
    first, _ = await ask(named)
    with pytest.raises(ClocheError) as told:
        await host.creator.create(CreateRequest("w", name="a"))
    assert told.value.code == "sandbox.name_taken"
    assert set(host.world.alive) == {first.id}


async def test_a_name_is_free_again_after_a_delete_and_in_another_workspace(host: Host, named: NamedCreates) -> None:
    first, _ = await ask(named)
    other, _ = await ask(named, workspace="v")
    await host.lifecycle.delete("w", first.id)
    again, new = await ask(named)
    assert new
    assert len({first.id, other.id, again.id}) == 3


async def test_all_who_connect_at_once_converge(host: Host, named: NamedCreates) -> None:
    answers = await asyncio.gather(*(ask(named, "connect") for _ in range(20)))
    assert len({record.id for record, _ in answers}) == 1
    assert sorted(new for _, new in answers) == [False] * 19 + [True]
    assert len(await host.rows()) == 1
    assert len(named._turns) == 0


async def test_connecting_changes_nothing_of_it(host: Host, named: NamedCreates) -> None:
    first, _ = await ask(named)
    host.clock.time += 100
    request = CreateRequest("w", name="a", ttl_seconds=7, metadata={"x": "y"})
    found, new = await named.create(request, None, b"{}", IfExists.CONNECT)
    assert not new
    assert (found.id, found.expires_at, found.metadata) == (first.id, first.expires_at, {})


async def test_a_failed_one_is_told_and_may_be_replaced(host: Host, named: NamedCreates) -> None:
    first, _ = await ask(named)
    host.world.alive[first.id].die()
    entry = host.supervisor.get(first.id)
    assert entry is not None
    await entry.ended.wait()
    with pytest.raises(ClocheError) as told:
        await ask(named, "connect")
    assert told.value.code == "sandbox.failed"
    second, new = await ask(named, "replace")
    assert new
    assert second.id != first.id
    assert [record.id for record in await host.rows()] == [second.id]


async def test_replacing_makes_a_new_identity(host: Host, named: NamedCreates) -> None:
    first, _ = await ask(named, "replace")
    second, new = await ask(named, "replace")
    assert new
    assert second.id != first.id
    assert (await host.store.get(first.id)).status is Status.DELETED  # type: ignore[union-attr]
    with pytest.raises(ClocheError) as told:
        await host.access.find("w", first.id)
    assert told.value.code == "sandbox.not_found"


async def test_many_who_replace_leave_one(host: Host, named: NamedCreates) -> None:
    await asyncio.gather(*(ask(named, "replace") for _ in range(5)))
    assert len(await host.rows()) == 1


async def test_a_key_gives_the_sandbox_it_was_used_for(host: Host, named: NamedCreates) -> None:
    first, _ = await ask(named, key="k")
    again, _ = await ask(named, key="k")
    assert again.id == first.id


@pytest.mark.parametrize("if_exists", ["connect", "replace"])
async def test_a_request_that_is_repeated_is_carried_out_once(host: Host, named: NamedCreates, if_exists: str) -> None:
    first, _ = await ask(named, if_exists, key="k")
    again, _ = await ask(named, if_exists, key="k")
    assert again.id == first.id
    other, _ = await ask(named, "replace", key="other")
    with pytest.raises(ClocheError) as told:
        await ask(named, if_exists, key="k")
    assert told.value.code == "sandbox.not_found"
    assert [record.id for record in await host.rows()] == [other.id]


async def test_a_create_that_fails_leaves_the_name_free(host: Host, named: NamedCreates) -> None:
    host.world.fault["Machine.restore"] = ClocheError("sandbox.boot_failed", "x")
    with pytest.raises(ClocheError):
        await ask(named, "connect")
    host.world.fault.clear()
    _, new = await ask(named, "connect")
    assert new
