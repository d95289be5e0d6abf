"""Flow control of the link: nobody waits for another, nothing grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from guest_fake_peer import Call, FakePeer, get, until

from cloche_server.guest.errors import LinkTimeout
from cloche_server.guest.h2link import Link
from cloche_server.guest.h2stream import STREAM_WINDOW

pytestmark = pytest.mark.thorough


async def test_stalled_readers_hold_up_nobody_and_stay_in_their_windows(peer: FakePeer, link: Link) -> None:
    async def endless(call: Call) -> None:
        if call.path == "/small":
            await call.answer(b"ok")
            return
        call.head()
        while True:
            await call.send(b"x" * 65536)

    peer.handler = endless
    stalled = [await link.request("GET", f"/endless/{n}") for n in range(70)]
    await until(lambda: sum(len(s.buf) for s in link._streams.values()) == 70 * STREAM_WINDOW, 20)
    began = time.monotonic()
    assert await get(link, "/small") == b"ok"
    assert time.monotonic() - began < 1.0
    assert all(len(s.buf) <= STREAM_WINDOW for s in link._streams.values())
    taken = 0
    async for chunk in stalled[0].aiter_bytes():
        taken += len(chunk)
        if taken > 5 * STREAM_WINDOW:
            break
    for response in stalled:
        await response.aclose()
    assert not link._streams


async def test_a_slow_consumer_gets_everything(peer: FakePeer, link: Link) -> None:
    async def pour(call: Call) -> None:
        call.head()
        for n in range(40):
            await call.send(bytes([n]) * 100_000, end=n == 39)

    peer.handler = pour
    got = b""
    response = await link.request("GET", "/")
    async for chunk in response.aiter_bytes():
        got += chunk
        assert len(response._stream.buf) <= STREAM_WINDOW
        await asyncio.sleep(0.003)
    assert got == b"".join(bytes([n]) * 100_000 for n in range(40))


async def test_a_stalled_upload_holds_up_nobody(peer: FakePeer, link: Link) -> None:
    async def no_credit(call: Call) -> None:
        if call.path == "/stall":
            call.credit = call.keep = False
            await call.reset
        else:
            await call.answer(b"ok")

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"z" * 65536

    peer.handler = no_credit
    tasks = [asyncio.ensure_future(link.request("PUT", "/stall", body=body())) for _ in range(3)]
    await asyncio.sleep(0.1)
    assert await get(link, "/small") == b"ok"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await until(lambda: sum(c.reset.done() for c in peer.calls) == 3)


async def test_an_upload_nobody_takes_times_out(peer: FakePeer, link: Link) -> None:
    async def no_credit(call: Call) -> None:
        call.credit = call.keep = False
        await call.reset

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"z" * 65536

    peer.handler = no_credit
    with pytest.raises(LinkTimeout):
        await link.request("PUT", "/stall", body=body(), timeout=0.2)
    await until(lambda: peer.calls[0].reset.done())
    assert link.is_open


async def test_the_time_of_the_body_iterator_does_not_count(peer: FakePeer, link: Link) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(0.4)
        yield b"b"

    async def wait(call: Call) -> None:
        await call.ended.wait()
        await call.answer(bytes(call.body))

    peer.handler = wait
    assert await (await link.request("PUT", "/", body=body(), timeout=0.2)).read(10) == b"ab"
