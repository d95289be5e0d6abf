"""What is sent again, and what is not."""

from __future__ import annotations

import time

import pytest
from cloche_fake import KEY, FakeCloche, faults

from cloche import AsyncClient, AsyncSandbox, CapacityError, ConnectFailed, ConnectionLost, RateLimitError, ServerError

FULL = faults.error(503, "capacity.unavailable", "the host has no room", retryable=True, retry_after=0.1)
FULL_FOR_LONG = faults.error(503, "capacity.unavailable", "the host has no room", retry_after=3600)
TOO_FAST = faults.error(429, "request.rate_limited", "too many requests", retryable=True, retry_after=0.1)
DISK_FULL = faults.error(507, "host.disk_full", "the disk of the host is full", retryable=True)


async def test_create_waits_for_room(fake: FakeCloche) -> None:
    fake.on("POST", "/v1/sandboxes", FULL, times=2)
    before = time.monotonic()
    sandbox = await AsyncSandbox.create()
    assert 0.2 <= time.monotonic() - before < 2
    assert list(fake.sandboxes) == [sandbox.id]
    assert fake.count("POST", "/v1/sandboxes") == 3


async def test_create_does_not_wait_longer_than_it_may(fake: FakeCloche) -> None:
    fake.on("POST", "/v1/sandboxes", FULL_FOR_LONG)
    before = time.monotonic()
    with pytest.raises(CapacityError) as caught:
        await AsyncSandbox.create()
    assert time.monotonic() - before < 2
    assert caught.value.retry_after == 3600
    fake.on("POST", "/v1/sandboxes", FULL)
    async with AsyncClient(max_retry_seconds=0) as client:
        with pytest.raises(CapacityError):
            await AsyncSandbox.create(client=client)
    fake.on("POST", "/v1/sandboxes", DISK_FULL)
    with pytest.raises(CapacityError):
        await AsyncSandbox.create()
    assert fake.count("POST", "/v1/sandboxes") == 3


async def test_create_whose_answer_was_lost_makes_one_sandbox(fake: FakeCloche) -> None:
    fake.on("POST", "/v1/sandboxes", faults.lost(fake))
    sandbox = await AsyncSandbox.create()
    assert list(fake.sandboxes) == [sandbox.id]
    assert fake.count("POST", "/v1/sandboxes") == 2
    fake.on("POST", "/v1/sandboxes", faults.lost(fake), times=2)
    with pytest.raises(ConnectionLost):
        await AsyncSandbox.create(idempotency_key="mine")
    assert fake.count("POST", "/v1/sandboxes") == 4
    again = await AsyncSandbox.create(idempotency_key="mine")
    assert list(fake.sandboxes) == [sandbox.id, again.id]


async def test_reading_is_repeated_once(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("GET", sandbox.id, faults.abort)
    await sandbox.refresh()
    assert fake.count("GET", sandbox.id) == 2
    fake.on("GET", sandbox.id, faults.abort, times=2)
    with pytest.raises(ConnectionLost):
        await sandbox.refresh()
    assert fake.count("GET", sandbox.id) == 4


async def test_changing_is_not_repeated(fake: FakeCloche) -> None:
    unwell = faults.error(500, "internal", "dial: connect: connection refused")
    sandbox = await AsyncSandbox.create()
    for handler, kind in ((faults.abort, ConnectionLost), (unwell, ServerError), (FULL, CapacityError)):
        fake.on("PATCH", "/lifecycle", handler)
        with pytest.raises(kind):
            await sandbox.set_ttl(5)
        fake.on("PUT", "/fs", handler)
        with pytest.raises(kind):
            await sandbox.files.write("/tmp/x", b"x")
    assert fake.count("PATCH", "/lifecycle") == 3
    assert fake.count("PUT", "/fs") == 3


async def test_what_was_refused_for_its_rate_is_sent_again(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("PATCH", "/lifecycle", TOO_FAST, times=2)
    await sandbox.set_ttl(5)
    assert fake.count("PATCH", "/lifecycle") == 3
    fake.on("PUT", "/fs", TOO_FAST)
    await sandbox.files.write("/tmp/x", b"x")
    assert fake.count("PUT", "/fs") == 2
    fake.on("PATCH", "/lifecycle", TOO_FAST)
    async with AsyncClient(max_retry_seconds=0) as client:
        with pytest.raises(RateLimitError) as caught:
            await (await AsyncSandbox.connect(sandbox.id, client=client)).set_ttl(5)
    assert caught.value.retry_after == 0.1


async def test_no_server(unused_address: str) -> None:
    before = time.monotonic()
    async with AsyncClient(unused_address, KEY) as client:
        with pytest.raises(ConnectFailed, match="cannot connect"):
            await AsyncSandbox.create(client=client)
    assert 1 < time.monotonic() - before < 6
