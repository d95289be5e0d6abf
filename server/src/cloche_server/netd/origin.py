"""Where a redirected connection was meant to go."""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv4Address, IPv6Address
from typing import Final

_SO_ORIGINAL_DST: Final = 80
_SOL_IPV6: Final = 41


def original_destination(sock: socket.socket) -> tuple[str, int]:
    """Address and port before the redirect of the slot. Raises OSError."""
    if sock.family == socket.AF_INET:
        data = sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
        port, packed = struct.unpack_from("!2xH4s", data)
        return str(IPv4Address(packed)), port
    data = sock.getsockopt(_SOL_IPV6, _SO_ORIGINAL_DST, 28)
    port, packed = struct.unpack_from("!2xH4x16s", data)
    return str(IPv6Address(packed)), port
