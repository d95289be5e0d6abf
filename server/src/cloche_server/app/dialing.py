"""Connections to ports of guests: who may be dialed, what counts as activity, and by which way it is reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry, not_found
from cloche_server.app.listening import Listening
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import LISTED
from cloche_server.core.records import Sandbox
from cloche_server.core.streams import ByteStream
from cloche_server.guest.sockets import Arrival
from cloche_server.host.clock import Clock

#: Seconds that the agent may take for a connection: each of its own attempts is bounded as well.
DIAL_SECONDS: Final = 15.0
#: A faster way to a port, tried before that over the agent: a connection, or None when it leads nowhere.
Shortcut = Callable[[Entry, int], Awaitable[ByteStream | None]]


class GuestDialer(Protocol):
    async def dial(self, workspace: str | None, sandbox_id: str, port: int) -> ByteStream:
        """A connection to a TCP port of a sandbox; without `workspace`, of whosever it is. One that sleeps wakes first.

        Close it: until then the sandbox is not idle. Raises `sandbox.not_found`, `port.closed`, `port.timeout`,
        `sandbox.busy`, `request.rate_limited`, and what any call of a sandbox raises.
        """


class SocketDialer(GuestDialer, Protocol):
    """Also Unix sockets, and listeners inside of a sandbox."""

    async def dial_unix(self, workspace: str, sandbox_id: str, path: str) -> ByteStream: ...

    async def listen(self, workspace: str, sandbox_id: str, where: int | str) -> Listening: ...


class SandboxDialer:
    """`limit`: connections of one sandbox at once; `together`: of all of a workspace."""

    def __init__(self, access: Access, supervisor: Supervisor, clock: Clock, limit: int, together: int) -> None:
        self._together = together
        self._of_workspace: Counter[str] = Counter()
        self._access = access
        self._supervisor = supervisor
        self._clock = clock
        self._limit = limit
        #: Set once, by what knows of another way than the agent's.
        self.shortcut: Shortcut | None = None

    def locate(self, workspace: str | None, sandbox_id: str) -> Entry:
        """A living sandbox. Raises `sandbox.not_found`."""
        entry = self._supervisor.get(sandbox_id)
        if entry is None or entry.record.status not in LISTED or workspace not in (None, entry.record.workspace):
            raise not_found("with this id")
        return entry

    def find(self, workspace: str | None, sandbox_id: str) -> Sandbox:
        """As `locate`, the record alone."""
        return self.locate(workspace, sandbox_id).record

    async def dial(self, workspace: str | None, sandbox_id: str, port: int) -> ByteStream:
        owner = self.locate(workspace, sandbox_id).record.workspace
        entry, guest = await self._access.serving(owner, sandbox_id)

        async def made() -> ByteStream:
            found = await self.shortcut(entry, port) if self.shortcut is not None else None
            return await guest.tunnel(port, timeout=DIAL_SECONDS) if found is None else found

        return await self._count(entry, made)

    async def dial_unix(self, workspace: str, sandbox_id: str, path: str) -> ByteStream:
        """A connection to a Unix socket, as the user of the sandbox. Errors as those of `dial`, and
        `file.not_found`, `file.permission_denied`."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        user = entry.record.defaults.user
        return await self._count(entry, lambda: guest.unix_tunnel(path, user, timeout=DIAL_SECONDS))

    async def listen(self, workspace: str, sandbox_id: str, where: int | str) -> Listening:
        """Listens inside the sandbox on a port of loopback (0: any), or at the path of a Unix socket, as its user.

        Close it: until then the sandbox is not idle. Raises `port.in_use`, `file.not_found`, `file.permission_denied`.
        """
        entry, guest = await self._access.serving(workspace, sandbox_id)
        user = entry.record.defaults.user
        if isinstance(where, int):
            made = await guest.listen_port(where, user, timeout=DIAL_SECONDS)
        else:
            made = await guest.listen_unix(where, user, timeout=DIAL_SECONDS)

        def take(arrival: Arrival) -> Awaitable[ByteStream]:
            return self._count(entry, lambda: guest.accept(arrival, timeout=DIAL_SECONDS))

        return Listening(made, take, self._access.busy(entry))

    async def _count(self, entry: Entry, made: Callable[[], Awaitable[ByteStream]]) -> ByteStream:
        """Makes a connection, if there is room for one more."""
        owner, sandbox_id = entry.record.workspace, entry.record.id
        if entry.open_streams >= self._limit:
            raise ClocheError(
                "sandbox.busy",
                f"{entry.open_streams} connections lead into sandbox {sandbox_id} already, {self._limit} is the limit",
                details={"limit": self._limit},
                retry_after=1,
            )
        if self._of_workspace[owner] >= self._together:
            raise ClocheError(
                "request.rate_limited",
                f"{self._together} connections lead into sandboxes of this workspace already, which is the limit",
                details={"limit": self._together},
                retry_after=1,
            )
        entry.open_streams += 1
        self._of_workspace[owner] += 1
        try:
            found = await made()
        except BaseException:
            self._leave(entry)
            raise
        return _Counted(found, entry, self._leave)

    def _leave(self, entry: Entry) -> None:
        entry.open_streams -= 1
        self._of_workspace[entry.record.workspace] -= 1
        if not self._of_workspace[entry.record.workspace]:
            del self._of_workspace[entry.record.workspace]
        entry.last_activity = self._clock.monotonic()


class _Counted:
    """Counts bytes, and says when it is over."""

    def __init__(self, stream: ByteStream, entry: Entry, leave: Callable[[Entry], None]) -> None:
        self._stream = stream
        self._entry = entry
        self._leave: Callable[[Entry], None] | None = leave

    async def read(self) -> bytes:
        data = await self._stream.read()
        self._entry.traffic.out(len(data))
        return data

    async def write(self, data: bytes) -> None:
        self._entry.traffic.bytes_in += len(data)
        await self._stream.write(data)

    async def write_eof(self) -> None:
        await self._stream.write_eof()

    def close(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            self._stream.close()
            leave(self._entry)
