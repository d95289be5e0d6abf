"""Who sees whom in netd, and the sockets by which they reach each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from cloche_server.core.groups import Group, Member
from cloche_server.netd import groups as groups_module
from cloche_server.netd.groups import KEPT, Doors, Groups, Unreachable

A = ip_address("198.19.0.1")


def member(sandbox: str, number: int, status: str = "running") -> Member:
    return Member(sandbox, f"name-{sandbox}", f"198.19.0.{number}", status)


def group(*members: Member, workspace: str = "w", name: str = "team") -> Group:
    return Group(workspace, name, members)


def test_members_see_each_other_and_nobody_else_sees_them() -> None:
    groups = Groups()
    groups.replace([group(member("a", 1), member("b", 2)), group(member("c", 1), workspace="x")], whole=True)
    assert groups.at("b", A) == member("a", 1)
    assert groups.at("c", A) == member("c", 1)
    assert groups.at("d", A) is None
    assert groups.named("a", "name-b.team.internal") == member("b", 2)
    assert groups.named("c", "name-b") is None
    assert str(groups.own_address("b")) == "198.19.0.2"
    assert groups.own_address("d") is None


def test_who_is_not_named_any_more_is_none() -> None:
    groups = Groups()
    groups.replace([group(member("a", 1), member("b", 2))], whole=True)
    groups.replace([group(member("b", 2))], whole=False)
    assert groups.at("b", A) is None
    assert groups.at("a", A) is None, "nor sees the others"
    groups.replace([group()], whole=False)
    assert groups.own_address("b") is None


def test_who_moves_to_another_group_is_in_it_alone() -> None:
    groups = Groups()
    groups.replace([group(member("a", 1), member("b", 2))], whole=True)
    groups.replace([group(member("a", 1)), group(member("b", 1), name="crew")], whole=False)
    assert groups.named("b", "name-a") is None
    assert groups.at("b", A) == member("b", 1)
    assert groups.owns("b", "x.crew.internal")
    assert not groups.owns("b", "x.team.internal")


def test_the_whole_has_nothing_of_before() -> None:
    groups = Groups()
    groups.replace([group(member("a", 1))], whole=True)
    groups.replace([], whole=True)
    assert groups.own_address("a") is None


# ------------------------------------------------------------------ ways into slots


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Stands for the guest: it is dialled on loopback."""
    monkeypatch.setattr(groups_module, "GUEST_IP4", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def fresh(count: int) -> list[socket.socket]:
    return [socket.socket() for _ in range(count)]


async def test_a_call_wants_sockets_and_goes_on_when_they_come(server: socket.socket) -> None:
    doors = Doors()
    doors.open("b")
    call = asyncio.ensure_future(doors.dial(member("b", 2), port_of(server), ip_address("127.0.0.7")))  # type: ignore[arg-type]
    assert await doors.wanted(5) == {"b": KEPT + 1}
    doors.supply("b", fresh(3))
    sock = await call
    assert sock.getsockname()[0] == "127.0.0.7", "the guest sees who calls"
    assert await doors.wanted(0.01) == {}
    sock.close()
    (await doors.dial(member("b", 2), port_of(server), None)).close()
    assert await doors.wanted(5) == {"b": KEPT - 1}, "more before there are none"
    doors.close_all()


async def test_an_address_that_the_slot_does_not_have_is_left_out(server: socket.socket) -> None:
    doors = Doors()
    doors.open("b")
    call = asyncio.ensure_future(doors.dial(member("b", 2), port_of(server), ip_address("198.51.100.1")))  # type: ignore[arg-type]
    await doors.wanted(5)
    doors.supply("b", fresh(1))
    sock = await call
    assert sock.getsockname()[0] == "127.0.0.1"
    sock.close()
    doors.close_all()


@pytest.mark.parametrize(
    ("status", "attached", "why"),
    [
        ("paused", True, "the member is paused"),
        ("hibernated", False, "the member is hibernated"),
        ("running", False, "the member has no network now"),
    ],
)
async def test_who_cannot_be_called_is_told(status: str, attached: bool, why: str) -> None:
    doors = Doors()
    if attached:
        doors.open("b")
    with pytest.raises(Unreachable) as told:
        await doors.dial(member("b", 2, status), 80, None)
    assert told.value.strerror == why


async def test_a_slot_that_cannot_be_entered_refuses_at_once() -> None:
    doors = Doors()
    doors.open("b")
    call = asyncio.ensure_future(doors.dial(member("b", 2), 80, None))
    await doors.wanted(5)
    doors.supply("b", [])
    with pytest.raises(Unreachable):
        await call
    assert await doors.wanted(0.01) == {}, "and is not asked for again and again"


async def test_a_detach_ends_what_waits_and_what_is_open() -> None:
    doors = Doors()
    doors.open("b")
    call = asyncio.ensure_future(doors.dial(member("b", 2), 80, None))
    await doors.wanted(5)
    ended: list[str] = []
    with doors.inside("b", lambda: ended.append("b")):
        doors.close("b")
    assert ended == ["b"]
    with pytest.raises(Unreachable):
        await call
    late = fresh(1)
    doors.supply("b", late)
    assert late[0].fileno() == -1, "nothing holds a slot that has gone"
    with pytest.raises(Unreachable), doors.inside("b", lambda: None):
        pass


@pytest.mark.parametrize("gone", [False, True])
async def test_a_socket_for_a_caller_that_has_gone_is_not_lost(gone: bool) -> None:
    doors = Doors()
    doors.open("b")
    call = asyncio.ensure_future(doors.dial(member("b", 2), 80, None))
    await doors.wanted(5)
    (sock,) = socks = fresh(1)
    doors.supply("b", socks)
    call.cancel()
    if gone:
        doors.close("b")
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (sock.fileno() == -1) is gone
    doors.close("b")
    assert sock.fileno() == -1


async def test_a_server_that_does_not_come_back_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "PATIENCE", 0.05)
    doors = Doors()
    doors.open("b")
    with pytest.raises(TimeoutError):
        await doors.dial(member("b", 2), 80, None)
    sock = fresh(1)
    doors.supply("b", sock)
    assert sock[0].fileno() >= 0, "kept for the next"
    doors.close("b")
    assert sock[0].fileno() == -1
