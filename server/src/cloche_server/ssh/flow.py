"""Back-pressure: a peer that sends too much waits, and one that does not read is not written to.

AsyncSSH does this for each channel by its window. What is added here is what a client could otherwise make the server
keep: packets of one byte in a large window, requests and variables without number, and a window that is wide open on a
connection from which nobody reads.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import asyncssh
from asyncssh import SSHServerChannel, SSHServerConnection, SSHTCPChannel, SSHUNIXChannel
from asyncssh.constants import MSG_IGNORE
from asyncssh.packet import SSHPacket

#: Bytes of one channel that may be under way to it; and of each further one, where many are open already: what nobody
#: in the sandbox reads is kept here.
WINDOW: Final = 1024 * 1024
WINDOW_OF_MANY: Final = 128 * 1024
MANY: Final = 4
PACKET: Final = 32 * 1024
#: Answers that wait for the end of a key exchange, and bytes that wait for the look-up of a password.
MAX_DEFERRED: Final = 1000
#: Requests about the connection that wait for one before them, which may wait for the sandbox.
MAX_REQUESTS: Final = 256
MAX_PENDING: Final = 4 * 1024 * 1024
#: Bytes that wait for the socket before writers stop.
SOCKET_HIGH: Final = 256 * 1024
#: Variables that a client may send, and their bytes together.
MAX_ENV: Final = 64
MAX_ENV_BYTES: Final = 32 * 1024
#: How often it is looked whether a key exchange has ended that writers wait for (seconds).
_REKEY_LOOK: Final = 0.05


def joined(buffer: list[tuple[Any, int | None]], data: bytes, datatype: int | None) -> bool:
    """Puts bytes behind those that wait already, so that many small packets cost no more than their bytes."""
    if not buffer or buffer[-1][1] != datatype:
        return False
    last = buffer[-1][0]
    if len(last) >= PACKET:
        return False
    if isinstance(last, bytearray):
        last.extend(data)
    else:
        buffer[-1] = (bytearray(last + data), datatype)
    return True


class _Frugal:
    """What both kinds of channels have in common."""

    _recv_paused: bool | str
    _recv_buf: list[tuple[bytes, int | None]]
    _recv_window: int
    _send_state: str

    def _accept_data(self, data: bytes, datatype: int | None = None) -> None:
        closing = self._send_state in {"close_pending", "closed"}
        if data and self._recv_paused and not closing and joined(self._recv_buf, data, datatype):
            self._recv_window -= len(data)
            return
        super()._accept_data(data, datatype)  # type: ignore[misc]


class ShellChannel(_Frugal, SSHServerChannel[bytes]):
    """The channel of a command."""

    _env_bytes = 0

    def _process_env_request(self, packet: SSHPacket) -> bool:
        name, value = packet.get_string(), packet.get_string()
        packet.check_end()
        size = len(name) + len(value)
        if len(self._env) >= MAX_ENV or self._env_bytes + size > MAX_ENV_BYTES:
            return False
        self._env_bytes += size
        self._env[name] = value
        return True


class PortChannel(_Frugal, SSHTCPChannel[bytes]):
    """The channel of a forwarded connection."""


class SocketChannel(_Frugal, SSHUNIXChannel[bytes]):
    """The channel of a connection of a Unix socket."""


class Connection(SSHServerConnection):
    """One client. `writable` is cleared while it does not read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: asyncssh.SSHServerConnectionOptions) -> None:
        super().__init__(loop, options)
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            transport.set_write_buffer_limits(high=SOCKET_HIGH)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None = None) -> None:
        self.writable.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self.writable.clear()
        if self._transport is not None:
            # Answers to what it asks for would pile up.
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.writable.set()
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes, datatype: Any = None) -> None:
        super().data_received(data, datatype)
        waiting = len(self._global_request_queue)
        if len(self._deferred_packets) > MAX_DEFERRED or len(self._inpbuf) > MAX_PENDING or waiting > MAX_REQUESTS:
            self.abort()

    def send_packet(self, pkttype: int, *args: bytes, handler: Any = None) -> None:
        """Without the empty packets that AsyncSSH puts before each one: they guard a mode of ciphers that is not
        offered here, and double the number of writes."""
        if pkttype != MSG_IGNORE:
            super().send_packet(pkttype, *args, handler=handler)

    async def drained(self) -> None:
        """Until it can take more."""
        await self.writable.wait()
        while not self.is_closed() and len(self._deferred_packets) > MAX_DEFERRED // 8:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(_REKEY_LOOK)

    def _window_of_next(self) -> int:
        return WINDOW if len(self._channels) < MANY else WINDOW_OF_MANY

    def shell_channel(self) -> ShellChannel:
        self._update_recv_pktlen(PACKET)
        return ShellChannel(
            self, self._loop, self._allow_pty, self._line_editor, self._line_echo, self._line_history,
            self._max_line_length, None, "strict", self._window_of_next(), PACKET,
        )  # fmt: skip

    def port_channel(self) -> PortChannel:
        self._update_recv_pktlen(PACKET)
        return PortChannel(self, self._loop, None, "strict", self._window_of_next(), PACKET)

    def socket_channel(self) -> SocketChannel:
        self._update_recv_pktlen(PACKET)
        return SocketChannel(self, self._loop, None, "strict", self._window_of_next(), PACKET)
