"""Who is told to be in which network group, through everything that happens to a sandbox."""

from __future__ import annotations

import asyncio

import pytest
from app_host import Crew, Host

from cloche_server.app.create import CreateRequest
from cloche_server.app.fork import ForkRequest
from cloche_server.app.network import NetworkVerbs
from cloche_server.core.errors import ClocheError
from cloche_server.core.groups import Member


@pytest.fixture(autouse=True)
async def telling(host: Host, crew: Crew) -> None:
    """As the server does it beside everything else."""
    crew.create_task(host.groups.run())


def members(host: Host, group: str = "team", workspace: str = "w") -> dict[str, Member]:
    """By id, as they were told last."""
    found = host.network.groups.get((workspace, group))
    return {} if found is None else {member.sandbox: member for member in found.members}


def states(host: Host, group: str = "team") -> dict[str, str]:
    return {one.name or one.sandbox: one.status for one in members(host, group).values()}


async def become(host: Host, wanted: dict[str, str], group: str = "team") -> None:
    async with asyncio.timeout(5):
        while states(host, group) != wanted:
            await asyncio.sleep(0.005)


async def test_a_create_tells_the_others_before_it_answers(host: Host) -> None:
    db = await host.create(name="db", network_group="team")
    assert db.network_group == "team"
    assert members(host)[db.id].address == db.group_address
    web = await host.create(name="web", network_group="team")
    assert set(members(host)) == {db.id, web.id}
    assert db.group_address != web.group_address
    await host.create(name="lone")
    assert set(host.network.groups) == {("w", "team")}


async def test_a_group_is_of_one_workspace(host: Host) -> None:
    mine = await host.create(network_group="team")
    theirs = await host.creator.create(CreateRequest("v", network_group="team"))
    assert set(members(host)) == {mine.id}
    assert set(members(host, workspace="v")) == {theirs.id}


async def test_states_are_told(host: Host) -> None:
    db = await host.create(name="db", network_group="team")
    await become(host, {"db": "running"})
    await host.sleep.pause("w", db.id)
    await become(host, {"db": "paused"})
    await host.sleep.resume("w", db.id)
    await host.sleep.hibernate("w", db.id)
    await become(host, {"db": "hibernated"})
    await host.sleep.wake("w", db.id)
    await become(host, {"db": "running"})
    assert members(host)[db.id].address == db.group_address, "for its life"
    await host.lifecycle.delete("w", db.id)
    await become(host, {})


async def test_a_create_that_fails_leaves_no_member(host: Host) -> None:
    host.world.fault["Guest.renew"] = ClocheError("guest.error", "no")
    with pytest.raises(ClocheError):
        await host.create(name="db", network_group="team")
    await become(host, {})
    assert await host.left() == []


async def test_nobody_who_hears_it_keeps_no_sandbox_from_being_made(host: Host) -> None:
    host.world.fault["Network.group"] = ClocheError("network.unavailable", "netd is being started")
    db = await host.create(name="db", network_group="team")
    assert set(members(host)) == {db.id}


async def test_a_fork_is_in_the_group_of_its_parent(host: Host) -> None:
    db = await host.create(name="db", network_group="team")
    made = await host.forks.make("w", db.id, ForkRequest(count=2))
    assert {child.network_group for child in made.children} == {"team"}
    assert len({one.address for one in members(host).values()}) == 3
    assert sorted(one.name for one in members(host).values()) == ["", "", "db"]


async def test_many_at_once_have_addresses_of_their_own(host: Host) -> None:
    made = await asyncio.gather(*(host.create(network_group="team") for _ in range(8)))
    assert len({one.group_address for one in made}) == 8
    assert set(members(host)) == {one.id for one in made}


async def test_into_another_group_and_out_of_every_one(host: Host) -> None:
    verbs = NetworkVerbs(host.access, host.supervisor, host.network, None, host.groups)  # type: ignore[arg-type]
    db = await host.create(name="db", network_group="team")
    moved = await verbs.regroup("w", db.id, "crew")
    assert (moved.network_group, states(host), states(host, "crew")) == ("crew", {}, {"db": "running"})
    assert (await verbs.regroup("w", db.id, None)).network_group is None
    assert states(host, "crew") == {}
    host.network.enabled = False
    with pytest.raises(ClocheError) as told:
        await verbs.regroup("w", db.id, "team")
    assert told.value.code == "network.off"


async def test_the_next_server_tells_who_is_there_and_that_there_is_nobody_else(host: Host, second: Host) -> None:
    db = await host.create(name="db", network_group="team")
    asleep = await host.create(name="asleep", network_group="team")
    await host.sleep.hibernate("w", asleep.id)
    await host.supervisor.close()
    second.network.groups["w", "gone"] = host.network.groups["w", "team"]
    await second.take_over()
    assert set(second.network.groups) == {("w", "team")}
    assert states(second) == {"db": "running", "asleep": "hibernated"}
    assert members(second)[db.id].address == db.group_address
