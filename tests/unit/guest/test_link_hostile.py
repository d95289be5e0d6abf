"""A peer that breaks the rules."""

from __future__ import annotations

import asyncio
import gc

import pytest
from guest_fake_peer import CANCEL, Call, FakePeer, get, until

from cloche_server.core.errors import ClocheError
from cloche_server.guest.errors import LinkLost
from cloche_server.guest.h2link import Link

pytestmark = pytest.mark.thorough


async def test_huge_response_headers_end_the_link(peer: FakePeer, link: Link) -> None:
    async def huge(call: Call) -> None:
        call.head(extra=[(f"x-{n}", "y" * 1000) for n in range(40)])

    peer.handler = huge
    with pytest.raises(LinkLost):
        await link.request("GET", "/")
    await asyncio.wait_for(link.wait_closed(), 1)


async def test_too_many_response_headers(peer: FakePeer, link: Link) -> None:
    async def many(call: Call) -> None:
        call.head(extra=[(f"x-{n}", "y") for n in range(100)])
        await call.reset

    peer.handler = many
    with pytest.raises(ClocheError) as caught:
        await link.request("GET", "/")
    assert caught.value.code == "guest.protocol"
    assert await asyncio.wait_for(peer.calls[0].reset, 1) == CANCEL
    assert link.is_open


async def test_a_body_over_the_limit(peer: FakePeer, link: Link) -> None:
    async def pour(call: Call) -> None:
        call.head()
        await call.send(b"x" * 500_000)
        await call.reset

    peer.handler = pour
    response = await link.request("GET", "/")
    with pytest.raises(ClocheError) as caught:
        await response.read(1000)
    assert caught.value.code == "guest.protocol"
    assert await asyncio.wait_for(peer.calls[0].reset, 1) == CANCEL


async def test_bytes_that_are_not_http2(peer: FakePeer, link: Link) -> None:
    peer.handler = lambda call: asyncio.sleep(10)
    pending = asyncio.ensure_future(link.request("GET", "/"))
    await until(lambda: peer.calls)
    peer.sessions[0].transport.write(b"HTTP/1.1 200 OK\r\n\r\n" * 100)
    with pytest.raises(LinkLost):
        await pending


async def test_a_flood_of_pings_ends_the_link(peer: FakePeer, link: Link) -> None:
    await get(link)
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
    peer.sessions[0].transport.write(ping * 8000)
    await asyncio.wait_for(link.wait_closed(), 5)


async def test_tiny_frames_do_not_hold_the_event_loop(peer: FakePeer, link: Link) -> None:
    async def crumbs(call: Call) -> None:
        call.head()
        session = call.session
        session.flush()
        frame = b"\x00\x00\x01\x00\x00" + call.id.to_bytes(4, "big") + b"x"
        for _ in range(10):
            session.transport.write(frame * 5_000)
            await asyncio.sleep(0.01)

    peer.handler = crumbs
    response = await link.request("GET", "/")
    worst, count = 0.0, 0
    loop_time = asyncio.get_running_loop().time

    async def watch() -> None:
        nonlocal worst
        while True:
            before = loop_time()
            await asyncio.sleep(0.001)
            worst = max(worst, loop_time() - before)

    watcher = asyncio.ensure_future(watch())
    while count < 50_000:
        chunk = await response.next_chunk()
        assert chunk is not None
        count += len(chunk)
    watcher.cancel()
    await response.aclose()
    # All of them in one go would take more than a second.
    assert worst < 0.5


async def test_many_resets_leave_nothing_behind(peer: FakePeer, link: Link) -> None:
    async def head_only(call: Call) -> None:
        call.head()

    peer.handler = head_only
    for _ in range(300):
        async with await link.request("GET", "/"):
            pass
    peer.handler = Call.answer
    await get(link)
    gc.collect()
    assert not link._streams
    assert len(link._h2.streams) < 3
