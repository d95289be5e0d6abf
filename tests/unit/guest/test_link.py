"""One link against a fake agent over a real Unix socket: connecting, many calls, big bodies."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from guest_fake_peer import Call, FakePeer, Session, get, until

from cloche_server.core.errors import ClocheError
from cloche_server.guest.errors import LinkLost
from cloche_server.guest.h2link import Link

pytestmark = pytest.mark.thorough


async def test_connect_and_a_small_call(peer: FakePeer, link: Link) -> None:
    assert link.generation == 1
    response = await link.request("GET", "/v1/x", query=[("path", "/a b&c=ü"), ("q", "1")])
    assert response.status == 200
    assert await response.read(100) == b"{}"
    assert peer.calls[0].path == "/v1/x?path=/a%20b%26c%3D%C3%BC&q=1"
    assert peer.calls[0].headers[":authority"] == "agent"
    assert peer.sessions[0].lines[0][1] == 0
    assert len(peer.sessions[0].lines) == 1


async def test_garbage_before_sync(peer: FakePeer) -> None:
    old = f"\nCLOCHE-SYNC-OK {'0' * 32} 0 1\n".encode()
    peer.greeting = b"\x00\x00\x04\x00\x00" * 4000 + old + b"\nCLOCHE-SYNC-OK "
    link = await Link.connect(peer.path)
    assert await get(link) == b"{}"
    await link.aclose()


async def test_lost_lines_are_repeated_and_the_last_echo_awaited(peer: FakePeer) -> None:
    real = peer.on_line
    held: list[tuple[Session, str, int]] = []

    def slow(session: Session, nonce: str, number: int) -> None:
        held.append((session, nonce, number))
        if number == 2:
            for item in held:
                real(*item)

    peer.on_line = slow  # type: ignore[method-assign]
    link = await Link.connect(peer.path)
    assert [number for _, _, number in held] == [0, 1, 2]
    assert await get(link) == b"{}"
    await link.aclose()


async def test_a_peer_that_never_answers(peer: FakePeer) -> None:
    peer.mute = True
    began = time.monotonic()
    with pytest.raises(LinkLost) as caught:
        await Link.connect(peer.path, timeout=0.4)
    assert time.monotonic() - began < 1.0
    assert caught.value.code == "sandbox.unreachable"
    assert caught.value.not_run
    await asyncio.wait_for(peer.sessions[0].lost.wait(), 1)


async def test_no_socket(socket_path: Path) -> None:
    with pytest.raises(LinkLost) as caught:
        await Link.connect(str(socket_path))
    for phrase in ("connection refused", "no route to host", "i/o timeout"):
        assert phrase not in caught.value.message.lower()


async def test_cancelled_connect_hangs_up(peer: FakePeer) -> None:
    peer.mute = True
    task = asyncio.ensure_future(Link.connect(peer.path))
    await until(lambda: peer.sessions)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(peer.sessions[0].lost.wait(), 1)


async def test_unknown_generation(peer: FakePeer) -> None:
    peer.generation = 0
    with pytest.raises(LinkLost):
        await Link.connect(peer.path, timeout=1)


async def test_a_thousand_concurrent_calls(peer: FakePeer, link: Link) -> None:
    async def echo(call: Call) -> None:
        await call.answer(call.path.encode())

    peer.handler = echo
    answers = await asyncio.gather(*(get(link, f"/n/{n}") for n in range(1000)))
    assert answers == [f"/n/{n}".encode() for n in range(1000)]
    assert not link._streams


async def test_small_writes_of_one_turn_share_a_write(peer: FakePeer, link: Link) -> None:
    await get(link)
    writes: list[int] = []
    real = link._transport.write

    def write(data: bytes | bytearray | memoryview) -> None:
        writes.append(len(data))
        real(data)

    link._transport.write = write  # type: ignore[method-assign]
    await asyncio.gather(*(get(link) for _ in range(50)))
    assert len(writes) <= 4


async def test_stream_limit_of_the_peer_is_kept(peer: FakePeer) -> None:
    peer.max_streams = 5
    running = most = 0

    async def slow(call: Call) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        await call.answer()

    peer.handler = slow
    link = await Link.connect(peer.path)
    await get(link)
    await asyncio.gather(*(get(link) for _ in range(60)))
    assert most <= 5
    await link.aclose()


async def test_no_free_stream_is_a_clear_error(peer: FakePeer) -> None:
    peer.max_streams = 1
    link = await Link.connect(peer.path)
    await get(link)

    async def head_only(call: Call) -> None:
        call.head()

    peer.handler = head_only
    held = await link.request("GET", "/hold")
    with pytest.raises(ClocheError) as caught:
        await link.request("GET", "/second", timeout=0.1)
    assert caught.value.code == "guest.exhausted"
    waiting = asyncio.ensure_future(link.request("GET", "/third"))
    await asyncio.sleep(0.02)
    await held.aclose()
    assert (await asyncio.wait_for(waiting, 1)).status == 200
    await link.aclose()


async def test_hundred_megabytes_down(peer: FakePeer, link: Link) -> None:
    block = bytes(range(256)) * 4096

    async def pour(call: Call) -> None:
        call.head()
        for n in range(100):
            await call.send(block, end=n == 99)

    peer.handler = pour
    digest, count = hashlib.sha256(), 0
    response = await link.request("GET", "/big")
    async for chunk in response.aiter_bytes():
        digest.update(chunk)
        count += len(chunk)
    assert count == 100 * len(block)
    assert digest.digest() == hashlib.sha256(block * 100).digest()


async def test_hundred_megabytes_up_honours_back_pressure(peer: FakePeer, link: Link) -> None:
    block = bytes(range(256)) * 4096
    ahead = 0

    async def count(call: Call) -> None:
        call.keep = False
        await call.ended.wait()
        await call.answer(str(call.received).encode())

    async def body() -> AsyncIterator[bytes]:
        nonlocal ahead
        for n in range(100):
            yield block
            if peer.calls:
                ahead = max(ahead, (n + 1) * len(block) - peer.calls[0].received)

    peer.handler = count
    response = await link.request("PUT", "/up", body=body())
    assert response.sent_all
    assert await response.read(20) == str(100 * len(block)).encode()
    assert ahead < 8 << 20


async def test_odd_chunks_arrive_in_order(peer: FakePeer, link: Link) -> None:
    async def echo(call: Call) -> None:
        await call.ended.wait()
        await call.answer(hashlib.sha256(call.body).hexdigest().encode())

    sizes = [0, 1, 2, 65535, 65536, 65537, 131072, 131073, 300_000, 0, 7]
    data = [bytes([n]) * size for n, size in enumerate(sizes)]

    async def body() -> AsyncIterator[bytes]:
        for chunk in data:
            yield chunk

    peer.handler = echo
    wanted = hashlib.sha256(b"".join(data)).hexdigest().encode()
    assert await (await link.request("PUT", "/up", body=body())).read(100) == wanted
    assert await (await link.request("PUT", "/up", body=b"".join(data))).read(100) == wanted
    empty = hashlib.sha256().hexdigest().encode()
    assert await (await link.request("PUT", "/up", body=b"")).read(100) == empty
