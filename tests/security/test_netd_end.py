"""netd outlives its server as long as a machine lives, and ends by itself after the last one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from netd_kit import UID
from netns_kit import inside, ip
from slot_kit import slot_sockets

from cloche_server.core.network import TAP
from cloche_server.host import netns
from cloche_server.host.fdlink import FdClient
from cloche_server.network.slots import furnish_slot

pytestmark = pytest.mark.thorough

POLICY = {"mode": "open", "rules": [], "limits": {}, "learn": False}


@pytest.fixture
def slot() -> Iterator[str]:
    """A slot with a real tap."""
    name = f"end{os.getpid()}"
    ip(f"netns add {name}\n")
    try:
        inside(name, lambda: os.close(netns.open_tap(TAP, make=True)))
        inside(name, furnish_slot)
        yield name
    finally:
        ip(f"netns del {name}\n")


async def test_it_ends_after_its_server_and_the_last_machine(slot: str, tmp_path: Path) -> None:
    path = tmp_path / "netd.sock"
    argv = [sys.executable, "-m", "cloche_server.netd", "--socket", str(path), "--uid", str(UID)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    netd = subprocess.Popen([*argv, "--alone-seconds", "1"], stderr=subprocess.PIPE, env=env)
    machine = inside(slot, lambda: netns.open_tap(TAP))  # what QEMU does
    try:
        deadline = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        server = await FdClient.connect(path)
        sockets = inside(slot, slot_sockets)
        fds = [sock.fileno() for sock in sockets]
        await server.call("attach", sandbox="s", workspace="w", policy=POLICY, grants=[], fds=fds)
        for sock in sockets:
            sock.close()
        server.close()  # it was killed
        with pytest.raises(subprocess.TimeoutExpired):
            netd.wait(3)
        os.close(machine)
        machine = -1
        assert netd.wait(20) == 0
        assert netd.stderr is not None
        assert b"no server, and no machine that is served" in netd.stderr.read()
    finally:
        if machine >= 0:
            os.close(machine)
        netd.kill()
        netd.wait()
