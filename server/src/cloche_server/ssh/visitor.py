"""One client: who it is, what it may open, and when its connection ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any, Final

import asyncssh
from asyncssh.constants import (
    DISC_BY_APPLICATION,
    DISC_NO_MORE_AUTH_METHODS_AVAILABLE,
    DISC_TOO_MANY_CONNECTIONS,
    OPEN_ADMINISTRATIVELY_PROHIBITED,
    OPEN_CONNECT_FAILED,
    OPEN_RESOURCE_SHORTAGE,
)

from cloche_server.app.listening import Listening
from cloche_server.app.sshkeys import Visit
from cloche_server.core.errors import ClocheError
from cloche_server.core.previews import is_port
from cloche_server.core.sshkeys import fingerprint_of
from cloche_server.core.streams import ByteStream
from cloche_server.ssh.flow import Connection, PortChannel, ShellChannel, SocketChannel
from cloche_server.ssh.forward import Forwarded, is_sandbox
from cloche_server.ssh.house import House
from cloche_server.ssh.remote import Answer, Ground, Remotes
from cloche_server.ssh.session import Place, Session

#: Commands and shells of one connection at once, and connections to ports.
MAX_SESSIONS: Final = 32
MAX_FORWARDS: Final = 128
#: Keys and passwords that one connection may offer. Agents offer all keys that they have.
MAX_OFFERS: Final = 20
#: Characters of a name, and of a password, that are looked at.
MAX_NAME: Final = 128
_ENDED: Final = "the token or key that opened this connection has ended"
_UNKNOWN: Final = "the server could not look whether the token or key is still good; connect again"


class Visitor(asyncssh.SSHServer):
    def __init__(self, house: House) -> None:
        self._house = house
        self._connection: Connection
        self._client = "unknown"
        self._visit: Visit | None = None
        self._entered = False
        self._task: asyncio.Task[None] | None = None
        self._offers = 0
        self._sessions = 0
        self._forwards = 0
        self._remotes: Remotes | None = None
        self._moved = 0.0
        self._closed = asyncio.Event()

    # ---------------------------------------------------------------- life

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        assert isinstance(conn, Connection)
        self._connection = conn
        peer = conn.get_extra_info("peername")
        self._client = str(peer[0]) if peer else "unknown"
        if not self._house.arrive(self, self._client):
            conn.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        self._house.leave(self)
        if self._visit is not None and self._entered:
            self._house.release(self._visit)

    def end(self, sentence: str) -> None:
        """Tells the client why, and closes its connection."""
        with contextlib.suppress(OSError):
            self._connection.disconnect(DISC_BY_APPLICATION, sentence)

    def cut(self) -> None:
        self._connection.abort()

    # ---------------------------------------------------------------- who it is

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return True

    def _offered(self) -> None:
        self._offers += 1
        if self._offers > MAX_OFFERS:
            raise asyncssh.DisconnectError(
                DISC_NO_MORE_AUTH_METHODS_AVAILABLE, "too many keys and passwords were offered"
            )

    async def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        self._offered()
        self._visit = None
        if len(username) <= MAX_NAME:
            self._visit = await self._house.keys.by_key(username, fingerprint_of(key.public_data))
        return self._visit is not None

    async def validate_password(self, username: str, password: str) -> bool:
        self._offered()
        self._visit = None
        why = "auth.invalid_token"
        try:
            if len(username) <= MAX_NAME and len(password) <= MAX_NAME:
                self._visit = await self._house.keys.by_token(username, password)
        except ClocheError as error:
            # Whoever has the token may be told what is wrong with it, or with the name.
            why = error.code
            self._connection.send_auth_banner(f"cloche: {error.message}\r\n")
        if self._visit is None:
            self._house.wrong(self._client, why)
        return self._visit is not None

    def auth_completed(self) -> None:
        visit = self._visit
        if visit is None:
            self._connection.abort()
            return
        refusal = self._house.admit(self, visit, self._client)
        if refusal is not None:
            self._connection.disconnect(DISC_TOO_MANY_CONNECTIONS, refusal)
            return
        self._entered = True
        self._beat()
        self._task = self._house.start(self._live(visit))

    # ---------------------------------------------------------------- when it ends

    def _beat(self) -> None:
        self._moved = asyncio.get_running_loop().time()

    async def _live(self, visit: Visit) -> None:
        """Until the client goes, or its sandbox, token or key ends, or nothing has moved for too long."""
        try:
            with visit.hold():
                # It may have ended between the look at it and here.
                why = await self._until_over(visit) if await visit.stands() else _ENDED
        except asyncio.CancelledError:
            self.end(_ENDED)
            raise
        except Exception:
            # Nobody would look any more whether the token or key has ended.
            self.end(_UNKNOWN)
            raise
        if why is not None:
            self.end(why)

    async def _until_over(self, visit: Visit) -> str | None:
        loop = asyncio.get_running_loop()
        waiting = [asyncio.ensure_future(self._closed.wait()), asyncio.ensure_future(visit.entry.ended.wait())]
        try:
            while True:
                left = self._house.left(self._moved, loop.time(), visit.expires_at)
                done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if waiting[0] in done:
                    return None
                if waiting[1] in done:
                    return f"sandbox {visit.entry.record.id} has ended"
                why = self._house.over(self._moved, loop.time(), visit.expires_at)
                if why is not None:
                    return why
        finally:
            for one in waiting:
                one.cancel()

    # ---------------------------------------------------------------- what it may open

    def session_requested(self) -> tuple[ShellChannel, Session]:
        visit = self._inside()
        if self._sessions >= MAX_SESSIONS:
            raise asyncssh.ChannelOpenError(
                OPEN_RESOURCE_SHORTAGE, f"{MAX_SESSIONS} sessions are open in this connection, which is the limit"
            )
        self._sessions += 1
        record = visit.entry.record
        place = Place(self._house.attachments, record.workspace, record.id, self._start, self._beat, self._session_left)
        return self._connection.shell_channel(), Session(self._connection, place)

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> tuple[PortChannel, Awaitable[Forwarded]]:
        visit = self._inside()
        if not is_sandbox(dest_host) or not is_port(dest_port):
            raise asyncssh.ChannelOpenError(
                OPEN_ADMINISTRATIVELY_PROHIBITED,
                "only ports of the sandbox can be forwarded; say localhost as the destination",
            )
        record = visit.entry.record
        self._room()
        dialed = self._house.dialer.dial(record.workspace, record.id, dest_port)
        return self._connection.port_channel(), self._dial(dialed)

    def unix_connection_requested(self, dest_path: str) -> tuple[SocketChannel, Awaitable[Forwarded]]:
        record = self._inside().entry.record
        if not dest_path.startswith("/") or "\0" in dest_path:
            raise asyncssh.ChannelOpenError(
                OPEN_ADMINISTRATIVELY_PROHIBITED, "the path of a Unix socket has to be absolute"
            )
        self._room()
        dialed = self._house.dialer.dial_unix(record.workspace, record.id, dest_path)
        return self._connection.socket_channel(), self._dial(dialed)

    def server_requested(self, listen_host: str, listen_port: int) -> Awaitable[Answer]:
        return self._remote().port(listen_host, listen_port)

    def unix_server_requested(self, listen_path: str) -> Awaitable[Answer]:
        return self._remote().path(listen_path)

    def _remote(self) -> Remotes:
        if self._remotes is None:
            record = self._inside().entry.record

            def listen(where: int | str) -> Awaitable[Listening]:
                return self._house.dialer.listen(record.workspace, record.id, where)

            self._remotes = Remotes(Ground(self._connection, self._start, self._beat, self.end, listen))
        return self._remotes

    def _room(self) -> None:
        """Counts one more, at once: many may be asked for before the first is dialed."""
        if self._forwards >= MAX_FORWARDS:
            raise asyncssh.ChannelOpenError(
                OPEN_RESOURCE_SHORTAGE, f"{MAX_FORWARDS} forwarded connections are open, which is the limit"
            )
        self._forwards += 1

    async def _dial(self, dialed: Awaitable[ByteStream]) -> Forwarded:
        try:
            upstream = await dialed
        except ClocheError as error:
            self._forwards -= 1
            raise asyncssh.ChannelOpenError(OPEN_CONNECT_FAILED, error.message) from error
        except (OSError, asyncio.CancelledError) as error:
            self._forwards -= 1
            raise asyncssh.ChannelOpenError(OPEN_CONNECT_FAILED, "the connection was not made") from error
        if self._connection.is_closed():
            self._forwards -= 1
            upstream.close()
            raise asyncssh.ChannelOpenError(OPEN_CONNECT_FAILED, "the client has gone")
        return Forwarded(self._connection, upstream, self._start, self._beat, self._forward_left)

    def _inside(self) -> Visit:
        if self._visit is None or not self._entered:
            raise asyncssh.ChannelOpenError(OPEN_ADMINISTRATIVELY_PROHIBITED, "nobody has come in")
        return self._visit

    def _session_left(self) -> None:
        self._sessions -= 1

    def _forward_left(self) -> None:
        self._forwards -= 1

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._house.start(work)
