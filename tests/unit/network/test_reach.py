"""Connections into a slot, as the kernel makes them; a namespace at the other end of its card stands for the guest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche_server.core.network import GATEWAY_IP4, GUEST_IP4
from cloche_server.host import netns
from cloche_server.host.network import nft_obstacle, tap_obstacle
from cloche_server.network.reach import SlotReach, SlotStream
from cloche_server.network.slots import Slots

OBSTACLE = tap_obstacle() or nft_obstacle() or (None if os.geteuid() == 0 else "only root makes namespaces")
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=f"no slot can be made here: {OBSTACLE}")

#: What a tap prepends to each frame.
_VNET = 10


@contextlib.asynccontextmanager
async def slot(root: Path) -> AsyncIterator[tuple[SlotReach, int]]:
    """A slot without a guest: what is sent to it arrives at the descriptor."""
    slots = Slots(root, 0)
    card = await slots.open("m")
    os.set_blocking(card, False)
    try:
        yield SlotReach(slots), card
    finally:
        os.close(card)
        await slots.close("m")


@contextlib.asynccontextmanager
async def pair(root: Path) -> AsyncIterator[tuple[SlotReach, socket.socket]]:
    """A slot whose card leads into another namespace, which has the guest's address; and a listener there."""
    slots = Slots(root, 0)
    host_side, guest_side = root / "m", root / "guest"

    def cable() -> None:
        subprocess.run(["ip", "-batch", "-"], input=b"link set lo up\n", check=True)

    netns.create(host_side, cable)
    netns.create(guest_side, cable)
    try:

        def wire() -> None:
            subprocess.run(
                ["ip", "link", "add", "tap0", "type", "veth", "peer", "name", "eth0", "netns", str(guest_side)],
                check=True,
            )
            subprocess.run(["ip", "address", "add", f"{GATEWAY_IP4}/30", "dev", "tap0"], check=True)
            subprocess.run(["ip", "link", "set", "tap0", "up"], check=True)

        def plug() -> None:
            subprocess.run(["ip", "address", "add", f"{GUEST_IP4}/30", "dev", "eth0"], check=True)
            subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)

        netns.inside(host_side, wire)
        netns.inside(guest_side, plug)
        with netns.inside(guest_side, lambda: netns.bound(socket.SOCK_STREAM, socket.AF_INET, 3000)) as listener:
            yield SlotReach(slots), listener
    finally:
        netns.remove(guest_side)
        netns.remove(host_side)


async def dialed(reach: SlotReach, listener: socket.socket) -> tuple[SlotStream, socket.socket]:
    stream = await reach("m", 3000, 10)
    peer, address = await asyncio.get_running_loop().sock_accept(listener)
    assert address[0] == GATEWAY_IP4
    return stream, peer


async def test_bytes_go_both_ways_and_each_direction_ends_by_itself(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with pair(tmp_path) as (reach, listener):
        stream, peer = await dialed(reach, listener)
        await stream.write(b"there")
        assert await loop.sock_recv(peer, 100) == b"there"
        await stream.write_eof()
        assert await loop.sock_recv(peer, 100) == b""
        await loop.sock_sendall(peer, b"and back")
        peer.shutdown(socket.SHUT_WR)
        assert [await stream.read(), await stream.read()] == [b"and back", b""]
        stream.close()
        stream.close()
        peer.close()


async def test_what_did_not_end_in_order_is_cut_for_both(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with pair(tmp_path) as (reach, listener):
        stream, peer = await dialed(reach, listener)
        stream.close()
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(peer, 100)
        peer.close()
        stream, peer = await dialed(reach, listener)
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        stream.abort()
        with pytest.raises(ConnectionResetError):
            await reading
        with pytest.raises(ConnectionResetError):
            await stream.write(b"x")
        peer.close()


async def test_nothing_listens(tmp_path: Path) -> None:
    async with pair(tmp_path) as (reach, _):
        with pytest.raises(ConnectionRefusedError):
            await reach("m", 3001, 10)
        with pytest.raises(FileNotFoundError):
            await reach("nobody", 3000, 10)
        (tmp_path / "unheld").touch()
        with pytest.raises(OSError, match="setns"):
            await reach("unheld", 3000, 10)


async def test_a_guest_that_says_nothing_holds_nobody_up_and_only_it_is_asked(tmp_path: Path) -> None:
    async with slot(tmp_path) as (reach, card):
        with pytest.raises(TimeoutError):
            await reach("m", 3000, 0.3)
        asked = set()
        with contextlib.suppress(BlockingIOError):
            while frame := os.read(card, 2000)[_VNET:]:
                if frame[12:14] == b"\x08\x00" and frame[23] == socket.IPPROTO_TCP:
                    asked.add((socket.inet_ntoa(frame[26:30]), socket.inet_ntoa(frame[30:34])))
        assert asked == {(GATEWAY_IP4, GUEST_IP4)}


async def test_a_socket_leaves_by_the_card_or_not_at_all(tmp_path: Path) -> None:
    """Whatever else there is in a namespace, and were it the very port: it is not reached."""
    async with pair(tmp_path):

        def ask() -> None:
            with socket.create_server(("127.0.0.1", 3000)), netns.outgoing("tap0") as sock:
                sock.settimeout(0.3)
                sock.connect(("127.0.0.1", 3000))

        with pytest.raises(OSError):  # unreachable, refused or in vain: all are well
            netns.inside(tmp_path / "m", ask)
