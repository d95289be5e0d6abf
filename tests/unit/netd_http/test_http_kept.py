"""Connections to servers that wait for the next request of the same sandbox, and certificates that are made ahead."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import replace
from typing import Any

import pytest
from http_kit import HOST, Double, Recorder, Stage, answered, get, grant

from cloche_server.netd.http import pool as pool_module
from cloche_server.netd.http import trust

OTHER = "other.example.test"


async def site_of(scene: Stage, *names: str) -> Recorder:
    site = Recorder()
    await scene.server(site, *(names or (HOST,)))
    return site


async def settled(scene: Stage) -> None:
    """What the engine does after the last answer is done."""
    while scene.serving:
        await asyncio.wait(scene.serving)


async def asked(scene: Stage, door: int, request: bytes = b"") -> int:
    found = await scene.ask(door, request or get())
    await settled(scene)
    return found.status


async def test_the_next_connection_of_a_sandbox_finds_the_one_to_the_server(scene: Stage) -> None:
    site, door = await site_of(scene), await scene.door()
    assert [await asked(scene, door) for _ in range(3)] == [200, 200, 200]
    assert (site.connections, len(site.seen)) == (1, 3)


async def test_no_sandbox_finds_that_of_another(scene: Stage) -> None:
    site, door = await site_of(scene), await scene.door()
    assert await asked(scene, door) == 200
    scene.carrier = replace(scene.carrier)  # the same in everything but who it is
    assert await asked(scene, await scene.door()) == 200
    assert site.connections == 2


@pytest.mark.parametrize("change", ["address", "name", "port"])
async def test_it_serves_one_name_port_and_address_only(scene: Stage, change: str) -> None:
    await site_of(scene, HOST, OTHER)
    assert await asked(scene, await scene.door()) == 200
    if change == "address":  # the policy, or the resolver, leads to another one now
        scene.carrier.network = "127.1"
        assert await asked(scene, await scene.door()) == 200
    elif change == "port":
        assert await asked(scene, await scene.door(port=8443), get(host=f"{HOST}:8443")) == 200
    else:
        other = await scene.ask(await scene.door(OTHER), get(host=OTHER), name=OTHER)
        assert other.status == 502  # its certificate is that of the first name: it was asked for anew
    assert len(scene.carrier.dials) == 2


async def test_a_change_of_policy_or_secrets_ends_it(scene: Stage) -> None:
    site, door = await site_of(scene), await scene.door()
    assert await asked(scene, door) == 200
    scene.engine.forget(scene.carrier)
    assert await asked(scene, door) == 200
    assert site.connections == 2


async def test_what_changes_something_gets_a_connection_of_its_own(scene: Stage) -> None:
    """A server may close the one that waits at the same moment, and such a request must not be sent twice."""
    site, door = await site_of(scene), await scene.door()
    assert await asked(scene, door) == 200
    assert await asked(scene, door, get(method="POST", body=b"x")) == 200
    assert await asked(scene, door, get(method="DELETE")) == 200
    assert site.connections == 3


@pytest.mark.parametrize("word", ["NTLM abc", "Negotiate abc"])
async def test_credentials_of_a_connection_are_left_to_nobody(scene: Stage, word: str) -> None:
    site, door = await site_of(scene), await scene.door()
    assert await asked(scene, door, get("/", f"Authorization: {word}")) == 200
    assert await asked(scene, door) == 200
    assert site.connections == 2


@pytest.mark.parametrize("how", ["silently", "at the next request", "with words"])
async def test_a_server_that_ends_it_is_asked_anew(scene: Stage, how: str) -> None:
    """The guest has made a connection of its own, and cannot know of one that had waited."""
    connections = 0

    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answered(b"ok"))
        await writer.drain()
        if how == "with words":
            writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        elif how == "at the next request":
            await reader.read(1)

    await scene.server(site)
    door = await scene.door()
    for count in (1, 2, 3):
        assert await asked(scene, door) == 200
        await asyncio.sleep(0.05 if how != "at the next request" else 0)
        assert connections == count
    assert scene.carrier.denials() == []


async def test_what_is_not_at_its_end_is_not_kept(scene: Stage) -> None:
    """A guest that goes in the middle of an answer leaves nothing of it to the next one."""
    connections = 0

    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answered(b"whole") if connections > 1 else b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        await writer.drain()
        await reader.read()

    await scene.server(site)
    door = await scene.door()
    reader, writer = await scene.connect(door)
    writer.write(get())
    await reader.readuntil(b"half")
    writer.close()
    await settled(scene)
    assert (await scene.ask(door, get())).body == b"whole"
    assert connections == 2


async def test_they_are_few_and_do_not_wait_for_ever(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MOST_OF_ONE", 2)
    site, door = await site_of(scene), await scene.door()
    await asyncio.gather(*(scene.ask(door, get()) for _ in range(5)))
    await settled(scene)
    assert scene.engine.waiting == 2
    monkeypatch.setattr(pool_module, "WAITS", 0.01)
    assert await asked(scene, door) == 200
    scene.engine.forget(Double())  # another one
    async with asyncio.timeout(5):
        while scene.engine.waiting > 1:
            await asyncio.sleep(0.01)
    assert len(site.seen) == 6


async def test_a_certificate_is_made_once_ahead_for_each_name(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = trust._make

    def counted(authority: Any, name: str, now: float) -> ssl.SSLContext:
        made.append(name)
        return real(authority, name, now)

    monkeypatch.setattr(trust, "_make", counted)
    await site_of(scene)
    # One that cannot be in a certificate harms nobody.
    scene.engine.prepare("ws1", [HOST, OTHER, "a..b" * 90])
    assert await asked(scene, await scene.door()) == 200
    assert await asked(scene, await scene.door()) == 200
    assert sorted(made)[1:] == sorted([HOST, OTHER])


async def test_a_program_that_comes_again_resumes_its_tls(scene: Stage) -> None:
    await site_of(scene)
    scene.carrier.grants = [grant()]
    door = await scene.door()
    assert await asyncio.to_thread(_resumed, scene, door)


def _resumed(scene: Stage, door: int) -> bool:
    context, session, seen = scene.trusting(), None, []
    for _ in range(2):
        with context.wrap_socket(
            socket.create_connection(("127.0.0.1", door)), server_hostname=HOST, session=session
        ) as stream:
            stream.sendall(get())
            while b"ok" not in stream.recv(4096):
                pass
            session = stream.session
            seen.append(stream.session_reused)
    return seen == [False, True]
