"""Slots as the kernel has them: namespaces, taps, rules. Needs root, /dev/net/tun and nftables."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche_server.core.network import GATEWAY_IP4, TCP_PORT
from cloche_server.host import netns
from cloche_server.host.network import nft_obstacle, tap_obstacle
from cloche_server.network import slots as slots_module
from cloche_server.network.slots import Slots
from kit.procs import mounts

OBSTACLE = tap_obstacle() or nft_obstacle() or (None if os.geteuid() == 0 else "only root makes namespaces")
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=f"no slot can be made here: {OBSTACLE}")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    net = tmp_path / "net"
    net.mkdir()
    yield net
    assert mounts(tmp_path) == []
    assert list(net.iterdir()) == []


async def test_a_slot_from_its_beginning_to_its_end(root: Path) -> None:
    slots = Slots(root, 0)
    card = await slots.open("m")
    assert slots.has("m")
    assert slots.held() == {"m"}
    sockets = await slots.sockets("m")
    assert sockets.tcp4.getsockname() == ("0.0.0.0", TCP_PORT)
    with pytest.raises(OSError, match="in use"):
        await slots.sockets("m")
    sockets.close()
    assert socket.if_nametoindex("lo"), "this thread is where it was"
    with pytest.raises(OSError, match="no interface"):
        socket.if_nametoindex("tap0")
    os.close(card)
    await slots.close("m")
    await slots.close("m")
    assert not slots.has("m")


async def test_a_card_is_one_machine_s(root: Path) -> None:
    """A second VMM cannot take a tap that the first one has; the next one can."""
    slots = Slots(root, 0)
    card = await slots.open("m")
    with pytest.raises(OSError, match="busy"):
        netns.inside(slots.path("m"), lambda: netns.open_tap("tap0"))
    os.close(card)
    os.close(netns.inside(slots.path("m"), lambda: netns.open_tap("tap0")))
    await slots.close("m")


async def test_slots_are_all_alike_and_apart(root: Path) -> None:
    slots = Slots(root, 0)
    cards = [await slots.open(name) for name in ("a", "b")]

    def addresses() -> tuple[int, str]:
        with netns.bound(socket.SOCK_DGRAM, socket.AF_INET, 0) as probe:
            probe.connect(("192.168.127.2", 9))
            return os.stat("/proc/thread-self/ns/net").st_ino, str(probe.getsockname()[0])  # noqa: PTH116

    found = [netns.inside(slots.path(name), addresses) for name in ("a", "b")]
    assert [address for _, address in found] == [GATEWAY_IP4, GATEWAY_IP4]
    assert found[0][0] != found[1][0]
    for card, name in zip(cards, ("a", "b"), strict=True):
        os.close(card)
        await slots.close(name)


async def test_some_are_ready_before_they_are_wanted(root: Path) -> None:
    slots = Slots(root, 2)
    keeping = asyncio.ensure_future(slots.run())
    while len(list(root.iterdir())) < 2:
        await asyncio.sleep(0.01)
    card = await slots.open("m")
    assert slots.held() == {"m"}
    os.close(card)
    keeping.cancel()
    await asyncio.wait({keeping})
    await slots.drain()
    assert slots.held() == {"m"}
    assert await slots.take_stock({"m"}) == 0
    (root / "stale").touch()  # of before a reboot
    assert not slots.has("stale")
    assert await slots.take_stock(()) == 2


async def test_one_that_is_just_being_made_is_drained_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes it cannot be stopped."""
    begun, go_on, make = threading.Event(), threading.Event(), slots_module._make

    def slowly(path: Path) -> None:
        begun.set()
        go_on.wait(20)
        make(path)

    monkeypatch.setattr(slots_module, "_make", slowly)
    slots = Slots(root, 1)
    keeping = asyncio.ensure_future(slots.run())
    await asyncio.to_thread(begun.wait, 20)
    keeping.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait({keeping})
    assert keeping.cancelled()
    assert len(list(root.iterdir())) == 1
    await slots.drain()
    assert list(root.iterdir()) == []


async def test_whoever_goes_away_leaves_nothing_that_close_does_not_find(root: Path) -> None:
    slots = Slots(root, 0)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    opening = asyncio.ensure_future(slots.open("m"))
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait({opening})
    assert opening.cancelled()
    await slots.close("m")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


async def test_what_cannot_be_made_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche_server.network.slots.RULES", "table inet broken {")
    from cloche_server.core.errors import ClocheError

    with pytest.raises(ClocheError, match="nft"):
        await Slots(root, 0).open("m")
