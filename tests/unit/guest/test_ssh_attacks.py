"""Clients, keys and agents that mean no good. What needs the real agent takes it in its developer mode."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from guest_fake_peer import Call, FakePeer
from ssh_site import OWNER, SB, TOKEN, SshSite, ssh_site

from cloche_server.app.sshkeys import WantedKey
from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient
from cloche_server.host.clock import SystemClock
from cloche_server.ssh import server as server_module

pytestmark = pytest.mark.thorough


@pytest.fixture
async def site(agent_client: GuestClient, tmp_path: Path) -> AsyncIterator[SshSite]:
    async with ssh_site(agent_client, tmp_path) as made:
        yield made


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def _raw(site: SshSite, data: bytes, times: int = 1) -> bytes:
    """What the server says to somebody who sends bytes; its end is the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    answer = b""
    try:
        for _ in range(times):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(20):
            answer = await reader.read(-1)
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer


async def test_bytes_that_are_no_ssh_cost_nothing(site: SshSite) -> None:
    before = _resident()
    hello = b"SSH-2.0-x\r\n"
    for data, times in (
        (b"A" * 65536, 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 1),
        (hello + b"\xff\xff\xff\xff" + bytes(65536), 1),
        (hello + b"\x00\x00\x00\x00" * 1000, 1),
        (hello + os.urandom(65536), 1),
        (hello + bytes(65536), 400),
    ):
        assert len(await _raw(site, data, times)) < 4096
    assert _resident() - before < 16 * 1024 * 1024
    assert (await site.ssh("echo still here")).out == b"still here\n"


async def test_a_packet_that_is_too_long_ends_the_connection(site: SshSite) -> None:
    client = await site.connect()
    client.send_packet(2, bytes(8_000_000))
    async with asyncio.timeout(20):
        await client.wait_closed()


async def test_a_key_of_another_workspace_opens_nothing_here(site: SshSite) -> None:
    theirs = asyncssh.generate_private_key("ssh-ed25519")
    stranger = replace(OWNER, workspace="other", prefix="pds_other")
    await site.keys.create(stranger, WantedKey(theirs.export_public_key().decode()))
    for name in (SB, "box"):
        with pytest.raises(asyncssh.PermissionDenied):
            await site.connect(username=name, client_keys=[theirs])


async def test_a_key_that_ends_between_the_look_at_it_and_the_login(site: SshSite) -> None:
    found, looks = site.keys.by_key, 0

    async def slow(name: str, fingerprint: str) -> Any:
        nonlocal looks
        looks += 1
        visit = await found(name, fingerprint)
        if looks == 2:  # the first one is a question of the client, whether it should prove that it has the key
            for one in await site.keys.list(OWNER):
                await site.keys.delete(OWNER, one.id)
        return visit

    site.keys.by_key = slow  # type: ignore[method-assign]
    client = await site.connect()
    async with asyncio.timeout(20):
        await client.wait_closed()


async def test_a_token_that_expires_ends_its_connection(site: SshSite) -> None:
    find = site.tokens.find

    async def soon(text: str) -> Any:
        info = await find(text)
        return None if info is None else replace(info, expires_at=SystemClock().now() + 0.5)

    site.tokens.find = soon
    client = await site.connect(client_keys=None, password=TOKEN)
    running = await client.create_process("sleep 100")
    async with asyncio.timeout(20):
        await client.wait_closed()
        await running.wait()


async def test_a_client_that_answers_nothing_is_gone(
    agent_client: GuestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "KEEPALIVE_SECONDS", 0.2)
    async with ssh_site(agent_client, tmp_path) as site:
        client = await site.connect()
        await client.create_process("sleep 100")
        stalled: Any = client._transport
        stalled.pause_reading()
        async with asyncio.timeout(30):
            await site.house.wait_empty()
        client.abort()


async def _listening(peer: FakePeer, client: GuestClient, *lines: bytes) -> Any:
    async def answer(call: Call) -> None:
        call.head(200)
        for line in lines:
            await call.send(line + b"\n")

    peer.handler = answer
    return await client.listen_port(0, None)


def _line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


async def test_an_agent_that_listens_to_nothing_or_elsewhere(peer: FakePeer, client: GuestClient) -> None:
    for first in (
        b"nonsense",
        b"[]",
        _line(type="accepted", id="1"),
        _line(type="listening"),
        _line(type="listening", port=0),
    ):
        with pytest.raises(ClocheError) as caught:
            await _listening(peer, client, first)
        assert caught.value.code == "guest.protocol"


async def test_an_agent_that_tells_of_impossible_connections(peer: FakePeer, client: GuestClient) -> None:
    begin = _line(type="listening", port=7)
    for line in (
        _line(type="accepted"), _line(type="accepted", id="../x"), _line(type="accepted", id="1&x=2"),
        _line(type="accepted", id=5), b"{", b"x" * 2_000_000,
    ):  # fmt: skip
        listener = await _listening(peer, client, begin, line)
        with pytest.raises(ClocheError) as caught:
            await listener.next()
        assert caught.value.code == "guest.protocol"
        listener.close()
    listener = await _listening(peer, client, begin, *[_line(type="other")] * 2000)
    with pytest.raises(ClocheError):
        await listener.next()
    lies = _line(type="accepted", id="1", **{"from": "\x1b[2Jevil"}, from_port=70000)
    listener = await _listening(peer, client, begin, lies)
    with pytest.raises(ClocheError):
        await listener.next()
    listener = await _listening(peer, client, begin, _line(type="accepted", id="1", **{"from": "\x1b[2Jevil"}))
    assert (await listener.next()).host == ""
