"""The client of one sandbox against a fake agent: its link and the machine calls."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path

import h2.errors
import pytest
from guest_fake_peer import CANCEL, Call, FakePeer, answers, until

from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient
from cloche_server.guest.errors import LinkLost
from cloche_server.guest.types import RenewRequest

INFO = {"generation": 1, "version": "0.1.0", "boot_id": "b", "pid": 1, "uptime_ms": 12, "cpus": 1}
INFO |= {"memory_mb": 229, "disk_mb": 3900, "execs_running": 0, "novelty": [1]}


async def test_connects_on_demand_once_for_many_callers(peer: FakePeer, client: GuestClient) -> None:
    answers(peer, INFO)
    infos = await asyncio.gather(*(client.info() for _ in range(20)))
    assert len(peer.sessions) == 1
    assert infos[0].version == "0.1.0"
    assert await client.connect() == 1


async def test_reconnects_for_the_next_call_and_repeats_none(peer: FakePeer, client: GuestClient) -> None:
    async def drop(call: Call) -> None:
        call.session.transport.close()

    answers(peer, INFO)
    await client.info()
    peer.handler = drop
    with pytest.raises(LinkLost):
        await client.renew(RenewRequest(warm=True))
    assert [c.path for c in peer.calls] == ["/v1/info", "/v1/renew"]
    await client.wait_lost()
    answers(peer, INFO)
    assert (await client.info()).generation == 1
    assert len(peer.sessions) == 2


async def test_a_refused_call_is_sent_again(peer: FakePeer, client: GuestClient) -> None:
    async def refuse_once(call: Call) -> None:
        if len(peer.calls) == 1:
            call.session.h2.reset_stream(call.id, h2.errors.ErrorCodes.REFUSED_STREAM)
            call.session.flush()
        else:
            await call.answer(json.dumps(INFO).encode())

    peer.handler = refuse_once
    assert (await client.info()).pid == 1
    assert len(peer.calls) == 2


async def test_waiters_share_a_failed_attempt(peer: FakePeer, client: GuestClient) -> None:
    peer.mute = True
    began = time.monotonic()
    results = await asyncio.gather(*(client.info(timeout=0.3) for _ in range(10)), return_exceptions=True)
    assert time.monotonic() - began < 1.5
    assert all(isinstance(r, LinkLost) for r in results)


async def test_a_cancelled_connector_leaves_the_work_to_the_next(peer: FakePeer, client: GuestClient) -> None:
    peer.mute = True
    first = asyncio.ensure_future(client.info())
    await until(lambda: peer.sessions)
    answers(peer, INFO)
    second = asyncio.ensure_future(client.info())
    peer.mute = False
    first.cancel()
    assert (await second).pid == 1


async def test_a_missing_socket_and_a_closed_client(socket_path: Path) -> None:
    client = GuestClient(str(socket_path))
    with pytest.raises(LinkLost):
        await client.info()
    await client.aclose()
    await client.aclose()
    with pytest.raises(LinkLost, match="closed"):
        await client.info()


async def test_renew_sends_what_is_asked_for(peer: FakePeer, client: GuestClient) -> None:
    answers(peer, {"steps": {"entropy": 0.2, "time": 1}, "disk_mb": 3900})
    before = time.time_ns()
    result = await client.renew(
        RenewRequest(
            entropy=b"e" * 64, time_now=True, hostname="h", machine_id="0" * 32, ca_pem="c", grow_disk=True, thaw=True
        )
    )
    assert result.steps == {"entropy": 0.2, "time": 1.0}
    body = json.loads(peer.calls[0].body)
    assert base64.b64decode(body.pop("entropy")) == b"e" * 64
    assert before <= body.pop("time_ns") <= time.time_ns()
    assert body == {"hostname": "h", "machine_id": "0" * 32, "ca_pem": "c", "grow_disk": True, "thaw": True}
    await client.renew(RenewRequest())
    assert json.loads(peer.calls[1].body) == {}


async def test_the_small_calls(peer: FakePeer, client: GuestClient) -> None:
    answers(peer, {})
    await client.quiesce()
    answers(peer, {}, 202)
    await client.shutdown(100)
    answers(peer, {"cpu_ms": 1.5, "memory_bytes": 2, "processes": 3})
    assert (await client.usage()).processes == 3
    assert [(c.headers[":method"], c.path) for c in peer.calls] == [
        ("POST", "/v1/quiesce"),
        ("POST", "/v1/shutdown"),
        ("GET", "/v1/usage"),
    ]
    assert json.loads(peer.calls[1].body) == {"grace_ms": 100}


async def test_freeze_and_thaw(peer: FakePeer, client: GuestClient) -> None:
    answers(peer, {"steps": {"commands": 1.5, "disk": 20}})
    assert await client.freeze(True, 5000) == {"commands": 1.5, "disk": 20.0}
    await client.freeze()
    answers(peer, {})
    await client.thaw(True)
    await client.thaw(False)
    assert [c.path for c in peer.calls] == ["/v1/freeze", "/v1/freeze", "/v1/thaw", "/v1/thaw"]
    assert [json.loads(c.body) for c in peer.calls] == [
        {"disk": True, "timeout_ms": 5000},
        {"disk": False, "timeout_ms": 10_000},
        {"keep": True},
        {"keep": False},
    ]


@pytest.mark.parametrize(
    "body", [None, [], {}, {"steps": 1}, {"steps": {"disk": "x"}}, {"steps": {"a" * n: 1 for n in range(40)}}]
)
async def test_a_freeze_with_a_nonsensical_answer(peer: FakePeer, client: GuestClient, body: object) -> None:
    answers(peer, body)
    with pytest.raises(ClocheError) as caught:
        await client.freeze()
    assert caught.value.code == "guest.protocol"


@pytest.mark.parametrize(
    ("status", "code", "ours"), [(409, "conflict", "guest.error"), (503, "exhausted", "guest.exhausted")]
)
async def test_a_freeze_that_is_refused(peer: FakePeer, client: GuestClient, status: int, code: str, ours: str) -> None:
    answers(peer, {"code": code, "message": "m"}, status)
    with pytest.raises(ClocheError) as caught:
        await client.freeze()
    assert (caught.value.code, caught.value.details["status"]) == (ours, status)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "x",
        {},
        {**INFO, "generation": "1"},
        {**INFO, "cpus": -1},
        {**INFO, "version": None},
        [[]] * 9,
    ],
)
async def test_nonsense_is_refused(peer: FakePeer, client: GuestClient, body: object) -> None:
    answers(peer, body)
    with pytest.raises(ClocheError) as caught:
        await client.info()
    assert caught.value.code == "guest.protocol"


async def test_an_endless_answer_is_cut(peer: FakePeer, client: GuestClient) -> None:
    async def pour(call: Call) -> None:
        call.head()
        while True:
            await call.send(b" " * 65536)

    peer.handler = pour
    with pytest.raises(ClocheError) as caught:
        await client.info()
    assert caught.value.code == "guest.protocol"
    assert await asyncio.wait_for(peer.calls[0].reset, 1) == CANCEL


@pytest.mark.parametrize("status", [100, 302, 404, 500])
async def test_statuses_without_sense(peer: FakePeer, client: GuestClient, status: int) -> None:
    async def handler(call: Call) -> None:
        call.head(status)
        if status >= 200:
            await call.send(b"404 page not found", end=True)

    peer.handler = handler
    with pytest.raises(ClocheError) as caught:
        await client.info(timeout=0.2)
    assert caught.value.code == ("sandbox.unreachable" if status == 100 else "guest.protocol")
