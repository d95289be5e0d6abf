"""QMP: the codec against any chunking and nonsense, the client against a peer that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.engine.qemu.qmp import QmpClient, QmpError, QmpLost
from cloche_server.engine.qemu.qmp_codec import (
    MAX_LINE,
    Decoder,
    Failure,
    Greeting,
    QmpEvent,
    QmpProtocolError,
    Return,
    encode,
)

GREETING = (
    b'{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": ""}, "capabilities": []}}\r\n'
)
LINES = (
    GREETING
    + b'{"return": {}, "id": 1}\r\n'
    + b'{"timestamp": {}, "event": "RESUME"}\n'
    + b'{"error": {"class": "GenericError", "desc": "no"}, "id": 2}\n'
)
MESSAGES = [Greeting((10, 0, 2)), Return(1, {}), QmpEvent("RESUME", {}), Failure(2, "GenericError", "no")]


@given(st.lists(st.integers(1, 40), max_size=40))
def test_any_chunking(sizes: list[int]) -> None:
    decoder, found, position = Decoder(), [], 0
    for size in [*sizes, len(LINES)]:
        found += decoder.feed(LINES[position : position + size])
        position += size
    assert found == MESSAGES


@given(st.binary(max_size=200))
def test_nonsense_is_refused_or_ignored(data: bytes) -> None:
    with contextlib.suppress(QmpProtocolError):
        Decoder().feed(data + b"\n")


@pytest.mark.parametrize("line", [b"[]", b"1", b"{}", b'{"return": {}}', b'{"error": {}}', b'{"QMP": 1}', b"\xff"])
def test_bad_lines(line: bytes) -> None:
    with pytest.raises(QmpProtocolError):
        Decoder().feed(line + b"\n")


def test_a_line_has_a_limit() -> None:
    with pytest.raises(QmpProtocolError):
        Decoder().feed(b"x" * (MAX_LINE + 1))


def test_encode() -> None:
    assert json.loads(encode("cont", None, 3)) == {"execute": "cont", "id": 3}
    assert json.loads(encode("a", {"b": 1}, 4)) == {"execute": "a", "arguments": {"b": 1}, "id": 4}


Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def with_peer(tmp_path: Path, peer: Peer) -> tuple[asyncio.Server, Path]:
    path = tmp_path / "qmp.sock"
    return await asyncio.start_unix_server(peer, str(path)), path


async def polite(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GREETING)
    while line := await reader.readline():
        message = json.loads(line)
        if message["execute"] == "bad":
            writer.write(b'{"timestamp": {}, "event": "STOP"}\n')
            answer = {"error": {"class": "CommandNotFound", "desc": "what?"}, "id": message["id"]}
        elif message["execute"] == "hang up":
            break
        else:
            answer = {"return": message["execute"], "id": message["id"]}
        writer.write(json.dumps(answer).encode() + b"\n")
    writer.close()


async def test_commands_errors_events_and_loss(tmp_path: Path) -> None:
    events: list[QmpEvent] = []
    server, path = await with_peer(tmp_path, polite)
    async with server:
        client = await QmpClient.connect(path, events.append, timeout=5)
        assert client.version == (10, 0, 2)
        assert await asyncio.gather(*(client.execute(f"c{i}") for i in range(50))) == [f"c{i}" for i in range(50)]
        with pytest.raises(QmpError) as refused:
            await client.execute("bad")
        assert refused.value.kind == "CommandNotFound"
        assert [event.name for event in events] == ["STOP"]
        with pytest.raises(QmpLost):
            await client.execute("hang up")
        assert not client.connected
        with pytest.raises(QmpLost):
            await client.execute("c")


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(QmpLost):
        await QmpClient.connect(tmp_path / "none", lambda _: None, timeout=1)


async def test_a_peer_that_says_nothing(tmp_path: Path) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server, path = await with_peer(tmp_path, mute)
    async with server:
        with pytest.raises(QmpLost):
            await QmpClient.connect(path, lambda _: None, timeout=0.1)


async def test_a_peer_that_talks_nonsense(tmp_path: Path) -> None:
    async def nonsense(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp ready\r\n")
        await writer.drain()

    server, path = await with_peer(tmp_path, nonsense)
    async with server:
        with pytest.raises(QmpLost):
            await QmpClient.connect(path, lambda _: None, timeout=5)
