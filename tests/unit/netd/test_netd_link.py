"""The control link: frames and descriptors between two processes that may misbehave."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cloche_server.core.netctl import PROTOCOL, encode_frame
from cloche_server.core.network import GATEWAY_IP4
from cloche_server.host.fdlink import FdClient, LinkLost, LinkRefused, listen
from cloche_server.netd.control import Control
from cloche_server.netd.registry import Registry
from cloche_server.netd.shared import Shared

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes the raw sockets of a slot")
POLICY = {"mode": "open", "rules": [], "limits": {}, "learn": False}


class Place:
    def __init__(self, path: Path, registry: Registry, shared: Shared) -> None:
        self.path, self.registry, self.shared = path, registry, shared

    async def client(self) -> FdClient:
        return await FdClient.connect(self.path)


@pytest_asyncio.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    path = tmp_path / "netd.sock"
    shared = Shared()
    async with asyncio.TaskGroup() as tasks:
        registry = Registry(shared, tasks)
        control = Control(listen(path), registry, tasks)
        yield Place(path, registry, shared)
        control.close()
        registry.close()


def sockets() -> list[socket.socket]:
    """Of the kinds that a slot has. Those that answer are raw ones there, which need root to be made."""
    v4, v6 = socket.AF_INET, socket.AF_INET6
    made = []
    for family, kind in (
        (v4, socket.SOCK_STREAM),
        (v6, socket.SOCK_STREAM),
        *[(v4, socket.SOCK_DGRAM), (v6, socket.SOCK_DGRAM)] * 2,
    ):
        sock = socket.socket(family, kind)
        sock.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            sock.listen()
        made.append(sock)
    for protocol4, protocol6 in (
        (socket.IPPROTO_UDP, socket.IPPROTO_UDP),
        (socket.IPPROTO_ICMP, socket.IPPROTO_ICMPV6),
    ):
        made += [socket.socket(v4, socket.SOCK_RAW, protocol4), socket.socket(v6, socket.SOCK_RAW, protocol6)]
    return made


async def attach(client: FdClient, sandbox: str = "s1", **fields: Any) -> None:
    made = sockets()
    fds = [sock.fileno() for sock in made]
    await client.call("attach", sandbox=sandbox, workspace="w", policy=POLICY, grants=[], fds=fds, **fields)
    for sock in made:
        sock.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_only_the_owner_may_connect(place: Place) -> None:
    assert stat.S_IMODE(place.path.stat().st_mode) == 0o600


async def test_a_sandbox_from_attach_to_detach(place: Place) -> None:
    async with await place.client() as client, await place.client() as other:
        await client.call("hello")
        await other.call("hello")
        before = open_files()
        await attach(client)
        hello = await other.call("hello")
        assert hello["sandboxes"] == ["s1"]
        assert hello["version"] == PROTOCOL
        assert (await other.call("policy", sandbox="s1", policy={**POLICY, "mode": "none"}, grants=[])) == {"cut": 0}
        verdict = (await client.call("explain", sandbox="s1", host="a.test"))["verdict"]
        assert verdict["rule"] == "mode"
        assert not verdict["allowed"]
        await attach(client)  # again: the first one ends
        assert (await client.call("detach", sandbox="s1"))["stats"]["connections"] == 0
        assert (await client.call("hello"))["sandboxes"] == []
        assert open_files() == before


async def test_what_is_wrong_is_told_and_nothing_leaks(place: Place) -> None:
    async with await place.client() as client:
        await client.call("hello")
        before = open_files()
        for op, fields, code in (
            ("nonsense", {}, "unknown-op"),
            ("stats", {"sandbox": "x"}, "not-attached"),
            ("stats", {}, "invalid"),
            ("attach", {"sandbox": "s", "policy": POLICY}, "invalid"),
            ("attach", {"sandbox": "s", "policy": {"mode": "?"}}, "invalid"),
            ("attach", {"sandbox": "", "policy": POLICY}, "invalid"),
            ("configure", {"proxy": "ftp://user:hunter2@x"}, "invalid"),
            ("configure", {"resolvers": ["x"]}, "invalid"),
            ("secrets", {"workspace": "w", "values": {"A": "hunter2"}, "ca": {"certificate": "x"}}, "invalid"),
        ):
            with pytest.raises(LinkRefused) as caught:
                await client.call(op, **fields)
            assert caught.value.code == code, op
            assert "hunter2" not in str(caught.value)
        made = sockets()
        wrong = [sock.fileno() for sock in reversed(made)]
        with pytest.raises(LinkRefused):
            await client.call("attach", sandbox="s", policy=POLICY, fds=wrong)
        with pytest.raises(LinkRefused):
            await client.call("attach", sandbox="s", policy=POLICY, fds=[0, 1, 2, 0])
        for sock in made:
            sock.close()
        assert (await client.call("hello"))["sandboxes"] == []
        assert open_files() == before


async def test_violations_are_heard_of_all_sandboxes(place: Place) -> None:
    async with await place.client() as client:
        await attach(client)
        waiting = asyncio.create_task(client.call("violations", wait=20))
        await client.call("hello")
        place.registry._attached["s1"].session.violated("KEY", "evil.test", "GET")
        answer = await waiting
        (one,) = answer["entries"]
        assert (one["sandbox"], one["workspace"], one["secret"], one["count"]) == ("s1", "w", "KEY", 1)
        assert (await client.call("violations", told=answer["next"]))["entries"] == []


async def test_answers_find_their_calls(place: Place) -> None:
    async with await place.client() as client:
        await attach(client)
        waiting = asyncio.create_task(client.call("log", sandbox="s1", after=0, wait=20))
        answers = await asyncio.gather(*(client.call("explain", sandbox="s1", host=f"h{n}.test") for n in range(200)))
        assert len(answers) == 200
        assert not waiting.done()
        client.close()
        with pytest.raises(LinkLost):
            await waiting


async def test_the_log_waits_and_counts_what_is_lost(place: Place) -> None:
    async with await place.client() as client:
        await attach(client)
        session = place.registry._attached["s1"].session
        waiting = asyncio.create_task(client.call("log", sandbox="s1", after=0, limit=10, wait=10))
        await client.call("hello")
        session.record_name("a.test", session.policy.decide_name("a.test"))
        page = await waiting
        assert [entry["name"] for entry in page["entries"]] == ["a.test"]
        assert page["next"] == 1
        for number in range(2500):
            session.record_name(f"n{number}.test", session.policy.decide_name("a.test"))
        page = await client.call("log", sandbox="s1", after=1, limit=5, wait=0)
        assert page["lost"] == 500
        assert page["entries"][0]["seq"] == 502
        assert page["next"] == 506
        tail = await client.call("log", sandbox="s1", after=2501, limit=5, wait=0)
        assert tail == {"entries": [], "next": 2501, "lost": 0}


async def test_a_client_that_breaks_the_language_is_dropped_alone(place: Place) -> None:
    async with await place.client() as client:
        for junk in (b"\xff" * 64, encode_frame({"id": 1, "op": "attach"}, 4), b"\x00\x00\x00\x02\x00[]"):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, str(place.path))
            await loop.sock_sendall(sock, junk)
            async with asyncio.timeout(5):
                assert await loop.sock_recv(sock, 100) == b""
            sock.close()
        assert (await client.call("hello"))["version"] == PROTOCOL


async def test_a_client_that_does_not_read_is_held_up_alone(place: Place) -> None:
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await loop.sock_connect(sock, str(place.path))
    frame = encode_frame({"id": 1, "op": "hello"})
    flood = asyncio.create_task(loop.sock_sendall(sock, frame * 16_000))
    async with await place.client() as client:
        for _ in range(20):
            assert (await client.call("hello"))["version"] == PROTOCOL
        assert not flood.done()  # 64 requests under way, then it is not read from
    flood.cancel()
    await asyncio.gather(flood, return_exceptions=True)
    sock.close()


async def test_a_call_that_is_given_up_leaves_the_others(place: Place) -> None:
    async with await place.client() as client:
        await attach(client)
        with pytest.raises(TimeoutError):
            await client.call("log", sandbox="s1", after=0, wait=30, timeout=0.05)
        assert (await client.call("hello"))["sandboxes"] == ["s1"]


async def test_secrets_are_replaced_and_never_shown(place: Place) -> None:
    async with await place.client() as client:
        ca = {"certificate": "C", "key": "K-hunter2"}
        await client.call("secrets", workspace="w", values={"A": "hunter2"}, ca=ca)
        vault = place.shared.vault
        assert vault.value("w", "A") == "hunter2"
        authority = vault.authority("w")
        assert authority is not None
        assert authority.key == "K-hunter2"
        assert "hunter2" not in repr(vault) + repr(authority) + repr(place.shared)
        await client.call("secrets", workspace="w", values={}, ca=None)
        assert vault.value("w", "A") is None
        assert vault.authority("w") is None


async def test_the_operator_configures(place: Place) -> None:
    async with await place.client() as client:
        await attach(client)
        await client.call(
            "configure",
            resolvers=["10.0.0.1", "10.0.0.2:5353", "[fd00::1]:54"],
            proxy="socks5://user:hunter2@10.0.0.9",
            never=["10.0.0.0/8"],
            host_addresses=["45.90.9.9"],
        )
        assert place.shared.upstream.servers == (("10.0.0.1", 53), ("10.0.0.2", 5353), ("fd00::1", 54))
        assert "hunter2" not in repr(place.shared.dialer.proxy)
        verdict = (await client.call("explain", sandbox="s1", host="45.90.9.9"))["verdict"]
        assert verdict["rule"] == "private-address"
        allowed = {"id": "x", "action": "allow", "cidr": "10.0.0.0/8"}
        await client.call("policy", sandbox="s1", policy={**POLICY, "rules": [allowed]}, grants=[])
        assert not (await client.call("explain", sandbox="s1", host="10.0.0.5"))["verdict"]["allowed"]
        assert not (await client.call("explain", sandbox="s1", host=GATEWAY_IP4))["verdict"]["allowed"]
        datagrams = {"id": "u", "action": "allow", "protocol": "udp", "cidr": "45.90.1.0/24", "ports": [[123, 123]]}
        policy = {**POLICY, "rules": [allowed, datagrams]}
        await client.call("policy", sandbox="s1", policy=policy, grants=[])
        question = {"sandbox": "s1", "host": "45.90.1.1", "port": 123, "protocol": "udp"}
        verdict = (await client.call("explain", **question))["verdict"]
        assert not verdict["allowed"], "a proxy carries no datagrams"
        assert "proxy" in verdict["reason"]
        await client.call("configure", never=[], proxy=None, resolvers=None)
        assert (await client.call("explain", **question))["verdict"]["rule"] == "u"
        assert (await client.call("explain", sandbox="s1", host="10.0.0.5"))["verdict"]["rule"] == "x"
        assert place.shared.dialer.proxy is None


@pytest.mark.parametrize(
    ("question", "rule", "step"),
    [
        ({"host": "a.test"}, "a", "connection"),
        ({"host": "a.test", "method": "GET", "path": "/ok/1"}, "a", "request"),
        ({"host": "a.test", "method": "POST"}, "default", "request"),
        ({"host": "b.test"}, "default", "name"),
        ({"host": "45.90.1.1", "port": 22}, "default", "address"),
        ({"host": "169.254.169.254", "port": 80}, "private-address", "address"),
        ({"host": "a.test", "protocol": "udp"}, "udp", "address"),
        ({"host": "45.90.1.1", "protocol": "udp", "port": 123}, "ntp", "address"),
        ({"host": "a.test", "protocol": "udp", "port": 123}, "ntp-a", "address"),
        ({"host": "45.90.1.1", "protocol": "udp", "port": 53}, "udp", "address"),
        ({"host": "not a name"}, "no-name", "name"),
    ],
)
async def test_explain(place: Place, question: dict[str, Any], rule: str, step: str) -> None:
    only = {"id": "a", "action": "allow", "domain": "a.test", "methods": ["GET"], "paths": ["/ok*"]}
    async with await place.client() as client:
        await attach(client)
        ntp = {"id": "ntp", "action": "allow", "protocol": "udp", "cidr": "45.90.0.0/16", "ports": [[123, 123]]}
        named = {"id": "ntp-a", "action": "allow", "protocol": "udp", "domain": "a.test", "ports": [[123, 123]]}
        policy = {**POLICY, "mode": "allow-list", "rules": [only, ntp, named]}
        await client.call("policy", sandbox="s1", policy=policy, grants=[])
        verdict = (await client.call("explain", sandbox="s1", **question))["verdict"]
        assert (verdict["rule"], verdict["step"]) == (rule, step)
        assert verdict["allowed"] is (rule in {"a", "ntp", "ntp-a"})


async def test_a_client_that_goes_while_it_is_sent_to(place: Place) -> None:
    """Its descriptor is forgotten before the number is used again."""
    for _ in range(4):
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        await loop.sock_connect(sock, str(place.path))
        flood = asyncio.create_task(loop.sock_sendall(sock, encode_frame({"id": 1, "op": "hello"}) * 800))
        for _ in range(30):
            await asyncio.sleep(0)
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
        sock.close()
        async with await place.client() as client:
            assert (await client.call("hello"))["version"] == PROTOCOL
