"""Connections to ports of guests: who may be dialed, what they count as, and how many there may be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from app_host import Host

from cloche_server.app.dialing import SandboxDialer
from cloche_server.app.entry import Entry
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from kit.fake_engine import FakeGuest


class Stream:
    """A connection that echoes."""

    def __init__(self) -> None:
        self.said = b""
        self.closed = 0

    async def read(self) -> bytes:
        said, self.said = self.said, b""
        return said

    async def write(self, data: bytes) -> None:
        self.said += data

    async def write_eof(self) -> None:
        self.said += b"<end>"

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Those that agents have made."""
    made: list[Stream] = []

    async def tunnel(guest: FakeGuest, port: int, *, timeout: float) -> Stream:
        if port == 1:
            raise ClocheError("port.closed", "nothing listens")
        made.append(Stream())
        return made[-1]

    monkeypatch.setattr(FakeGuest, "tunnel", tunnel, raising=False)
    return made


@pytest.fixture
def dialer(host: Host) -> SandboxDialer:
    return SandboxDialer(host.access, host.supervisor, host.clock, 2, 3)


async def made(host: Host, **options: Any) -> Entry:
    entry = host.supervisor.get((await host.create(**options)).id)
    assert entry is not None
    return entry


async def test_bytes_are_counted_and_an_open_connection_is_activity(
    host: Host, dialer: SandboxDialer, streams: list[Stream]
) -> None:
    entry = await made(host)
    stream = await dialer.dial("w", entry.record.id, 3000)
    await stream.write(b"12345")
    await stream.write_eof()
    assert await stream.read() == b"12345<end>"
    assert (entry.traffic.bytes_in, entry.traffic.bytes_out) == (5, 10)
    assert (entry.open_streams, entry.in_use) == (1, True)
    host.clock.time += 50
    for _ in range(2):
        stream.close()
    assert (entry.open_streams, streams[0].closed) == (0, 1)
    assert entry.last_activity == host.clock.monotonic()


async def test_only_what_lives_and_belongs_to_the_caller(
    host: Host, dialer: SandboxDialer, streams: list[Stream]
) -> None:
    entry = await made(host)
    for workspace, sandbox_id in (("other", entry.record.id), ("w", "z" * 20), (None, "z" * 20)):
        with pytest.raises(ClocheError) as caught:
            await dialer.dial(workspace, sandbox_id, 3000)
        assert (caught.value.code, entry.record.id in caught.value.message) == ("sandbox.not_found", False)
    (await dialer.dial(None, entry.record.id, 3000)).close()


async def test_no_more_than_the_limit(host: Host, dialer: SandboxDialer, streams: list[Stream]) -> None:
    entry = await made(host)
    first, _ = [await dialer.dial("w", entry.record.id, 3000) for _ in range(2)]
    with pytest.raises(ClocheError) as caught:
        await dialer.dial("w", entry.record.id, 3000)
    assert caught.value.code == "sandbox.busy"
    first.close()
    await dialer.dial("w", entry.record.id, 3000)
    with pytest.raises(ClocheError):
        await dialer.dial("w", entry.record.id, 1)
    assert entry.open_streams == 2, "what was refused is not open"


async def test_no_more_than_the_limit_of_a_workspace(host: Host, dialer: SandboxDialer, streams: list[Stream]) -> None:
    first, second = await made(host), await made(host)
    open_ = [await dialer.dial("w", one.record.id, 3000) for one in (first, first, second)]
    with pytest.raises(ClocheError) as caught:
        await dialer.dial("w", second.record.id, 3000)
    assert (caught.value.code, caught.value.details["limit"]) == ("request.rate_limited", 3)
    for stream in open_:
        stream.close()
    assert dialer._of_workspace == {}
    (await dialer.dial("w", second.record.id, 3000)).close()


async def test_a_failed_dial_is_not_open(host: Host, dialer: SandboxDialer, streams: list[Stream]) -> None:
    entry = await made(host)
    with pytest.raises(ClocheError) as caught:
        await dialer.dial("w", entry.record.id, 1)
    assert (caught.value.code, entry.open_streams) == ("port.closed", 0)


async def test_one_that_sleeps_wakes_and_one_that_is_paused_does_not(
    host: Host, dialer: SandboxDialer, streams: list[Stream]
) -> None:
    entry = await made(host)
    await host.sleep.hibernate("w", entry.record.id)
    dials = [asyncio.ensure_future(dialer.dial(None, entry.record.id, 3000)) for _ in range(2)]
    for stream in await asyncio.gather(*dials):
        stream.close()
    assert entry.record.status is Status.RUNNING
    await host.sleep.pause("w", entry.record.id)
    with pytest.raises(ClocheError) as caught:
        await dialer.dial(None, entry.record.id, 3000)
    assert caught.value.code == "sandbox.invalid_state"


async def test_a_shortcut_comes_first(host: Host, dialer: SandboxDialer, streams: list[Stream]) -> None:
    entry = await made(host)
    short = Stream()

    async def shortcut(_entry: Entry, port: int) -> Stream | None:
        return short if port == 3000 else None

    dialer.shortcut = shortcut
    stream = await dialer.dial("w", entry.record.id, 3000)
    await stream.write(b"x")
    assert (short.said, streams) == (b"x", [])
    await dialer.dial("w", entry.record.id, 4000)
    assert len(streams) == 1
