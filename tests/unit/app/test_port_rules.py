"""What is said about ports: listed, kept, inherited, forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from app_host import Host

from cloche_server.app.fork import ForkRequest
from cloche_server.app.ports import MAX_PORTS, Ports, PortWish
from cloche_server.core.errors import ClocheError
from cloche_server.core.previews import HostRule, PortAccess, PreviewBase
from cloche_server.guest.types import ListeningPort
from cloche_server.store.ports import PortStore
from kit.fake_engine import FakeGuest

BASE = PreviewBase("http", "localhost", 8601)


def make(host: Host, base: PreviewBase | None = BASE, usual: PortAccess = PortAccess.PUBLIC) -> Ports:
    return Ports(host.access, PortStore(host.database), host.clock, b"k" * 32, usual, base)


@pytest.fixture
def ports(host: Host, listening: list[ListeningPort]) -> Ports:
    made = make(host)
    host.forks.on_children = made.inherit
    return made


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> list[ListeningPort]:
    found: list[ListeningPort] = []

    async def tell(guest: FakeGuest, *, timeout: float) -> list[ListeningPort]:
        if not found:
            raise ClocheError("guest.error", "the guest has no such call")
        return found

    monkeypatch.setattr(FakeGuest, "ports", tell, raising=False)
    return found


async def refused(work: Any) -> str:
    with pytest.raises(ClocheError) as caught:
        await work
    return caught.value.code


async def test_the_list_joins_what_listens_and_what_was_said(
    host: Host, ports: Ports, listening: list[ListeningPort]
) -> None:
    box = await host.create()
    listening += [
        ListeningPort(22, "0.0.0.0", 1, "sshd"),
        ListeningPort(3000, "127.0.0.1", 7, "node"),
        ListeningPort(3000, "::1", 7, "node"),
        ListeningPort(0, "0.0.0.0"),
        ListeningPort(9000, "0.0.0.0"),
    ]
    await ports.declare("w", box.id, PortWish(9000, label="api"))
    await ports.declare("w", box.id, PortWish(8080))
    found = await ports.list("w", box.id)
    assert [(v.rule.port, v.listening, v.declared, v.addresses, v.process) for v in found] == [
        (3000, True, False, ("127.0.0.1", "::1"), "node"),
        (8080, False, True, (), None),
        (9000, True, True, ("0.0.0.0",), None),
    ]
    assert found[0].url == f"http://3000-{box.id}.localhost:8601"
    assert (await ports.get("w", box.id, 5)).listening is False
    assert make(host, None).url(found[0].rule) == f"/v1/sandboxes/{box.id}/proxy/3000/"
    await host.sleep.hibernate("w", box.id)
    assert [view.listening for view in await ports.list("w", box.id)] == [False, False]
    listening.clear()
    await host.sleep.wake("w", box.id)
    assert [view.listening for view in await ports.list("w", box.id)] == [False, False]


async def test_what_was_said_outlives_the_server_and_ends_with_the_sandbox(host: Host, ports: Ports) -> None:
    box, other = await host.create(), await host.create()
    wish = PortWish(3000, "app", "app.example.org", PortAccess.BASIC, "ann", "correct horse", HostRule.LOCALHOST)
    rule = (await ports.declare("w", box.id, wish)).rule
    assert rule.password is not None
    assert "correct horse" not in rule.password
    after = make(host)
    await after.load()
    assert after.rule(box.id, 3000) == rule
    assert after.at_domain("app.example.org") == rule
    again = PortWish(4000, domain="APP.example.org")
    assert await refused(after.declare("w", other.id, again)) == "port.domain_taken"
    await host.lifecycle.delete("w", box.id)
    assert (await after.declare("w", other.id, again)).rule.domain == "app.example.org"
    assert after.rule(box.id, 3000) is None


async def test_only_a_change_of_who_may_come_in_cuts_off(host: Host, ports: Ports) -> None:
    box, told = await host.create(), []
    ports.on_change = lambda sandbox_id, port: told.append((sandbox_id, port))
    await ports.declare("w", box.id, PortWish(3000, label="a"))
    await ports.declare("w", box.id, PortWish(3000, label="b", host=HostRule.LOCALHOST))
    assert told == []
    await ports.declare("w", box.id, PortWish(3000, access=PortAccess.TOKEN))
    await ports.remove("w", box.id, 3000)
    assert told == [(box.id, 3000)] * 2
    assert ports.rule_of(box, 3000).access is PortAccess.PUBLIC
    assert make(host, usual=PortAccess.TOKEN).rule_of(box, 3000).access is PortAccess.TOKEN


async def test_children_are_as_closed_as_their_parent(host: Host, ports: Ports) -> None:
    box = await host.create()
    await ports.declare("w", box.id, PortWish(3000, domain="d.example", access=PortAccess.TOKEN))
    forked = await host.forks.make("w", box.id, ForkRequest(count=2))
    for child in forked.children:
        rule = ports.rule_of(child, 3000)
        assert (rule.access, rule.domain) == (PortAccess.TOKEN, None)
    after = make(host)
    await after.load()
    assert after.rule_of(forked.children[0], 3000).access is PortAccess.TOKEN


async def test_refusals(host: Host, ports: Ports) -> None:
    box = await host.create()
    for wish in (
        PortWish(0),
        PortWish(22),
        PortWish(65536),
        PortWish(1, access=PortAccess.BASIC),
        PortWish(1, access=PortAccess.BASIC, username="a:b", password="x" * 8),
        PortWish(1, username="a", password="x" * 8),
        PortWish(1, domain="localhost"),
        PortWish(1, domain="1-abcdefgh12.localhost"),
        PortWish(1, domain="10.0.0.1"),
        PortWish(1, domain="no spaces.example"),
        PortWish(1, domain="plain"),
    ):
        assert await refused(ports.declare("w", box.id, wish)) == "request.invalid", wish
    assert await refused(make(host, None).declare("w", box.id, PortWish(1, domain="a.example"))) == "request.invalid"
    assert await refused(ports.remove("w", box.id, 3000)) == "port.not_found"
    for call in (ports.list("x", box.id), ports.get("x", box.id, 1), ports.declare("x", box.id, PortWish(1))):
        assert await refused(call) == "sandbox.not_found"
    for number in range(MAX_PORTS):
        await ports.declare("w", box.id, PortWish(2000 + number))
    assert await refused(ports.declare("w", box.id, PortWish(1))) == "request.invalid"
    await ports.declare("w", box.id, PortWish(2000, label="again"))


async def test_tokens(host: Host, ports: Ports) -> None:
    box = await host.create()
    text, made = await ports.token("w", box.id, 3000, 60, ["/a b", "/ü|x"])
    assert ports.read(text) == made
    assert (made.workspace, made.paths) == ("w", ("/a b", "/ü|x"))
    host.clock.time += 60
    assert ports.read(text) is None
    for seconds, paths in ((0, []), (7 * 86400 + 1, []), (60, ["x"]), (60, ["/%2e"]), (60, ["/"] * 33)):
        assert await refused(ports.token("w", box.id, 3000, seconds, paths)) == "request.invalid"
    assert await refused(ports.token("other", box.id, 3000, 60, [])) == "sandbox.not_found"
