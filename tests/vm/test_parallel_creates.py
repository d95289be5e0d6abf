"""Many creates at once, keys, and clients that hang up in the middle."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from kit import procs, truth
from kit.server import Server
from kit.until import Watch, until

WHO = (
    "cat /etc/machine-id /proc/sys/kernel/hostname /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1"
)


def create_all(server: Server, count: int) -> list[object]:
    async def work() -> list[object]:
        async with server.api.aio() as api:
            return list(
                await asyncio.gather(
                    *(api.request("POST", "/v1/sandboxes", json={}, timeout=300) for _ in range(count)),
                    return_exceptions=True,
                )
            )

    return asyncio.run(work())


def delete_all(server: Server, ids: list[str]) -> None:
    async def work() -> None:
        async with server.api.aio() as api:
            answers = await asyncio.gather(*(api.request("DELETE", f"/v1/sandboxes/{i}", timeout=120) for i in ids))
            assert {a.status_code for a in answers} == {204}

    asyncio.run(work())


@pytest.mark.slow
def test_many_at_once_in_three_rounds(new_server: Callable[..., Server]) -> None:
    """None fails below the capacity, and no two share anything."""
    server = new_server(pool_launched=2, pool_warm=2)
    seen: dict[str, set[str]] = {"id": set(), "machine_id": set(), "hostname": set(), "uuid": set(), "random": set()}
    alive: list[str] = []
    for count in (16, 16, 16):
        answers = create_all(server, count)
        bad = [a for a in answers if getattr(a, "status_code", 0) != 201]
        assert not bad, f"{len(bad)} of {count} failed: {[getattr(b, 'text', repr(b))[:200] for b in bad[:3]]}"
        ids = [a.json()["id"] for a in answers]  # type: ignore[attr-defined]
        alive += ids

        async def look(ids: list[str] = ids) -> list[str]:
            async with server.api.aio() as api:
                return [r.stdout for r in await asyncio.gather(*(api.exec(i, WHO) for i in ids))]

        for sandbox_id, text in zip(ids, asyncio.run(look()), strict=True):
            machine_id, hostname, uuid, noise = text.strip().split("\n")
            values = {"id": sandbox_id, "machine_id": machine_id, "hostname": hostname, "uuid": uuid, "random": noise}
            for name, value in values.items():
                assert value not in seen[name], f"{name} {value} was given out twice"
                seen[name].add(value)
        machines = server.machines()
        assert set(alive) <= set(machines)
        assert len({m.pid for m in machines.values()}) == len(machines)
        sockets = procs.unix_sockets(server.data / "sandboxes")
        assert len(sockets) == len(set(sockets))
        half, alive = alive[::2], alive[1::2]
        delete_all(server, half)
    delete_all(server, alive)
    truth.check(server)


@pytest.mark.slow
def test_beyond_the_capacity(new_server: Callable[..., Server]) -> None:
    """Exactly as many as may be, the others refused at once with when to come again; the pools give way."""
    server = new_server(pool_launched=2, pool_warm=2, max_sandboxes=12)
    for _ in range(2):
        watch = Watch()
        answers = create_all(server, 30)
        made = [a for a in answers if a.status_code == 201]  # type: ignore[attr-defined]
        refused = [a for a in answers if a.status_code == 503]  # type: ignore[attr-defined]
        assert (len(made), len(refused)) == (12, 18), [getattr(a, "text", a) for a in answers]
        for answer in refused:
            assert answer.json()["code"] == "capacity.unavailable"  # type: ignore[attr-defined]
            assert answer.json()["retryable"] is True  # type: ignore[attr-defined]
            assert int(answer.headers["retry-after"]) >= 1  # type: ignore[attr-defined]
        print(f"{watch.seconds:.1f} s")
        assert len(server.api.list()) == 12
        quick = Watch()
        late = server.api.request("POST", "/v1/sandboxes", json={})
        assert late.status_code == 503
        assert quick.seconds < 3
        truth.check(server)
        assert len(server.machines()) == 12
        delete_all(server, [a.json()["id"] for a in made])  # type: ignore[attr-defined]
    truth.whole(server)


def test_not_enough_memory_is_told_before_anything_exists(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_launched=0, pool_warm=0, memory_overcommit=0.1, memory_reserve_mb=0)
    limit = re.search(r"MemTotal:\s+(\d+)", open("/proc/meminfo").read())  # noqa: SIM115, PTH123
    assert limit is not None
    fits = int(int(limit[1]) / 1024 * 0.1) // (256 + 64)
    boxes = [server.api.create() for _ in range(min(fits, 3))]
    watch = Watch()
    too_big = server.api.request("POST", "/v1/sandboxes", json={"memory_mb": 16384})
    assert watch.seconds < 5
    assert (too_big.status_code, too_big.json()["code"]) == (503, "capacity.unavailable")
    assert "memory" in too_big.json()["error"]
    assert int(too_big.headers["retry-after"]) >= 1
    assert set(server.machines()) == {box.id for box in boxes}
    assert not list((server.data / "templates").glob("base-1c16384m*"))
    truth.usable(*boxes)
    truth.check(server)


# ---------------------------------------------------------------- keys


def test_one_key_many_requests(new_server: Callable[..., Server]) -> None:
    server = new_server()
    headers = {"Idempotency-Key": "k-1"}
    body = {"metadata": {"n": "1"}}

    async def work() -> list[object]:
        async with server.api.aio() as api:
            return list(
                await asyncio.gather(
                    *(api.request("POST", "/v1/sandboxes", json=body, headers=headers) for _ in range(8))
                )
            )

    answers = asyncio.run(work())
    assert {a.status_code for a in answers} == {201}  # type: ignore[attr-defined]
    assert len({a.json()["id"] for a in answers}) == 1  # type: ignore[attr-defined]
    assert len(server.api.list()) == 1
    other = server.api.request("POST", "/v1/sandboxes", json={"metadata": {"n": "2"}}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "request.idempotency_conflict")
    sandbox_id = answers[0].json()["id"]  # type: ignore[attr-defined]
    server.kill()
    server.start()
    again = server.api.request("POST", "/v1/sandboxes", json=body, headers=headers)
    assert again.json()["id"] == sandbox_id
    server.api.delete(sandbox_id)
    gone = server.api.request("POST", "/v1/sandboxes", json=body, headers=headers)
    assert (gone.status_code, gone.json()["code"]) == (404, "sandbox.not_found")
    assert server.api.list() == []
    truth.check(server)


# ---------------------------------------------------------------- hang-ups


def _hang_up(server: Server, after: float, key: str | None = None) -> None:
    """Sends a create and closes the connection some time later, without looking at the answer."""
    parts = urlsplit(server.url)
    head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\nContent-Length: 2\r\n"
    if key:
        head += f"Idempotency-Key: {key}\r\n"
    with socket.create_connection((str(parts.hostname), int(parts.port or 0))) as client:
        client.sendall(head.encode() + b"\r\n{}")
        time.sleep(after)


@pytest.mark.parametrize("pools", [0, 1])
def test_a_client_that_hangs_up(new_server: Callable[..., Server], pools: int) -> None:
    """At random moments: nothing is left, but for one that had been answered before the hang-up was seen."""
    server = new_server(pool_launched=pools, pool_warm=pools)
    box = server.api.create()
    usual = box.info["boot_ms"] / 1000
    box.delete()
    chance = random.Random(5)
    for number in range(20):
        _hang_up(server, chance.uniform(0, usual * 1.1), key=f"hang-{number}" if number % 3 == 0 else None)
    until(lambda: not server.api.metrics().get('cloche_sandboxes{status="creating"}'), 60)
    truth.check(server, 60)
    answered = server.log.read_text().count("status=201")
    left = server.api.list()
    assert len(left) <= answered - 1, "a sandbox of which nobody was told"
    assert {item["status"] for item in left} <= {"running"}
    for item in left:
        server.api.delete(item["id"])
    # A key whose create was undone is free: the client that tries again gets its sandbox.
    once = server.api.call("POST", "/v1/sandboxes", json={}, headers={"Idempotency-Key": "fresh"})
    server.api.delete(once["id"])
    truth.whole(server)


def test_all_clients_hang_up_at_once(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_launched=1, pool_warm=1)
    parts = urlsplit(server.url)
    head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    head += "Content-Length: 2\r\n\r\n{}"
    clients = [socket.create_connection((str(parts.hostname), int(parts.port or 0))) for _ in range(15)]
    for client in clients:
        client.sendall(head.encode())
    time.sleep(0.4)
    for client in clients:
        client.close()
    until(lambda: not server.api.metrics().get('cloche_sandboxes{status="creating"}'), 90)
    truth.check(server, 60)
    for item in server.api.list():
        server.api.delete(item["id"])
    truth.whole(server)


def test_deleted_while_it_is_created(new_server: Callable[..., Server]) -> None:
    """The creator is told, the one who deletes too, and nothing is left."""
    server = new_server(pool_launched=0, pool_warm=0)

    async def one(api: object, pause: float) -> None:
        creating = asyncio.ensure_future(api.request("POST", "/v1/sandboxes", json={}))  # type: ignore[attr-defined]
        listed: list[dict[str, str]] = []
        while not listed and not creating.done():
            listed = await api.call("GET", "/v1/sandboxes")  # type: ignore[attr-defined]
        await asyncio.sleep(pause)
        deleted = await api.request("DELETE", f"/v1/sandboxes/{listed[0]['id']}")  # type: ignore[attr-defined]
        assert deleted.status_code in {204, 404}
        answer = await creating
        assert answer.status_code in {201, 409}, answer.text
        if answer.status_code == 409:
            assert answer.json()["code"] == "sandbox.invalid_state"
            assert "deleted" in answer.json()["error"]
        assert await api.call("GET", "/v1/sandboxes") == []  # type: ignore[attr-defined]

    async def work() -> None:
        async with server.api.aio() as api:
            for pause in (0, 0.05, 0.1, 0.2, 0.4):
                await one(api, pause)

    asyncio.run(work())
    truth.whole(server)
