"""Forwarded ports and Unix sockets, both ways, over the real agent in its developer mode."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from ssh_site import SshSite, ssh_site

from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient
from cloche_server.ssh.remote import MAX_ARRIVALS, MAX_LISTENERS, is_listenable

pytestmark = pytest.mark.thorough


@pytest.fixture
async def site(agent_client: GuestClient, tmp_path: Path) -> AsyncIterator[SshSite]:
    async with ssh_site(agent_client, tmp_path) as made:
        yield made


@pytest.fixture
def short() -> Iterator[Path]:
    # tmp_path can be longer than the 107 bytes of a Unix socket's name
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        yield Path(folder)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends everything back once its end has come: only a forwarded end of one direction lets it answer."""
    data = await reader.read(-1)
    writer.write(hashlib.sha256(data).hexdigest().encode())
    await writer.drain()
    writer.close()


async def _asks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    writer.write_eof()
    answer = await reader.read(-1)
    writer.close()
    return answer


async def _free(port: int) -> None:
    """Until nothing listens."""
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.02)


async def test_a_port_of_the_client_is_there_in_the_sandbox(site: SshSite) -> None:
    data = os.urandom(3_000_000)
    want = hashlib.sha256(data).hexdigest().encode()
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    own = server.sockets[0].getsockname()[1]
    async with await site.connect() as client:
        listener = await client.forward_remote_port("localhost", 0, "127.0.0.1", own)
        port = listener.get_port()
        answers = await asyncio.gather(
            *[_asks(*await asyncio.open_connection("127.0.0.1", port), data) for _ in range(5)]
        )
        assert set(answers) == {want}
        with pytest.raises(asyncssh.ChannelListenError):
            await client.forward_remote_port("localhost", port, "127.0.0.1", own)
        listener.close()
        await listener.wait_closed()
        await _free(port)
        # The same client asks again, and the connection's end ends it.
        port = (await client.forward_remote_port("", 0, "127.0.0.1", own)).get_port()
    await _free(port)
    server.close()


async def test_openssh_forwards_its_port(site: SshSite, tmp_path: Path) -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    own = server.sockets[0].getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = (
        f"exec 3<>/dev/tcp/127.0.0.1/{port}; "
        'python3 -c \'import socket,sys; s=socket.socket(fileno=3); s.sendall(b"abc"); s.shutdown(1); '
        "sys.stdout.write(s.recv(100).decode())'"
    )
    done = await site.ssh(
        f"bash -c {_quoted(script)}", flags=["-R", f"{port}:127.0.0.1:{own}", "-o", "ExitOnForwardFailure=yes"]
    )
    assert done.out.decode() == hashlib.sha256(b"abc").hexdigest(), done.err
    taken = await site.ssh("true", flags=["-v", "-R", f"{own}:127.0.0.1:1", "-o", "ExitOnForwardFailure=yes"])
    assert taken.code == 255
    assert f"Something listens on port {own} of the sandbox already" in taken.err
    other = await site.ssh(
        "true", flags=["-v", "-R", f"203.0.113.9:{port}:127.0.0.1:1", "-o", "ExitOnForwardFailure=yes"]
    )
    assert other.code == 255
    assert "ask for localhost" in other.err
    server.close()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


async def test_unix_sockets_both_ways(site: SshSite, short: Path) -> None:
    data = os.urandom(1_000_000)
    want = hashlib.sha256(data).hexdigest().encode()
    server = await asyncio.start_unix_server(_echo, short / "server")
    async with await site.connect() as client:
        reader, writer = await client.open_unix_connection(str(short / "server"))
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == want
        for path in (short / "none", "relative", short / "key"):
            with pytest.raises(asyncssh.ChannelOpenError):
                await client.open_unix_connection(str(path))
        listener = await client.forward_remote_path(str(short / "made"), str(short / "server"))
        assert await _asks(*await asyncio.open_unix_connection(short / "made"), data) == want
        assert (short / "made").stat().st_mode & 0o777 == 0o600
        with pytest.raises(asyncssh.ChannelListenError):
            await client.forward_remote_path(str(short / "made"), "/x")
        listener.close()
        await listener.wait_closed()
        await client.forward_remote_path(str(short / "again"), str(short / "server"))
    async with asyncio.timeout(20):
        while any((short / name).exists() for name in ("made", "again")):
            await asyncio.sleep(0.02)
    server.close()


async def test_listeners_and_what_comes_to_them_have_a_limit(site: SshSite) -> None:
    async with await site.connect() as client:
        waiting: list[Any] = []
        listeners = [await client.forward_remote_port("localhost", 0, "127.0.0.1", 1) for _ in range(MAX_LISTENERS)]
        with pytest.raises(asyncssh.ChannelListenError):
            await client.forward_remote_port("localhost", 0, "127.0.0.1", 1)
        for one in listeners:
            one.close()
            await one.wait_closed()

        async def stuck(reader: Any, writer: Any) -> None:
            waiting.append(writer)

        listener = await client.start_server(lambda *_: stuck, "localhost", 0, encoding=None)
        pairs = [await asyncio.open_connection("127.0.0.1", listener.get_port()) for _ in range(MAX_ARRIVALS + 10)]
        async with asyncio.timeout(20):
            while len(waiting) < MAX_ARRIVALS:
                await asyncio.sleep(0.02)
        for writer in waiting[:10]:
            writer.close()
        for _, local in pairs[:10]:
            local.close()
        async with asyncio.timeout(20):
            while len(waiting) < MAX_ARRIVALS + 10:
                await asyncio.sleep(0.02)
        for _, local in pairs:
            local.close()


async def test_a_client_that_refuses_what_comes(site: SshSite) -> None:
    async with await site.connect() as client:
        port = (await client.forward_remote_port("localhost", 0, "127.0.0.1", 1)).get_port()
        for _ in range(MAX_ARRIVALS + 5):  # none of them may keep its place
            with pytest.raises(ConnectionResetError):  # perhaps while it is made
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    assert await reader.read() == b"never"
                finally:
                    writer.close()


async def test_a_sandbox_that_goes_ends_the_connection(site: SshSite, agent_client: GuestClient) -> None:
    client = await site.connect()
    await client.forward_remote_port("localhost", 0, "127.0.0.1", 1)
    await agent_client.aclose()
    async with asyncio.timeout(20):
        await client.wait_closed()


async def test_a_sandbox_that_is_not_there_refuses_all(site: SshSite) -> None:
    async with await site.connect() as client:

        def refuse(*_: Any) -> Any:
            raise ClocheError("sandbox.not_found", "there is no sandbox with this id")

        dialer: Any = site.house.dialer
        dialer.listen = dialer.dial_unix = dialer.dial = _async(refuse)
        with pytest.raises(asyncssh.ChannelListenError):
            await client.forward_remote_port("localhost", 0, "127.0.0.1", 1)
        for opened in (client.open_unix_connection("/x"), client.open_connection("localhost", 80)):
            with pytest.raises(asyncssh.ChannelOpenError, match="no sandbox"):
                await opened
        assert (await client.run("echo still here")).stdout == "still here\n"


def _async(fn: Any) -> Any:
    async def call(*args: Any) -> Any:
        return fn(*args)

    return call


async def test_requests_that_wait_for_the_sandbox_do_not_pile_up(site: SshSite) -> None:
    never = asyncio.Event()

    async def listen(*_: Any) -> Any:
        await never.wait()

    dialer: Any = site.house.dialer
    dialer.listen = listen
    client = await site.connect()
    for _ in range(2000):
        client.send_packet(80, asyncssh.packet.String("keepalive@x"), asyncssh.packet.Boolean(False))
    client.send_packet(
        80, asyncssh.packet.String("tcpip-forward"), asyncssh.packet.Boolean(True),
        asyncssh.packet.String("localhost"), asyncssh.packet.UInt32(0),
    )  # fmt: skip
    for _ in range(2000):
        client.send_packet(80, asyncssh.packet.String("keepalive@x"), asyncssh.packet.Boolean(False))
    async with asyncio.timeout(20):
        await client.wait_closed()


def test_where_a_client_may_listen() -> None:
    assert all(is_listenable(one) for one in ("", "*", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::"))
    assert not any(is_listenable(one) for one in ("10.0.0.1", "example.com", "[", "fe80::1", "169.254.169.254"))


async def test_one_connection_carries_all_kinds_at_once(site: SshSite, short: Path) -> None:
    """What an editor does: a master connection, and commands, files and ports over it."""
    server = await asyncio.start_unix_server(_echo, short / "server")
    master = ["-o", f"ControlPath={short / 'm'}", "-o", "ControlPersist=30"]
    assert (await site.ssh("true", flags=["-M", *master])).code == 0
    many = await asyncio.gather(*[site.ssh(f"echo {n}; exit {n}", flags=master) for n in range(10)])
    assert [(one.code, one.out) for one in many] == [(n, f"{n}\n".encode()) for n in range(10)]
    forward = await site.ssh(flags=[*master, "-O", "forward", "-L", f"{short / 'l'}:{short / 'server'}"])
    assert forward.code == 0, forward.err
    assert (
        await _asks(*await asyncio.open_unix_connection(short / "l"), b"x") == hashlib.sha256(b"x").hexdigest().encode()
    )
    assert len(site.audit) == 1, "only one connection was made"
    assert (await site.ssh(flags=[*master, "-O", "exit"])).code == 0
    server.close()
