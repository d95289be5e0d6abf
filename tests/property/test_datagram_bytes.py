"""Headers of UDP and ICMP: whatever is in a datagram, the kernel of a guest takes what we make of it."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.addresses import Address
from cloche_server.core.datagrams import MAX_PAYLOAD, checksum, icmp_unreachable, udp_message

payloads = st.binary(max_size=3000)
ports = st.integers(1, 65535)
pairs = st.tuples(st.ip_addresses(v=4), st.ip_addresses(v=4)) | st.tuples(st.ip_addresses(v=6), st.ip_addresses(v=6))


def folded(data: bytes) -> int:
    """The sum of RFC 1071, step by step."""
    data += b"\0" * (len(data) % 2)
    total = 0
    for (word,) in struct.iter_unpack("!H", data):
        total += word
        total = (total & 0xFFFF) + (total >> 16)
    return total


@given(st.binary(min_size=1, max_size=500))
def test_the_sum_makes_everything_add_up(data: bytes) -> None:
    data += b"\0" * (len(data) % 2)
    assert folded(data + checksum(data).to_bytes(2, "big")) == 0xFFFF
    assert checksum(data) != 0, "that would say that there is none"


@given(pairs, ports, ports, payloads)
def test_a_datagram_says_what_it_was_given(
    pair: tuple[Address, Address], source_port: int, target_port: int, payload: bytes
) -> None:
    source, target = pair
    message = udp_message(source, source_port, target, target_port, payload)
    told = struct.unpack_from("!HHHH", message)
    assert told[:3] == (source_port, target_port, len(message))
    assert message[8:] == payload
    length = struct.pack("!BBH", 0, 17, len(message)) if source.version == 4 else struct.pack("!II", len(message), 17)
    assert folded(source.packed + target.packed + length + message) == 0xFFFF


@given(pairs, ports, ports, st.integers(0, MAX_PAYLOAD), st.booleans())
def test_a_refusal_quotes_what_was_sent(
    pair: tuple[Address, Address], source_port: int, target_port: int, size: int, port: bool
) -> None:
    source, target = pair
    message = icmp_unreachable(source, source_port, target, target_port, size, port=port)
    quoted = message[8:]
    if isinstance(source, IPv4Address):
        assert message[:2] == bytes((3, 3 if port else 13))
        assert folded(message) == 0xFFFF
        assert folded(quoted[:20]) == 0xFFFF
        assert (quoted[0], quoted[9]) == (0x45, 17)
        addresses, ports_at = quoted[12:20], 20
    else:
        assert message[:2] == bytes((1, 4 if port else 1))
        assert (quoted[0] >> 4, quoted[6]) == (6, 17)
        addresses, ports_at = quoted[8:40], 40
    assert addresses == source.packed + target.packed
    assert struct.unpack_from("!HHH", quoted, ports_at) == (source_port, target_port, size + 8)
    assert len(message) == 8 + ports_at + 8


def test_what_does_not_fit_is_refused() -> None:
    one, six = ip_address("45.90.1.10"), ip_address("2a0f::1")
    with pytest.raises(ValueError, match="fit"):
        udp_message(one, 1, one, 1, bytes(MAX_PAYLOAD + 1))
    assert len(udp_message(six, 1, six, 1, bytes(MAX_PAYLOAD))) == MAX_PAYLOAD + 8
    for wrong in (lambda: udp_message(one, 1, six, 1, b""), lambda: icmp_unreachable(six, 1, one, 1, 0, port=True)):
        with pytest.raises(ValueError, match="one family"):
            wrong()
    assert isinstance(six, IPv6Address)
