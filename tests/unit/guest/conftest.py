"""A fake agent on a Unix socket for the tests of the link and the client."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from guest_fake_peer import FakePeer

from cloche_server.guest.client import GuestClient
from cloche_server.guest.h2link import Link


@pytest.fixture
def socket_path() -> Iterator[Path]:
    # tmp_path can be longer than the 107 bytes of a Unix socket's name
    with tempfile.TemporaryDirectory(prefix="gl-") as folder:
        yield Path(folder) / "s"


@pytest.fixture
async def peer(socket_path: Path) -> AsyncIterator[FakePeer]:
    fake = FakePeer(socket_path)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def link(peer: FakePeer) -> AsyncIterator[Link]:
    made = await Link.connect(peer.path)
    yield made
    await made.aclose()


@pytest.fixture
async def client(peer: FakePeer) -> AsyncIterator[GuestClient]:
    made = GuestClient(peer.path, connect_timeout=2)
    yield made
    await made.aclose()
