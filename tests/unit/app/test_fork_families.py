"""Families of forks: who may die first, and which child is kept."""

from __future__ import annotations

import asyncio

import pytest
from app_host import Host
from app_states import status
from test_fork import end, fork

from cloche_server.app.fork import Forked
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from kit.fake_engine import Gate, settle

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("order", ["parent first", "children first", "middle first"])
async def test_a_family_of_three_generations(host: Host, order: str) -> None:
    parent = await host.create()
    child = (await fork(host, parent)).children[0]
    grandchild = (await fork(host, child)).children[0]
    again = (await fork(host, parent)).children[0]
    assert (grandchild.parent_id, again.parent_id) == (child.id, parent.id)
    assert len(host.machines.layers.chain(grandchild.layer_id)) == 3
    family = [parent, child, grandchild, again]
    if order == "children first":
        family.reverse()
    elif order == "middle first":
        family = [child, parent, again, grandchild]
    for one in family:
        await host.lifecycle.delete("w", one.id)
        assert await host.untrue() == []
    assert await host.left() == []


async def test_a_parent_that_is_deleted_while_its_children_are_made(host: Host) -> None:
    parent = await host.create()
    gate = host.world.gate["Machine.restore"] = Gate()
    forking = asyncio.ensure_future(fork(host, parent, 3))
    await gate.reached.wait()
    await host.lifecycle.delete("w", parent.id)
    gate.open.set()
    made = await forking
    assert len(made.children) == 3
    for child in made.children:
        await host.sleep.hibernate("w", child.id)
        await host.sleep.wake("w", child.id)
    await end(host)


async def test_a_child_that_is_deleted_while_it_is_made(host: Host) -> None:
    parent = await host.create()
    gate = host.world.gate["Machine.restore"] = Gate()
    forking = asyncio.ensure_future(fork(host, parent, 3))
    await settle(lambda: host.world.calls.count("Machine.restore") == 4)
    victim = next(record for record in host.access.list("w") if record.id != parent.id)
    await host.lifecycle.delete("w", victim.id)
    gate.open.set()
    made = await forking
    assert len(made.children) == 2
    assert [error.code for error in made.errors.values()] == ["sandbox.invalid_state"]
    await end(host)


async def test_forks_at_once(host: Host) -> None:
    """Of one parent one after the other, each with a moment of its own, and of its children meanwhile."""
    parent = await host.create()
    child = (await fork(host, parent)).children[0]
    forks = [fork(host, parent if n % 2 else child, 2) for n in range(6)]
    made = await asyncio.gather(*forks, host.sleep.pause("w", child.id), host.sleep.resume("w", child.id))
    assert sum(len(one.children) for one in made if isinstance(one, Forked)) == 12
    assert len({one.tree_id for one in made if isinstance(one, Forked)}) == 6
    await end(host)


# ------------------------------------------------------------------ promotion


@pytest.mark.parametrize("cleanup", [False, True])
async def test_a_promotion(host: Host, cleanup: bool) -> None:
    parent = await host.create()
    made = await fork(host, parent, 3)
    other = (await fork(host, parent)).children[0]
    winner, *siblings = made.children
    for turn in range(2):
        done = await host.forks.promote("w", winner.id, None, cleanup)
        assert done.tree_id == made.tree_id
        assert done.failures == {}
        assert sorted(done.deleted) == (sorted(one.id for one in siblings) if cleanup and not turn else [])
    left = {record.id for record in host.access.list("w")}
    assert left == {parent.id, winner.id, other.id} | (set() if cleanup else {one.id for one in siblings})
    await end(host)


async def test_a_promotion_in_each_state(host: Host) -> None:
    parent = await host.create()
    made = await fork(host, parent, 4)
    await host.sleep.pause("w", made.children[1].id)
    await host.sleep.hibernate("w", made.children[2].id)
    host.world.alive[made.children[3].id].die()
    await settle(lambda: status(host, made.children[3].id) is Status.FAILED)
    await host.sleep.hibernate("w", made.children[0].id)
    done = await host.forks.promote("w", made.children[0].id, made.tree_id, True)
    assert len(done.deleted) == 3
    assert status(host, made.children[0].id) is Status.HIBERNATED, "a promotion wakes nobody"
    await end(host)


async def test_what_is_no_child_cannot_be_promoted(host: Host) -> None:
    parent = await host.create()
    with pytest.raises(ClocheError) as told:
        await host.forks.promote("w", parent.id, None, True)
    assert told.value.code == "request.invalid"
    with pytest.raises(ClocheError) as told:
        await host.forks.promote("w", "0" * 20, None, True)
    assert told.value.code == "sandbox.not_found"


async def test_siblings_that_resist_are_named_and_go_the_next_time(host: Host) -> None:
    parent = await host.create()
    made = await fork(host, parent, 3)
    host.world.fault["Machine.kill"] = ClocheError("internal", "it did not end")
    done = await host.forks.promote("w", made.children[0].id, None, True)
    assert set(done.failures) == {one.id for one in made.children[1:]}
    host.world.fault.clear()
    await settle(lambda: len(host.supervisor.entries()) == 2)
    done = await host.forks.promote("w", made.children[0].id, None, True)
    assert (done.deleted, dict(done.failures)) == ((), {})
    await end(host)


async def test_two_promotions_at_once(host: Host) -> None:
    """Both may win over each other; nothing fails and nothing is left half-way."""
    parent = await host.create()
    made = await fork(host, parent, 4)
    first, second = made.children[:2]
    await asyncio.gather(
        host.forks.promote("w", first.id, None, True),
        host.forks.promote("w", second.id, None, True),
        return_exceptions=True,
    )
    await end(host)


async def test_siblings_of_another_workspace_are_not_touched(host: Host) -> None:
    parent = await host.create()
    made = await fork(host, parent, 2)
    with pytest.raises(ClocheError) as told:
        await host.forks.promote("other", made.children[0].id, made.tree_id, True)
    assert told.value.code == "sandbox.not_found"
    assert len(host.access.list("w")) == 3
    await end(host)
