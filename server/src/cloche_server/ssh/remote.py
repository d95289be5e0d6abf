"""Listeners inside the sandbox whose connections go to the client (`-R`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import asyncssh

from cloche_server.app.listening import Listening
from cloche_server.core.errors import ClocheError
from cloche_server.core.streams import ByteStream
from cloche_server.guest.sockets import Arrival
from cloche_server.ssh.flow import Connection
from cloche_server.ssh.forward import Forwarded, is_sandbox

#: Listeners of one SSH connection.
MAX_LISTENERS: Final = 16
#: Connections of all of its listeners at once; more wait in the sandbox.
MAX_ARRIVALS: Final = 64
#: What clients say for "all addresses". It is loopback here, as with an SSH server whose GatewayPorts is off.
_ANY: Final = frozenset({"", "*", "0.0.0.0", "::"})  # noqa: S104 - nothing is bound to it


#: What AsyncSSH is told: a listener, or False.
Answer = asyncssh.SSHListener | bool


@dataclass(frozen=True, slots=True)
class Ground:
    """What the listeners of one connection need: who minds their tasks, `beat` when something moves, `end` the whole
    connection with a sentence, and `listen` in its sandbox."""

    connection: Connection
    start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    beat: Callable[[], None]
    end: Callable[[str], None]
    listen: Callable[[int | str], Awaitable[Listening]]


def is_listenable(host: str) -> bool:
    """Whether a client may ask for this address; whatever it says, loopback is meant."""
    return host in _ANY or is_sandbox(host)


class Remotes:
    """Those of one SSH connection."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._open = 0
        self.room = asyncio.Semaphore(MAX_ARRIVALS)

    async def port(self, host: str, port: int) -> Answer:
        """False: refused; the client has been told why, if it listens to that."""
        if not is_listenable(host):
            return self._refused("listeners are on loopback in a sandbox; ask for localhost")
        if not 0 <= port <= 65535:
            return self._refused("there is no such port")
        return await self._made(port, host)

    async def path(self, path: str) -> Answer:
        if not path.startswith("/") or "\0" in path:
            return self._refused("the path of a Unix socket has to be absolute")
        return await self._made(path, "")

    async def _made(self, where: int | str, host: str) -> Answer:
        if self._open >= MAX_LISTENERS:
            return self._refused(f"{MAX_LISTENERS} listeners are open in this connection, which is the limit")
        self._open += 1
        try:
            listening = await self._ground.listen(where)
        except (ClocheError, asyncio.CancelledError) as error:
            self._open -= 1
            if isinstance(error, asyncio.CancelledError):
                raise
            return self._refused(error.message)
        if self._ground.connection.is_closed():
            self._open -= 1
            listening.close()
            return False
        return RemoteListener(self._ground, listening, self.room, where, host, self._left)

    def _refused(self, why: str) -> bool:
        self._ground.connection.send_debug(f"cloche: {why}", "en", True)
        return False

    def _left(self) -> None:
        self._open -= 1


class RemoteListener(asyncssh.SSHListener):
    """One listener. AsyncSSH closes it when the client asks for that, or has gone."""

    def __init__(
        self,
        ground: Ground,
        listening: Listening,
        room: asyncio.Semaphore,
        where: int | str,
        host: str,
        left: Callable[[], None],
    ) -> None:
        super().__init__()
        self._ground = ground
        self._listening = listening
        self._room = room
        self._where = where
        self._host = host
        self._closed = False
        self._task = ground.start(self._run())

        def over(_: asyncio.Task[None]) -> None:
            left()
            listening.close()

        # Not in the task: one that is cancelled before it has begun does nothing at all.
        self._task.add_done_callback(over)

    def get_port(self) -> int:
        return self._listening.port

    def close(self) -> None:
        """What it has taken already goes on."""
        self._closed = True
        self._task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while True:
                arrival = await self._listening.next()
                await self._room.acquire()
                self._ground.start(self._carry(arrival))
        except ClocheError as error:
            if not self._closed:
                # Nothing else in the protocol tells a client that one of its ports has ended.
                self._ground.end(f"the forwarded {self._name()} has ended with its sandbox: {error.message}")

    def _name(self) -> str:
        return f"port {self._listening.port}" if isinstance(self._where, int) else "socket"

    async def _carry(self, arrival: Arrival) -> None:
        upstream: ByteStream | None = None
        given = False
        try:
            upstream = await self._listening.take(arrival)
            joined = Forwarded(
                self._ground.connection, upstream, self._ground.start, self._ground.beat, self._room.release
            )
            await self._open_channel(joined, arrival)
            given = True
        except (ClocheError, OSError, asyncssh.Error):
            return  # the one that connected sees that it is cut
        finally:
            if not given:
                self._room.release()
                if upstream is not None:
                    upstream.close()

    async def _open_channel(self, joined: Forwarded, arrival: Arrival) -> None:
        connection = self._ground.connection
        if connection.is_closed():
            raise ConnectionResetError("the client has gone")
        if isinstance(self._where, str):
            await connection.socket_channel().accept(lambda: joined, self._where)
            return
        port = self._listening.port
        await connection.port_channel().accept(lambda: joined, self._host, port, arrival.host, arrival.port)
