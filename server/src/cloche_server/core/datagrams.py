"""UDP and ICMP messages to a guest, as bytes; the header of IP around them is the kernel's. Pure.

Sums are those of the internet (RFC 1071): numbers of 16 bits are added with the carry at the other end, which is the
remainder of the whole as one number by 65535.
"""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from cloche_server.core.addresses import Address

#: What one datagram can hold over IPv4, so that an answer is never larger than a packet can be.
MAX_PAYLOAD: Final = 65535 - 20 - 8
_UDP: Final = 17
_HEADER: Final = struct.Struct("!HHHH")
#: Of a datagram that is refused so much is quoted; programs are found by its ports.
_QUOTED: Final = 8


def checksum(data: bytes) -> int:
    """What stands in a header so that everything sums up to 65535; never 0, which would say that there is none."""
    padded = data if len(data) % 2 == 0 else data + b"\0"
    return 0xFFFF - int.from_bytes(padded, "big") % 0xFFFF


def udp_message(source: Address, source_port: int, target: Address, target_port: int, payload: bytes) -> bytes:
    """Header and payload of a datagram. Both addresses are of one family. Raises ValueError for a payload that does not
    fit."""
    if source.version != target.version:
        raise ValueError("a datagram has one family")
    length = _HEADER.size + len(payload)
    if len(payload) > MAX_PAYLOAD:
        raise ValueError("the payload does not fit into a datagram")
    bare = _HEADER.pack(source_port, target_port, length, 0) + payload
    if source.version == 4:
        pseudo = source.packed + target.packed + struct.pack("!BBH", 0, _UDP, length)
    else:
        pseudo = source.packed + target.packed + struct.pack("!II", length, _UDP)
    return _HEADER.pack(source_port, target_port, length, checksum(pseudo + bare)) + payload


def icmp_unreachable(
    source: Address, source_port: int, target: Address, target_port: int, size: int, *, port: bool
) -> bytes:
    """The answer to a datagram with a payload of `size` bytes that `source` has sent to `target`: nobody listens there
    (`port`), or it may not go there. Of ICMPv6 the sum is left to the kernel, which knows the addresses."""
    length = _HEADER.size + size
    quoted = _HEADER.pack(source_port, target_port, length & 0xFFFF, 0)[:_QUOTED]
    if isinstance(source, IPv4Address) and isinstance(target, IPv4Address):
        packet = _ip4(source, target, length) + quoted
        bare = struct.pack("!BBHI", 3, 3 if port else 13, 0, 0) + packet
        return bare[:2] + checksum(bare).to_bytes(2, "big") + bare[4:]
    if isinstance(source, IPv6Address) and isinstance(target, IPv6Address):
        head = struct.pack("!IHBB", 6 << 28, length & 0xFFFF, _UDP, 64) + source.packed + target.packed
        return struct.pack("!BBHI", 1, 4 if port else 1, 0, 0) + head + quoted
    raise ValueError("a datagram has one family")


def _ip4(source: IPv4Address, target: IPv4Address, length: int) -> bytes:
    bare = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + length & 0xFFFF, 0, 0, 64, _UDP, 0, source.packed, target.packed)
    return bare[:10] + checksum(bare).to_bytes(2, "big") + bare[12:]
