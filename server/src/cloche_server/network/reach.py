"""Connections from the host into a slot: to its guest, and to nothing else.

The socket is made inside the slot's namespace and bound to its tap device. There is no route in it but to the guest,
whose hardware address is fixed, so whatever the guest does, at the other end there is only the guest.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from cloche_server.core.network import GUEST_IP4, TAP
from cloche_server.host import netns
from cloche_server.host.sockets import SocketStream
from cloche_server.network.slots import Slots

#: Seconds that what was written may still take when a connection ends in order: a guest need not take it ever.
LINGER: Final = 30.0


class SlotStream(SocketStream):
    """A `ByteStream`: ended in order when both directions have ended, and cut otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self._said_all = False

    async def write_eof(self) -> None:
        self._said_all = True
        await super().write_eof()

    def abort(self) -> None:
        if self._lost is None:
            self._lost = ConnectionResetError("the connection was cut")
        super().abort()

    def close(self) -> None:
        if self._closed:
            return
        if not (self._said_all and self._eof):
            self.abort()
            return
        super().close()
        if self.transport.get_write_buffer_size():
            self._loop.call_later(LINGER, self.transport.abort)


class SlotReach:
    """Call it with a machine and a port."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    async def __call__(self, machine_id: str, port: int, timeout: float) -> SlotStream:
        """Raises OSError: refused, no such slot; `TimeoutError`, when the guest does not say anything."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout):
            made = loop.run_in_executor(None, netns.inside, self._slots.path(machine_id), _socket)
            try:
                sock = await asyncio.shield(made)
            except asyncio.CancelledError:  # the thread cannot be stopped
                made.add_done_callback(_let_go)
                raise
            try:
                await loop.sock_connect(sock, (GUEST_IP4, port))
                _, stream = await loop.create_connection(SlotStream, sock=sock)
            except BaseException:
                sock.close()
                raise
        return stream


def _socket() -> socket.socket:
    return netns.outgoing(TAP)


def _let_go(made: asyncio.Future[socket.socket]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close()
