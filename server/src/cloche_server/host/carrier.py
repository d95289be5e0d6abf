"""Whether somebody is at the other end of a network interface."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Final

_SIOCGIFFLAGS: Final = 0x8913
_IFF_RUNNING: Final = 0x40


def has_carrier(sock: socket.socket, interface: str) -> bool:
    """Of an interface in the network namespace that `sock` was made in; needs no rights. A tap has a carrier as long
    as a process holds it open: the machine, whoever has started it. False also when there is no such interface."""
    try:
        found = fcntl.ioctl(sock.fileno(), _SIOCGIFFLAGS, struct.pack("16sH22x", interface.encode("ascii"), 0))
    except OSError:
        return False
    flags: int = struct.unpack_from("16sH", found)[1]
    return bool(flags & _IFF_RUNNING)
