"""Who comes in over SSH, where connections may go, and when they end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from ssh_site import NARROW, OTHER, OWNER, READER, SB, TOKEN, SshSite, ssh_site

from cloche_server.app.calls import revoked
from cloche_server.guest.client import GuestClient
from cloche_server.ssh.forward import is_sandbox
from cloche_server.ssh.house import MAX_STRANGERS_OF_ONE, Limits


@pytest.fixture
async def site(agent_client: GuestClient, tmp_path: Path) -> AsyncIterator[SshSite]:
    limits = Limits(sandbox=2, failures=5, idle=0)
    async with ssh_site(agent_client, tmp_path, limits) as made:
        yield made


def password(text: str, **more: Any) -> dict[str, Any]:
    return {"client_keys": None, "password": text, **more}


async def test_a_token_is_a_password(site: SshSite) -> None:
    async with await site.connect(**password(TOKEN)) as client:
        assert (await client.run("echo in")).stdout == "in\n"
    async with await site.connect(**password(NARROW, username=OTHER)) as client:
        assert (await client.run("echo in")).stdout == "in\n"
    for wrong in (password(NARROW), password(READER), password("pds_" + "0" * 32)):
        with pytest.raises(asyncssh.PermissionDenied):
            await site.connect(**wrong)
    told = [(one.status, one.token, one.code) for one in site.audit]
    assert told == [
        (200, TOKEN[:12], None),
        (200, NARROW[:12], None),
        (401, None, "sandbox.not_found"),
        (401, None, "auth.forbidden"),
        (401, None, "auth.invalid_token"),
    ]
    assert TOKEN not in repr(site.audit)


async def test_a_key_that_is_not_known_and_one_that_is_deleted(site: SshSite) -> None:
    stranger = asyncssh.generate_private_key("ssh-ed25519")
    with pytest.raises(asyncssh.PermissionDenied):
        await site.connect(client_keys=[stranger])
    client = await site.connect()
    (key,) = await site.keys.list(OWNER)
    await site.keys.delete(OWNER, key.id)
    async with asyncio.timeout(10):
        await client.wait_closed()
    with pytest.raises(asyncssh.PermissionDenied):
        await site.connect()


async def test_what_ends_a_connection(site: SshSite) -> None:
    client = await site.connect(**password(TOKEN))
    process = await client.create_process("sleep 100")
    site.tokens.calls.end(TOKEN[:12], revoked())
    async with asyncio.timeout(10):
        await client.wait_closed()
    assert process.exit_status is None
    client = await site.connect()
    site.access.entries[SB].ended.set()
    async with asyncio.timeout(10):
        await client.wait_closed()


async def test_limits_of_a_sandbox(site: SshSite) -> None:
    first, second = await site.connect(), await site.connect()
    with pytest.raises((asyncssh.Error, ConnectionError)):
        third = await site.connect()
        await third.run("true", check=True)
    first.close()
    await first.wait_closed()
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(asyncssh.Error, ConnectionError):
                async with await site.connect() as again:
                    await again.run("true", check=True)
                break
    second.close()


async def test_guesses_are_slowed_down(site: SshSite) -> None:
    for _ in range(5):
        with pytest.raises(asyncssh.PermissionDenied):
            await site.connect(**password("pds_" + "1" * 32))
    with pytest.raises((asyncssh.Error, ConnectionError)) as refused:
        await site.connect()
    assert not isinstance(refused.value, asyncssh.PermissionDenied)


async def test_who_says_nothing_takes_no_more_than_a_few_places(site: SshSite) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_STRANGERS_OF_ONE):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", site.port)))
            one.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(one, 4) == b"SSH-"
        with pytest.raises((asyncssh.Error, ConnectionError)):
            await site.connect()


async def test_a_port_of_the_sandbox_and_nothing_else(site: SshSite) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with await site.connect() as client:
        reader, writer = await client.open_connection("localhost", port, encoding=None)
        data = bytes(range(256)) * 8000
        sending = asyncio.ensure_future(_send(writer, data))
        assert await reader.readexactly(len(data)) == data
        await sending
        writer.write_eof()
        assert await reader.read() == b""
        for host, why in (("10.0.0.1", "localhost"), ("example.com", "localhost"), ("0.0.0.0", "localhost")):
            with pytest.raises(asyncssh.ChannelOpenError, match=why):
                await client.open_connection(host, port)
        server.close()
        await server.wait_closed()
        with pytest.raises(asyncssh.ChannelOpenError, match="othing listens"):
            await client.open_connection("127.0.0.1", port)
        with pytest.raises(asyncssh.ChannelListenError):
            await client.forward_remote_port("10.0.0.1", 0, "127.0.0.1", port)
        with pytest.raises(asyncssh.ChannelOpenError):
            await client.open_unix_connection("/var/run/docker.sock")


async def _send(writer: Any, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


def test_what_the_sandbox_is_called_from_inside() -> None:
    assert all(is_sandbox(one) for one in ("localhost", "LOCALHOST.", "127.0.0.1", "127.9.9.9", "::1", "[::1]"))
    assert not any(is_sandbox(one) for one in ("", "localhost.evil", "0.0.0.0", "169.254.169.254", "::", "host"))


async def test_nothing_moves_for_too_long(agent_client: GuestClient, tmp_path: Path) -> None:
    async with ssh_site(agent_client, tmp_path, Limits(idle=0.3)) as site:
        client = await site.connect()
        async with asyncio.timeout(10):
            await client.wait_closed()
