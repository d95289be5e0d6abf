"""The fast way to a port: when it is taken, when it is left alone, and when what is open on it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from app_host import Host

from cloche_server.app.entry import Entry
from cloche_server.app.shortcuts import MAX_REMEMBERED, REFUSED_SECONDS, SILENT_SECONDS, Shortcuts
from cloche_server.core.lifecycle import Status


class Stream:
    def __init__(self) -> None:
        self.ended: list[str] = []

    async def read(self) -> bytes:
        return b"read"

    async def write(self, data: bytes) -> None:
        self.ended.append(f"wrote {data.decode()}")

    async def write_eof(self) -> None:
        self.ended.append("eof")

    def close(self) -> None:
        self.ended.append("closed")

    def abort(self) -> None:
        self.ended.append("cut")


class Guest:
    """What the slot leads to: `error` is raised, `before` is done while a connection is made."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.error: OSError | None = None
        self.before: Callable[[], None] = lambda: None

    async def __call__(self, _machine: str, port: int, _timeout: float) -> Stream:
        self.asked.append(port)
        self.before()
        if self.error is not None:
            raise self.error
        return Stream()


@pytest.fixture
def guest() -> Guest:
    return Guest()


@pytest.fixture
def shortcuts(host: Host, guest: Guest) -> Shortcuts:
    return Shortcuts(guest, host.supervisor, host.clock)


async def made(host: Host) -> Entry:
    entry = host.supervisor.get((await host.create()).id)
    assert entry is not None
    return entry


@pytest.mark.parametrize(
    ("error", "seconds"), [(ConnectionRefusedError(), REFUSED_SECONDS), (TimeoutError(), SILENT_SECONDS)]
)
async def test_what_is_refused_is_left_alone_for_a_moment(
    host: Host, guest: Guest, shortcuts: Shortcuts, error: OSError, seconds: float
) -> None:
    entry = await made(host)
    guest.error = error
    for _ in range(3):
        assert await shortcuts.dial(entry, 3000) is None
    assert guest.asked == [3000]
    assert await shortcuts.dial(entry, 4000) is None
    assert guest.asked == [3000, 4000], "another port is another server"
    guest.error = None
    host.clock.time += seconds + 1
    for _ in range(2):
        assert await shortcuts.dial(entry, 3000) is not None
    assert guest.asked == [3000, 4000, 3000, 3000]


async def test_a_guest_that_refuses_everything_fills_no_memory(host: Host, guest: Guest, shortcuts: Shortcuts) -> None:
    entry = await made(host)
    guest.error = ConnectionRefusedError()
    for port in range(1, MAX_REMEMBERED + 100):
        await shortcuts.dial(entry, port)
    assert len(shortcuts._barred) == MAX_REMEMBERED


@pytest.mark.parametrize("verb", ["pause", "hibernate"])
async def test_what_is_open_ends_with_the_state(host: Host, guest: Guest, shortcuts: Shortcuts, verb: str) -> None:
    entry, other = await made(host), await made(host)
    raw: list[Stream] = []

    async def reach(machine: str, port: int, timeout: float) -> Stream:
        raw.append(await guest(machine, port, timeout))
        return raw[-1]

    shortcuts._reach = reach
    open_, closed, elsewhere = [await shortcuts.dial(one, 3000) for one in (entry, entry, other)]
    assert open_ is not None
    assert closed is not None
    assert elsewhere is not None
    await closed.write(b"x")
    assert await closed.read() == b"read"
    await closed.write_eof()
    closed.close()
    await getattr(host.sleep, verb)("w", entry.record.id)
    assert [one.ended for one in raw] == [["cut"], ["wrote x", "eof", "closed"], []]
    open_.close()
    elsewhere.close()
    assert shortcuts._open == {}


async def test_one_that_stops_while_it_is_dialed(host: Host, guest: Guest, shortcuts: Shortcuts) -> None:
    entry = await made(host)
    machine = entry.machine

    def gone() -> None:
        entry.machine = None

    guest.before = gone
    assert await shortcuts.dial(entry, 3000) is None
    assert await shortcuts.dial(entry, 3000) is None
    assert (guest.asked, shortcuts._open) == ([3000], {}), "without a machine nothing is dialed"
    entry.machine = machine
    assert entry.record.status is Status.RUNNING
