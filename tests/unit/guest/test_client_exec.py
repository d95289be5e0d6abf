"""Commands through the client against a fake agent."""

from __future__ import annotations

import asyncio
import json

import pytest
from guest_fake_peer import CANCEL, Call, FakePeer, answers

from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient
from cloche_server.guest.frames import Exit, Gap, Heartbeat, Output, Started, encode_frame
from cloche_server.guest.types import ExecRequest

END = Exit(0, "exited", None, None, 1.0, 1.0, 0.5, 900, None, 5, 0, 0, 0)


def plays(peer: FakePeer, *parts: bytes, end: bool = True) -> None:
    async def handler(call: Call) -> None:
        await call.ended.wait()
        call.head()
        for n, part in enumerate(parts):
            await call.send(part, end=end and n == len(parts) - 1)
            await asyncio.sleep(0)
        if not end:
            await call.reset

    peer.handler = handler


START = encode_frame(Started(7, 5))


async def test_exec_from_start_to_exit(peer: FakePeer, client: GuestClient) -> None:
    script = START + encode_frame(Heartbeat(0)) + encode_frame(Output(1, 0, b"hello")) + encode_frame(END, 5)
    plays(peer, *(script[n : n + 3] for n in range(0, len(script), 3)))
    request = ExecRequest(
        id="x-1", argv=["a", "ü\n"], env={"K": "v"}, cwd="/w", user="kim", stdin=b"\xff", timeout_ms=9
    )
    async with client.exec(request) as call:
        assert call.started == Started(7, 5)
        assert [frame async for frame in call] == [Output(1, 0, b"hello"), END]
    body = json.loads(peer.calls[0].body)
    assert body == {
        "id": "x-1",
        "argv": ["a", "ü\n"],
        "env": {"K": "v"},
        "cwd": "/w",
        "user": "kim",
        "stdin_b64": "/w==",
        "timeout_ms": 9,
    }


async def test_leaving_an_exec_early_resets_it(peer: FakePeer, client: GuestClient) -> None:
    plays(peer, START, encode_frame(Output(1, 0, b"x")), end=False)
    async with client.exec(ExecRequest(id="a", shell="yes")) as call:
        assert await anext(call) == Output(1, 0, b"x")
    assert await asyncio.wait_for(peer.calls[0].reset, 1) == CANCEL


async def test_cancel_from_another_task_ends_the_reader(peer: FakePeer, client: GuestClient) -> None:
    plays(peer, START, end=False)
    async with client.exec(ExecRequest(id="a", shell="sleep 9")) as call:
        asyncio.get_running_loop().call_later(0.02, lambda: asyncio.ensure_future(call.cancel()))
        with pytest.raises(ClocheError) as caught:
            await asyncio.wait_for(anext(call), 2)
    assert caught.value.code == "exec.cancelled"
    assert await asyncio.wait_for(peer.calls[0].reset, 1) == CANCEL


async def test_output_that_ends_without_exit_is_an_error(peer: FakePeer, client: GuestClient) -> None:
    plays(peer, START, encode_frame(Output(1, 0, b"x")))
    got = []
    with pytest.raises(ClocheError) as caught:
        async with client.exec(ExecRequest(id="a", shell="x")) as call:
            async for frame in call:
                got.append(frame)
    assert caught.value.code == "guest.protocol"
    assert got == [Output(1, 0, b"x")]


async def test_exec_errors_are_raised_on_entering(peer: FakePeer, client: GuestClient) -> None:
    answers(peer, {"code": "not_found", "message": "m", "field": "user"}, 404)
    with pytest.raises(ClocheError) as caught:
        async with client.exec(ExecRequest(id="a", shell="x", user="nobody-here")):
            pass
    assert caught.value.code == "exec.user_not_found"
    assert "nobody-here" in caught.value.message


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"id": "UPPER"}, "request.invalid"),
        ({"shell": None}, "request.invalid"),
        ({"argv": ["x"]}, "request.invalid"),
        ({"shell": "\ud800"}, "request.invalid"),
    ],
)
async def test_requests_that_cannot_be_sent(client: GuestClient, changes: dict[str, object], code: str) -> None:
    fields: dict[str, object] = {"id": "a", "shell": "x", **changes}
    with pytest.raises(ClocheError) as caught:
        async with client.exec(ExecRequest(**fields)):  # type: ignore[arg-type]
            pass
    assert caught.value.code == code


async def test_detached_commands(peer: FakePeer, client: GuestClient) -> None:
    plays(peer, encode_frame(Gap(0, 3, 4)), encode_frame(Output(2, 7, b"x")), encode_frame(END, 8))
    async with client.exec_output("x-1", 3) as call:
        assert [frame async for frame in call] == [Gap(0, 3, 4), Output(2, 7, b"x"), END]
        with pytest.raises(RuntimeError):
            _ = call.started
    assert peer.calls[0].path == "/v1/exec/x-1/output?from=3"
    record = {"id": "x-1", "pid": 4, "running": False, "started_ns": 1, "detach": True, "offset": 8}
    answers(peer, {**record, "exit": {"exit_code": 2, "reason": "exited"}})
    info = await client.exec_info("x-1")
    assert info.exit is not None
    assert info.exit.exit_code == 2
    answers(peer, {"execs": [record, {**record, "running": True}]})
    assert [item.running for item in await client.execs()] == [False, True]
    answers(peer, None, 204)
    await client.exec_kill("x-1")
    assert peer.calls[-1].headers[":method"] == "DELETE"
    with pytest.raises(ClocheError) as caught:
        await client.exec_kill("../shutdown")
    assert caught.value.code == "exec.not_found"
