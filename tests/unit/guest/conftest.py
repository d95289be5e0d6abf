"""A fake agent on a Unix socket for the tests of the link and the client."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from blockbuster import blockbuster_ctx
from guest_fake_peer import FakePeer

from cloche_server.guest.client import GuestClient
from cloche_server.guest.h2link import Link

ROOT = Path(__file__).resolve().parents[3]


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


def loud_skip(why: str) -> NoReturn:
    warnings.warn(f"NOT TESTED against the real agent: {why}", stacklevel=2)
    pytest.skip(f"NOT TESTED against the real agent: {why}")


@pytest.fixture(scope="session")
def agent_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent, built from `agent/` when there is a Go compiler, else `agent/bin/cloche-agent`."""
    if os.geteuid() != 0:
        loud_skip("the agent changes users and has to be run by root")
    go = shutil.which("go") or shutil.which("/usr/local/go/bin/go")
    built = ROOT / "agent" / "bin" / "cloche-agent"
    if go is not None:
        built = tmp_path_factory.mktemp("agent") / "cloche-agent"
        command = [go, "build", "-o", str(built), "./cmd/cloche-agent"]
        subprocess.run(command, cwd=ROOT / "agent", check=True, env={**os.environ, "CGO_ENABLED": "0"})
    elif not built.exists():
        loud_skip("there is neither a Go compiler nor agent/bin/cloche-agent")
    return built


@pytest.fixture
def agent(agent_binary: Path, socket_path: Path) -> Iterator[str]:
    process = subprocess.Popen([agent_binary, "--listen", f"unix:{socket_path}"])
    try:
        deadline = time.monotonic() + 10
        while not answers_at(socket_path):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield str(socket_path)
        process.terminate()
        process.wait(10)
    finally:
        process.kill()


def answers_at(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@pytest.fixture(autouse=True)
def nothing_blocks() -> Iterator[None]:
    """No call of the package may block the event loop."""
    with blockbuster_ctx("cloche_server"):
        yield


@pytest.fixture
async def agent_client(agent: str) -> AsyncIterator[GuestClient]:
    made = GuestClient(agent)
    yield made
    await made.aclose()
