"""The fast way to a port of a guest: through its network card, past the agent. What it does not reach, the agent does.

It leads to what listens on the guest's own address or on all of them. A server that is bound to loopback alone refuses
there; that is remembered for a moment, so that not each request pays for it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, Protocol

from cloche_server.app.entry import Entry
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.streams import ByteStream
from cloche_server.host.clock import Clock

#: Seconds that the guest may take for a connection. One that takes longer hangs, or drops what it does not like.
REACH_SECONDS: Final = 1.0
#: So long the way is not tried again, after it was refused and after nothing was said (seconds).
REFUSED_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 30.0
#: Ports that are remembered: a guest must not be able to fill the memory of the host.
MAX_REMEMBERED: Final = 4096


class DirectStream(ByteStream, Protocol):
    def abort(self) -> None:
        """Ends it so that both sides see that it was cut."""


class Reach(Protocol):
    def __call__(self, machine_id: str, port: int, timeout: float) -> Awaitable[DirectStream]:
        """A connection to the guest of a machine. Raises OSError, `TimeoutError` among them."""


class Shortcuts:
    """Give `dial` to the dialer. A connection ends with the state its sandbox was running in, as those of the agent."""

    def __init__(self, reach: Reach, supervisor: Supervisor, clock: Clock) -> None:
        self._reach = reach
        self._clock = clock
        self._open: dict[str, set[DirectStream]] = {}
        #: Until when a port is not tried.
        self._barred: dict[tuple[str, int], float] = {}
        supervisor.observers.append(self._moved)

    async def dial(self, entry: Entry, port: int) -> ByteStream | None:
        """None: it has to go by the agent. Never raises for what the guest does."""
        machine, sandbox_id = entry.machine, entry.record.id
        key = sandbox_id, port
        if machine is None or self._barred.get(key, 0.0) > self._clock.monotonic():
            return None
        try:
            stream = await self._reach(sandbox_id, port, REACH_SECONDS)
        except OSError as error:
            self._bar(key, SILENT_SECONDS if isinstance(error, TimeoutError) else REFUSED_SECONDS)
            return None
        if entry.machine is not machine or entry.record.status is not Status.RUNNING:
            stream.abort()
            return None
        self._barred.pop(key, None)
        self._open.setdefault(sandbox_id, set()).add(stream)
        return _Direct(stream, sandbox_id, self._open)

    def _bar(self, key: tuple[str, int], seconds: float) -> None:
        self._barred.pop(key, None)
        while len(self._barred) >= MAX_REMEMBERED:
            del self._barred[next(iter(self._barred))]
        self._barred[key] = self._clock.monotonic() + seconds

    def _moved(self, entry: Entry, event: Event, before: Status) -> None:
        if entry.record.status is Status.RUNNING:
            return
        for stream in self._open.pop(entry.record.id, ()):
            stream.abort()
        for key in [key for key in self._barred if key[0] == entry.record.id]:
            del self._barred[key]


class _Direct:
    """Knows that it has ended."""

    def __init__(self, stream: DirectStream, sandbox_id: str, among: dict[str, set[DirectStream]]) -> None:
        self._stream = stream
        self._sandbox_id = sandbox_id
        self._among = among

    async def read(self) -> bytes:
        return await self._stream.read()

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def write_eof(self) -> None:
        await self._stream.write_eof()

    def close(self) -> None:
        mine = self._among.get(self._sandbox_id)
        if mine is not None:
            mine.discard(self._stream)
            if not mine:
                del self._among[self._sandbox_id]
        self._stream.close()
