"""Sockets of a network namespace for datagrams of any destination: what comes in, with where it was meant to go, and
what goes out in the name of others. They are made with rights and used without.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

_SOL_IPV6: Final = 41
_IP_TRANSPARENT: Final = 19
_IPV6_TRANSPARENT: Final = 75
_IP_RECVORIGDSTADDR: Final = 20
_IPV6_RECVORIGDSTADDR: Final = 74
_IP_PKTINFO: Final = 8
_SO_ATTACH_FILTER: Final = 26
_SO_LOCK_FILTER: Final = 44
_MAX_DATAGRAM: Final = 65536
_DISCARD: Final = 9
_libc = ctypes.CDLL(None, use_errno=True)

Where = tuple[IPv4Address | IPv6Address, int]


def catcher(family: socket.AddressFamily, port: int) -> socket.socket:
    """A UDP socket for what the rules of the namespace lead to `port`, whatever its destination. Raises OSError."""
    made = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if family is socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.setsockopt(_SOL_IPV6, _IPV6_TRANSPARENT, 1)
            made.setsockopt(_SOL_IPV6, _IPV6_RECVORIGDSTADDR, 1)
        else:
            made.setsockopt(socket.SOL_IP, _IP_TRANSPARENT, 1)
            made.setsockopt(socket.SOL_IP, _IP_RECVORIGDSTADDR, 1)
        made.bind(("::" if family is socket.AF_INET6 else "0.0.0.0", port))  # noqa: S104 - the whole namespace is ours
    except BaseException:
        made.close()
        raise
    return made


def sender(family: socket.AddressFamily, protocol: int, device: str) -> socket.socket:
    """A raw socket that sends messages of one protocol by `device`, from any source, and receives nothing. Raises
    OSError."""
    made = socket.socket(family, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
    try:
        _deafen(made)
        if family is socket.AF_INET6:
            made.setsockopt(_SOL_IPV6, _IPV6_TRANSPARENT, 1)
        else:
            made.setsockopt(socket.SOL_IP, _IP_TRANSPARENT, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    except BaseException:
        made.close()
        raise
    return made


def _deafen(sock: socket.socket) -> None:
    """A filter that takes no packet, for good."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    sock.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)


def shut(sock: socket.socket, guest: str) -> None:
    """A catcher that is shut catches nothing, and the rules of the namespace go on as if there were none. `guest`: the
    only sender there is. Raises OSError: for one that has no way to it."""
    # Connected, it is found for one port of the sender at most, and not as one that stands for all destinations.
    sock.connect((guest, _DISCARD))


def reopen(sock: socket.socket) -> None:
    """The opposite of `shut`. Raises OSError."""
    # Of IPv6 the kernel keeps the address of the peer, and listens to it alone: that is why it is the guest's.
    none = struct.pack("H14x", socket.AF_UNSPEC)
    if _libc.connect(sock.fileno(), none, len(none)) != 0:
        raise OSError(ctypes.get_errno(), "connect")


def receive(sock: socket.socket) -> tuple[bytes, Where, Where] | None:
    """Payload, sender and destination of the next datagram of a catcher; None for one that does not say where it was
    meant to go. Raises BlockingIOError, OSError."""
    payload, ancillary, _, sender_of = sock.recvmsg(_MAX_DATAGRAM, 128)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_IP, _IP_RECVORIGDSTADDR) and len(data) >= 8:
            port, packed = struct.unpack_from("!2xH4s", data)
            return payload, (IPv4Address(sender_of[0]), sender_of[1]), (IPv4Address(packed), port)
        if (level, kind) == (_SOL_IPV6, _IPV6_RECVORIGDSTADDR) and len(data) >= 24:
            port, packed = struct.unpack_from("!2xH4x16s", data)
            return payload, (IPv6Address(sender_of[0].partition("%")[0]), sender_of[1]), (IPv6Address(packed), port)
    return None


def send_as(
    sock: socket.socket, source: IPv4Address | IPv6Address | None, target: IPv4Address | IPv6Address, message: bytes
) -> None:
    """Sends a message of a `sender` as if it came from `source` (None: as ourselves). What cannot be sent now is lost,
    as datagrams are."""
    ancillary: list[tuple[int, int, bytes]] = []
    if isinstance(source, IPv4Address):
        ancillary = [(socket.SOL_IP, _IP_PKTINFO, struct.pack("I4s4s", 0, source.packed, bytes(4)))]
    elif source is not None:
        ancillary = [(_SOL_IPV6, socket.IPV6_PKTINFO, source.packed + struct.pack("I", 0))]
    with contextlib.suppress(OSError):
        sock.sendmsg([message], ancillary, 0, (str(target), 0))


# ------------------------------------------------------------------ routes

_RTM_NEWRULE: Final = 32
_NLMSG_ERROR: Final = 2
#: A request that is answered, and makes what is not there yet.
_FLAGS: Final = 0x1 | 0x4 | 0x200 | 0x400
_FRA_FWMARK: Final = 10
_TO_TABLE: Final = 1


def route_marked(mark: int, table: int) -> None:
    """Packets with a mark are routed by a table of this thread's namespace, in both families; fine when they are
    already. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as link:
        for family in (socket.AF_INET, socket.AF_INET6):
            body = struct.pack("=8BI", family, 0, 0, 0, table, 0, 0, _TO_TABLE, 0)
            body += struct.pack("=HHI", 8, _FRA_FWMARK, mark)
            link.send(struct.pack("=IHHII", 16 + len(body), _RTM_NEWRULE, _FLAGS, 1, 0) + body)
            answer = link.recv(4096)
            kind, code = struct.unpack_from("=4xH10xi", answer)
            if kind == _NLMSG_ERROR and code not in {0, -errno.EEXIST}:
                raise OSError(-code, f"rule: {os.strerror(-code)}")


def has_table(table: int) -> bool:
    """Whether this thread's namespace has a routing table of IPv4 with such a number."""
    lines = Path("/proc/thread-self/net/fib_trie").read_text("ascii").splitlines()
    return f"Id {table}:" in lines
