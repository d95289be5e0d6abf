"""Datagrams in a slot as the kernel has it: what comes out of a tap is caught, and what is answered goes into it."""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import pytest

from cloche_server.core.datagrams import checksum, udp_message
from cloche_server.core.network import GATEWAY_MAC, GUEST_IP4, GUEST_MAC, UDP_TABLE
from cloche_server.host import datagrams, netns
from cloche_server.host.network import nft_obstacle, tap_obstacle
from cloche_server.network import rules
from cloche_server.network.slots import Slots, SlotSockets
from kit.procs import mounts

OBSTACLE = tap_obstacle() or nft_obstacle() or (None if os.geteuid() == 0 else "only root makes namespaces")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no slot can be made here: {OBSTACLE}"),
]

GUEST, OTHER = IPv4Address(GUEST_IP4), IPv4Address("45.90.1.10")
_VNET_HEADER = 10


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    net = tmp_path / "net"
    net.mkdir()
    yield net
    assert mounts(tmp_path) == []


def frame(source: IPv4Address, target: IPv4Address, payload: bytes) -> bytes:
    """A datagram from port 4000 to port 7000, as a guest's card sends it."""
    message = udp_message(source, 4000, target, 7000, payload)
    bare = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(message), 1, 0, 64, 17, 0) + source.packed + target.packed
    head = bare[:10] + checksum(bare).to_bytes(2, "big") + bare[12:]
    link = bytes.fromhex(GATEWAY_MAC.replace(":", "")) + bytes.fromhex(GUEST_MAC.replace(":", "")) + b"\x08\x00"
    return bytes(_VNET_HEADER) + link + head + message


def packets(card: int, protocol: int) -> Iterator[bytes]:
    """IPv4 packets of a protocol that come into the guest within a moment."""
    while select.select([card], [], [], 1.0)[0]:
        found = os.read(card, 4096)[_VNET_HEADER:]
        if found[12:14] == b"\x08\x00" and found[23] == protocol:
            yield found[14:]


def caught(sockets: SlotSockets) -> list[bytes]:
    found = []
    while select.select([sockets.udp4], [], [], 0.3)[0]:
        one = datagrams.receive(sockets.udp4)
        assert one is not None
        assert one[1:] == ((GUEST, 4000), (OTHER, 7000))
        found.append(one[0])
    return found


async def test_a_datagram_is_caught_and_answered_in_the_name_of_its_destination(root: Path) -> None:
    slots = Slots(root, 0)
    card = await slots.open("m")
    sockets = await slots.sockets("m")
    try:
        os.write(card, frame(GUEST, OTHER, b"hello"))
        os.write(card, frame(ip_address("10.0.0.7"), OTHER, b"spoofed"))
        assert caught(sockets) == [b"hello"]
        datagrams.send_as(sockets.udp_out4, OTHER, GUEST, udp_message(OTHER, 7000, GUEST, 4000, b"answer"))
        (answer,) = packets(card, 17)
        assert answer[12:20] == OTHER.packed + GUEST.packed
        assert answer[28:] == b"answer"
        # Nothing else is reached by it: there is no other way out of a slot.
        datagrams.send_as(sockets.udp_out4, GUEST, OTHER, udp_message(GUEST, 7000, OTHER, 4000, b"away"))
        assert list(packets(card, 17)) == []
        assert caught(sockets) == []
    finally:
        sockets.close()
        os.close(card)
        await slots.close("m")


async def test_one_that_is_shut_leaves_the_refusal_to_the_slot(root: Path) -> None:
    slots = Slots(root, 0)
    card = await slots.open("m")
    sockets = await slots.sockets("m")
    try:
        for _ in range(2):
            datagrams.shut(sockets.udp4, GUEST_IP4)
            os.write(card, frame(GUEST, OTHER, b"closed"))
            assert caught(sockets) == []
            (refusal,) = packets(card, 1)
            assert refusal[20:22] == bytes((3, 13))
            datagrams.reopen(sockets.udp4)
            os.write(card, frame(GUEST, OTHER, b"open"))
            assert caught(sockets) == [b"open"]
    finally:
        sockets.close()
        os.close(card)
        await slots.close("m")


async def test_a_slot_of_an_earlier_server_is_brought_up_to_date(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(root, 0)
    with monkeypatch.context() as before:
        older = "".join(line for line in rules.RULES.splitlines(keepends=True) if "tproxy" not in line)
        before.setattr("cloche_server.network.slots.RULES", older)
        before.setattr("cloche_server.network.slots.UDP_LINKS", "")
        before.setattr("cloche_server.host.datagrams.route_marked", lambda mark, table: None)
        card = await slots.open("m")
    assert not netns.inside(slots.path("m"), lambda: datagrams.has_table(UDP_TABLE))
    for _ in range(2):
        sockets = await slots.sockets("m")
        os.write(card, frame(GUEST, OTHER, b"hello"))
        assert caught(sockets) == [b"hello"]
        sockets.close()
    os.close(card)
    await slots.close("m")
