"""What netd is told about machines and when, over slots without namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.core.groups import Group, Member
from cloche_server.core.network import NetworkMode, NetworkPolicy
from cloche_server.network.networks import Networks

OPEN, NONE = NetworkPolicy(), NetworkPolicy(NetworkMode.NONE)


class Sockets:
    closed = 0

    def __init__(self, count: int = 4) -> None:
        self.count = count

    def close(self) -> None:
        Sockets.closed += 1


class PlainSlots:
    """`here`: machines that have a slot."""

    def __init__(self) -> None:
        self.here: set[str] = set()

    async def open(self, machine_id: str) -> int:
        self.here.add(machine_id)
        return -1

    async def sockets(self, machine_id: str) -> Sockets:
        if machine_id not in self.here:
            raise FileNotFoundError(2, "no such slot")
        return Sockets()

    async def doors(self, machine_id: str, count: int) -> Sockets:
        assert machine_id in self.here
        return Sockets(count)

    async def close(self, machine_id: str) -> None:
        self.here.discard(machine_id)

    def has(self, machine_id: str) -> bool:
        return machine_id in self.here

    async def take_stock(self, living: Collection[str]) -> int:
        gone = self.here - set(living)
        self.here -= gone
        return len(gone)


class Told:
    """A netd that remembers what it was told, and refuses `refuses`."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.attached: set[str] = set()
        self.refuses: set[str] = set()
        self.wants: list[dict[str, int]] = []
        self.supplied: dict[str, int] = {}

    async def ask(self, op: str, fields: Mapping[str, Any], sockets: object = None) -> dict[str, Any]:
        if op == "wanted":
            if not self.wants:
                raise asyncio.CancelledError
            return {"wanted": self.wants.pop()}
        if op == "supply":
            self.supplied[fields["sandbox"]] = 0 if sockets is None else sockets.count  # type: ignore[attr-defined]
            return {}
        names = tuple(sorted(one["name"] for one in fields.get("groups", ())))
        self.said.append((op, names or fields.get("sandbox") or fields.get("workspace")))
        if op in self.refuses:
            raise ClocheError("network.unavailable", "it is gone")
        assert (op == "attach") == (sockets is not None)
        return {"cut": 3}


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def networks(told: Told) -> Networks:
    slots: Any = PlainSlots()
    carrier: Any = told
    return Networks(slots, carrier)


async def test_a_machine_is_attached_when_it_is_admitted_and_not_before(networks: Networks, told: Told) -> None:
    await networks.open("m")
    assert told.said == []
    closed = Sockets.closed
    await networks.admit("m", "w", OPEN, ())
    assert told.said == [("attach", "m")]
    assert Sockets.closed == closed + 1, "netd has copies of its own"
    await networks.close("m")
    assert told.said[-1] == ("detach", "m")
    assert not networks.slots.has("m")


async def test_a_new_slot_ends_what_the_old_one_carried(networks: Networks, told: Told) -> None:
    await networks.open("m")
    await networks.admit("m", "w", OPEN, ())
    await networks.open("m")
    assert told.said == [("attach", "m"), ("detach", "m")]


async def test_without_a_slot_nothing_is_admitted(networks: Networks) -> None:
    with pytest.raises(ClocheError) as error:
        await networks.admit("m", "w", OPEN, ())
    assert error.value.code == "network.unavailable"


async def test_a_new_netd_is_told_secrets_first_and_the_policy_of_now(networks: Networks, told: Told) -> None:
    await networks.open("m")
    await networks.admit("m", "w", OPEN, ())
    await networks.provide("w", {"S": "value"}, {"certificate": "c", "key": "k"})
    told.refuses.add("policy")
    with pytest.raises(ClocheError):
        await networks.change("m", NONE, ())
    told.said.clear()
    sent: list[Mapping[str, Any]] = []
    ask = told.ask

    async def watched(op: str, fields: Mapping[str, Any], sockets: object = None) -> dict[str, Any]:
        sent.append(fields)
        return await ask(op, fields, sockets)

    told.ask = watched  # type: ignore[method-assign]
    await networks.again()
    assert told.said == [("secrets", "w"), ("attach", "m")]
    assert sent[-1]["policy"]["mode"] == "none", "what was asked for while nobody heard it"


async def test_secrets_that_are_refused_keep_nobody_off_the_network(networks: Networks, told: Told) -> None:
    await networks.open("m")
    await networks.admit("m", "w", OPEN, ())
    await networks.provide("w", {}, {})
    told.refuses.add("secrets")
    told.said.clear()
    await networks.again()
    assert told.said == [("secrets", "w"), ("attach", "m")]


async def test_what_an_earlier_server_has_left(networks: Networks, told: Told) -> None:
    for machine_id in ("lives", "lives-unattached", "gone"):
        await networks.open(machine_id)
    told.attached = {"lives", "gone", "long-gone"}
    for machine_id in ("lives", "lives-unattached", "without-a-slot"):
        await networks.adopt(machine_id, "w", OPEN, ())
    assert told.said == [("policy", "lives"), ("attach", "lives-unattached")]
    told.said.clear()
    assert await networks.take_stock({"lives", "lives-unattached"}) == 1
    assert sorted(told.said) == [("detach", "gone"), ("detach", "long-gone")]


async def test_a_change_tells_how_many_connections_it_cut(networks: Networks) -> None:
    await networks.open("m")
    await networks.admit("m", "w", OPEN, ())
    assert await networks.change("m", NONE, ()) == 3
    assert await networks.change("nobody", NONE, ()) == 0


async def test_a_new_netd_is_told_the_groups_before_the_machines(networks: Networks, told: Told) -> None:
    def group(name: str, *members: str) -> Group:
        return Group("w", name, tuple(Member(one, "", f"198.19.0.{at}", "running") for at, one in enumerate(members)))

    await networks.open("m")
    await networks.admit("m", "w", OPEN, ())
    await networks.group([group("gone", "m"), group("stays", "n")])
    told.refuses.add("groups")
    with pytest.raises(ClocheError):
        await networks.group([group("gone"), group("new", "m")])
    told.refuses.clear()
    told.said.clear()
    await networks.again()
    assert told.said == [("groups", ("new", "stays")), ("attach", "m")]


async def test_ways_are_made_into_slots_of_ours_only(networks: Networks, told: Told) -> None:
    await networks.open("m")
    await networks.open("another")
    await networks.admit("m", "w", OPEN, ())
    told.wants = [{"m": 3, "another": 1, "../../proc/1/ns/net": 1}]
    with pytest.raises(asyncio.CancelledError):
        await networks.run_doors()
    assert told.supplied == {"m": 3, "another": 0, "../../proc/1/ns/net": 0}
