"""File calls through the client against a fake agent."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import h2.errors
import pytest
from guest_fake_peer import Call, FakePeer, answers, query

from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient

ENTRY: dict[str, object] = {"name": "a\ufffd", "name_b64": "Yf8", "path": "/d/a\ufffd", "type": "file", "size": 3}
ENTRY |= {"mode": "4755", "mtime_ns": -5, "uid": 1, "gid": 2, "owner": "kim", "group": "2"}


async def test_read_file(peer: FakePeer, client: GuestClient) -> None:
    async def handler(call: Call) -> None:
        await call.answer(b"abc", extra=[("content-length", "3"), ("x-mode", "0640"), ("x-mtime-ns", "-12")])

    peer.handler = handler
    names = ["/a b", "/🤣.txt", "/50%2Foff", "/q?x=1&y#z", "/a+b", "/-rf", "/new\nline", "/back\\slash", "/é"]
    for name in names:
        async with await client.read_file(name, user="u:g") as body:
            assert (body.size, body.mode, body.mtime_ns) == (3, 0o640, -12)
            assert b"".join([chunk async for chunk in body]) == b"abc"
        assert query(peer.calls[-1]) == {"path": name, "user": "u:g"}
    body = await client.read_file(b"/bad\xff\xfename")
    assert await body.read(10) == b"abc"
    raw = query(peer.calls[-1])["path_b64"]
    assert base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)) == b"/bad\xff\xfename"
    with pytest.raises(ClocheError) as caught:
        await (await client.read_file("/x")).read(2)
    assert caught.value.code == "request.too_large"


async def test_a_file_that_breaks_off_is_an_error(peer: FakePeer, client: GuestClient) -> None:
    async def handler(call: Call) -> None:
        call.head(extra=[("content-length", "300"), ("x-mode", "0640"), ("x-mtime-ns", "1")])
        await call.send(b"abc")
        call.session.h2.reset_stream(call.id, h2.errors.ErrorCodes.INTERNAL_ERROR)
        call.session.flush()

    peer.handler = handler
    with pytest.raises(ClocheError) as caught:
        await (await client.read_file("/x")).read(1000)
    assert caught.value.code == "guest.error"


@pytest.mark.parametrize("path", ["relative", "/nul\0", "", "/\ud800"])
async def test_paths_that_cannot_be(client: GuestClient, path: str) -> None:
    with pytest.raises(ClocheError) as caught:
        await client.stat(path)
    assert caught.value.code == "request.invalid"


async def test_write_file(peer: FakePeer, client: GuestClient) -> None:
    answers(peer, {"path": "/a", "bytes": 5, "created": True})

    async def body() -> AsyncIterator[bytes]:
        yield b"he"
        yield b"llo"

    result = await client.write_file(
        "/a", body(), mode=0o4755, mtime_ns=7, append=True, parents=False, user="kim", content_length=5
    )
    assert result.created
    assert bytes(peer.calls[0].body) == b"hello"
    assert query(peer.calls[0]) == {
        "path": "/a",
        "mode": "4755",
        "mtime_ns": "7",
        "append": "1",
        "parents": "0",
        "user": "kim",
    }
    assert peer.calls[0].headers["content-length"] == "5"
    await client.write_file("/a", b"")
    assert peer.calls[1].headers["content-length"] == "0"


async def test_disk_full_in_mid_upload(peer: FakePeer, client: GuestClient) -> None:
    async def full(call: Call) -> None:
        while call.received < 100_000:
            call.more.clear()
            await call.more.wait()
        await call.answer(b'{"code":"no_space","message":"m","errno":"ENOSPC"}', 507)

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 50_000

    peer.handler = full
    with pytest.raises(ClocheError) as caught:
        await client.write_file("/a", body())
    assert caught.value.code == "file.no_space"
    assert caught.value.details == {"status": 507, "errno": "ENOSPC"}


async def test_success_before_the_end_of_an_upload_is_a_lie(peer: FakePeer, client: GuestClient) -> None:
    async def hasty(call: Call) -> None:
        await call.answer(b'{"path":"/a","bytes":5,"created":true}')

    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(60)

    peer.handler = hasty
    with pytest.raises(ClocheError) as caught:
        await client.write_file("/a", body())
    assert caught.value.code == "guest.protocol"


async def test_list_dir_goes_from_page_to_page(
    peer: FakePeer, client: GuestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloche_server.guest.files._PAGE", 2)

    async def handler(call: Call) -> None:
        asked = query(call)
        after = int(base64.urlsafe_b64decode(asked["after"] + "==")) if "after" in asked else -1
        numbers = range(after + 1, min(after + 1 + int(asked["limit"]), 5))
        page: dict[str, object] = {"path": "/d", "truncated": numbers[-1] < 4}
        if numbers[-1] < 4:
            page["next"] = base64.urlsafe_b64encode(str(numbers[-1]).encode()).decode().rstrip("=")
        page["entries"] = [{**ENTRY, "name": str(n), "name_b64": None} for n in numbers]
        await call.answer(json.dumps(page).encode())

    peer.handler = handler
    whole = await client.list_dir("/d")
    assert [e.name for e in whole.entries] == ["0", "1", "2", "3", "4"]
    assert not whole.truncated
    part = await client.list_dir("/d", limit=3)
    assert [e.name for e in part.entries] == ["0", "1", "2"]
    assert part.next == b"2"
    assert [e.name for e in (await client.list_dir("/d", after=part.next)).entries] == ["3", "4"]


async def test_a_list_that_turns_in_circles(peer: FakePeer, client: GuestClient) -> None:
    answers(peer, {"path": "/d", "truncated": True, "next": "YQ", "entries": [ENTRY]})
    with pytest.raises(ClocheError) as caught:
        await client.list_dir("/d")
    assert caught.value.code == "guest.protocol"


async def test_entries(peer: FakePeer, client: GuestClient) -> None:
    answers(peer, ENTRY)
    entry = await client.stat("/d/x", follow=True)
    assert entry.raw_name == b"a\xff"
    assert entry.mode == 0o4755
    assert entry.mtime_ns == -5
    answers(peer, {**ENTRY, "type": "novelty"})
    assert (await client.mkdir("/d", parents=True, mode=0o700)).type == "unknown"
    assert query(peer.calls[-1]) == {"path": "/d", "parents": "1", "mode": "0700"}
    for bad in ({"size": -1}, {"mode": "9"}, {"name": 5}, {"name_b64": "!"}, {"uid": "0"}):
        answers(peer, {**ENTRY, **bad})
        with pytest.raises(ClocheError) as caught:
            await client.stat("/d/x")
        assert caught.value.code == "guest.protocol"


async def test_delete_and_move(peer: FakePeer, client: GuestClient) -> None:
    answers(peer, None, 204)
    await client.delete("/a", recursive=True)
    assert query(peer.calls[-1]) == {"path": "/a", "recursive": "1"}
    await client.move("/a", b"/b\xff", overwrite=True)
    assert query(peer.calls[-1]) == {"path": "/a", "to_b64": "L2L_", "overwrite": "1"}
    answers(peer, {"code": "exists", "message": "m", "field": "to"}, 409)
    with pytest.raises(ClocheError, match="'/b' exists"):
        await client.move("/a", "/b")
