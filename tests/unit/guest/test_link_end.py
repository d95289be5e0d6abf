"""Calls and links that end early: cancel, time-outs, early answers, loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import h2.errors
import pytest
from guest_fake_peer import CANCEL, Call, FakePeer, get, until
from hyperframe.frame import DataFrame, HeadersFrame

from cloche_server.guest.errors import LinkLost, LinkTimeout, StreamBroken
from cloche_server.guest.h2link import Link

pytestmark = pytest.mark.thorough


async def test_closing_an_unfinished_response_resets_it(peer: FakePeer, link: Link) -> None:
    async def head_only(call: Call) -> None:
        call.head()
        await call.reset

    peer.handler = head_only
    async with await link.request("GET", "/"):
        pass
    assert await asyncio.wait_for(peer.calls[0].reset, 1) == CANCEL
    assert link.is_open


async def test_cancelling_the_caller_resets_the_call(peer: FakePeer, link: Link) -> None:
    async def silent(call: Call) -> None:
        await call.reset

    peer.handler = silent
    task = asyncio.ensure_future(link.request("GET", "/"))
    await until(lambda: peer.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(peer.calls[0].reset, 1) == CANCEL
    peer.handler = lambda call: call.answer(b"ok")
    assert await get(link) == b"ok"


async def test_an_answer_that_crosses_a_reset_harms_nobody(peer: FakePeer, link: Link) -> None:
    """The agent had begun to answer when it was told that nobody wants it; others have made calls since."""

    async def silent(call: Call) -> None:
        await call.reset

    peer.handler = silent
    task = asyncio.ensure_future(link.request("GET", "/"))
    await until(lambda: peer.calls)
    task.cancel()
    await asyncio.wait({task})
    peer.handler = lambda call: call.answer(b"ok")
    assert [await get(link) for _ in range(3)] == [b"ok"] * 3
    session = peer.sessions[0]
    head = HeadersFrame(peer.calls[0].id, flags=["END_HEADERS"])
    head.data = session.h2.encoder.encode([(":status", "200"), ("x-not-seen-before", "1")])
    session.transport.write(head.serialize() + DataFrame(peer.calls[0].id, b"late", flags=["END_STREAM"]).serialize())
    assert [await get(link) for _ in range(3)] == [b"ok"] * 3
    assert link.is_open


async def test_leaving_the_iteration_resets_the_call(peer: FakePeer, link: Link) -> None:
    async def pour(call: Call) -> None:
        call.head()
        await call.send(b"x" * 10)
        await call.reset

    peer.handler = pour
    response = await link.request("GET", "/")
    chunks = response.aiter_bytes()
    assert await anext(chunks) == b"x" * 10
    await chunks.aclose()
    assert await asyncio.wait_for(peer.calls[0].reset, 1) == CANCEL


async def test_a_timeout_resets_the_call_and_keeps_the_link(peer: FakePeer, link: Link) -> None:
    async def silent(call: Call) -> None:
        await call.reset

    peer.handler = silent
    with pytest.raises(LinkTimeout) as caught:
        await link.request("GET", "/", timeout=0.05)
    assert caught.value.code == "sandbox.unreachable"
    assert await asyncio.wait_for(peer.calls[0].reset, 1) == CANCEL
    assert link.is_open


async def test_a_silent_stream_is_lost(peer: FakePeer, link: Link) -> None:
    async def head_only(call: Call) -> None:
        call.head()
        await call.send(b"x")
        await call.reset

    peer.handler = head_only
    response = await link.request("GET", "/")
    got: list[bytes] = []
    with pytest.raises(LinkTimeout):
        async for chunk in response.aiter_bytes(idle_timeout=0.05):
            got.append(chunk)
    assert got == [b"x"]


async def test_early_error_answer_in_mid_upload(peer: FakePeer, link: Link) -> None:
    closed = asyncio.Event()

    async def full(call: Call) -> None:
        while call.received < 200_000:
            call.more.clear()
            await call.more.wait()
        await call.answer(b'{"code":"no_space"}', 507)

    async def body() -> AsyncIterator[bytes]:
        try:
            for _ in range(4):
                yield b"x" * 65536
            await asyncio.sleep(3600)  # a client that stalls must not hold the answer back
            yield b""
        finally:
            closed.set()

    peer.handler = full
    response = await asyncio.wait_for(link.request("PUT", "/", body=body()), 2)
    assert response.status == 507
    assert not response.sent_all
    assert await response.read(100) == b'{"code":"no_space"}'
    assert closed.is_set()
    await asyncio.wait_for(peer.calls[0].reset, 1)
    peer.handler = Call.answer
    assert await asyncio.wait_for(get(link, "/again"), 1) == b"{}"


async def test_a_failing_body_iterator_resets_the_upload(peer: FakePeer, link: Link) -> None:
    async def wait(call: Call) -> None:
        await call.reset

    async def body() -> AsyncIterator[bytes]:
        yield b"x" * 100
        raise OSError("the client is gone")

    peer.handler = wait
    with pytest.raises(OSError, match="the client is gone"):
        await link.request("PUT", "/", body=body())
    assert await asyncio.wait_for(peer.calls[0].reset, 1) == CANCEL


async def test_connection_drop_in_mid_stream(peer: FakePeer, link: Link) -> None:
    async def drop(call: Call) -> None:
        if call.path == "/wait":
            return
        call.head()
        await call.send(b"part")
        await asyncio.sleep(0.02)
        call.session.transport.close()

    peer.handler = drop
    pending = asyncio.ensure_future(link.request("GET", "/wait"))
    response = await link.request("GET", "/")
    got: list[bytes] = []
    with pytest.raises(LinkLost):
        async for chunk in response.aiter_bytes():
            got.append(chunk)
    assert got == [b"part"]
    with pytest.raises(LinkLost) as caught:
        await pending
    assert not caught.value.not_run
    await asyncio.wait_for(link.wait_closed(), 1)
    with pytest.raises(LinkLost) as after:
        await link.request("GET", "/")
    assert after.value.not_run


async def test_stream_reset_by_the_peer(peer: FakePeer, link: Link) -> None:
    async def broken(call: Call) -> None:
        if call.path == "/refused":
            call.session.h2.reset_stream(call.id, h2.errors.ErrorCodes.REFUSED_STREAM)
        else:
            call.head()
            await call.send(b"abc")
            call.session.h2.reset_stream(call.id, h2.errors.ErrorCodes.INTERNAL_ERROR)
        call.session.flush()

    peer.handler = broken
    response = await link.request("GET", "/")
    with pytest.raises(StreamBroken) as caught:
        await response.read(100)
    assert caught.value.code == "guest.error"
    with pytest.raises(StreamBroken) as refused:
        await link.request("GET", "/refused")
    assert refused.value.not_run
    assert link.is_open


async def test_goaway_ends_the_link(peer: FakePeer, link: Link) -> None:
    async def leave(call: Call) -> None:
        if call.path == "/leave":
            call.session.h2.close_connection(last_stream_id=call.id - 2)
            call.session.flush()

    peer.handler = leave
    first = asyncio.ensure_future(link.request("GET", "/first"))
    await until(lambda: peer.calls)
    with pytest.raises(LinkLost) as late:
        await link.request("GET", "/leave")
    with pytest.raises(LinkLost) as early:
        await first
    assert late.value.not_run
    assert not early.value.not_run
    await asyncio.wait_for(link.wait_closed(), 1)


async def test_closing_sends_goaway_and_fails_what_is_under_way(peer: FakePeer) -> None:
    async def silent(call: Call) -> None:
        await asyncio.sleep(60)

    peer.handler = silent
    link = await Link.connect(peer.path)
    pending = asyncio.ensure_future(link.request("GET", "/"))
    await until(lambda: peer.calls)
    await link.aclose()
    await link.aclose()
    with pytest.raises(LinkLost):
        await pending
    await asyncio.wait_for(peer.sessions[0].lost.wait(), 1)
    assert peer.sessions[0].goaway == 0


async def test_a_link_that_was_silent_for_long_is_given_up(
    peer: FakePeer, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(call: Call) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("cloche_server.guest.h2wire._SILENCE", 0.05)
    peer.handler = silent
    with pytest.raises(LinkTimeout):
        await link.request("GET", "/", timeout=0.1)
    assert not link.is_open
    await asyncio.wait_for(link.wait_closed(), 1)


async def test_the_silence_of_a_machine_that_stands_still_is_not_counted(
    peer: FakePeer, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def stopped(call: Call) -> None:
        if len(peer.calls) > 1:
            await call.reset
            return
        call.head()
        await go_on.wait()
        await call.send(b"late", end=True)

    monkeypatch.setattr("cloche_server.guest.h2wire._SILENCE", 0.0)
    peer.handler = stopped
    response = await link.request("GET", "/")
    link.stand_still(True)
    reading = asyncio.ensure_future(response.next_chunk(0.05))
    done, _ = await asyncio.wait({reading}, timeout=0.5)
    assert not done
    # Whoever asks a machine that stands still is told that it does not answer, and that does not end the link.
    with pytest.raises(LinkTimeout):
        await link.request("GET", "/", timeout=0.05)
    link.stand_still(False)
    go_on.set()
    assert await reading == b"late"
    assert link.is_open


async def test_a_machine_that_goes_on_and_says_nothing_is_lost(peer: FakePeer, link: Link) -> None:
    async def head_only(call: Call) -> None:
        call.head()
        await call.reset

    peer.handler = head_only
    response = await link.request("GET", "/")
    link.stand_still(True)
    reading = asyncio.ensure_future(response.next_chunk(0.05))
    await asyncio.wait({reading}, timeout=0.2)
    link.stand_still(False)
    with pytest.raises(LinkTimeout):
        await asyncio.wait_for(reading, 10)
