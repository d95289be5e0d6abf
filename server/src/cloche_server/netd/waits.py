"""Waiting for sockets, without reading from them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Final

_LINGER: Final = struct.pack("ii", 1, 0)


async def readable(*socks: socket.socket) -> socket.socket:
    """The first of them that has something to read, an end, or an error."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[socket.socket] = loop.create_future()

    def set_ready(sock: socket.socket) -> None:
        if not ready.done():
            ready.set_result(sock)

    for sock in socks:
        loop.add_reader(sock.fileno(), set_ready, sock)
    try:
        return await ready
    finally:
        for sock in socks:
            if sock.fileno() >= 0:
                loop.remove_reader(sock.fileno())


def reset(sock: socket.socket) -> None:
    """Closes with RST: the other side knows at once that it was refused."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
    sock.close()
