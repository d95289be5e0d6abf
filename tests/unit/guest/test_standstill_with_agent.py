"""A machine that stands still for longer than an agent may be silent, which is stopped as a process here."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct

import pytest

from cloche_server.guest.client import GuestClient
from cloche_server.guest.frames import Exit, Output
from cloche_server.guest.types import ExecRequest

pytestmark = pytest.mark.thorough


def pid_behind(path: str) -> int:
    """Of whoever listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        found: int = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return found


async def test_a_command_goes_on_where_it_was(agent: str, agent_client: GuestClient) -> None:
    shell = "for i in $(seq 30); do echo $i; sleep 0.05; done; exit 3"
    # It says something more often than it may be silent, unless it is stopped.
    async with agent_client.exec(ExecRequest(id="standing", shell=shell), idle_timeout=2.0) as call:
        said = b""
        async for frame in call:
            if not isinstance(frame, Output):
                break
            said += frame.data
            if said == b"1\n":
                pid = pid_behind(agent)
                os.kill(pid, signal.SIGSTOP)
                agent_client.stand_still(True)
                following = asyncio.ensure_future(anext(call))
                await asyncio.wait({following}, timeout=3.0)
                os.kill(pid, signal.SIGCONT)
                agent_client.stand_still(False)
                frame = await following
                assert isinstance(frame, Output)
                said += frame.data
    assert isinstance(frame, Exit)
    assert frame.exit_code == 3
    assert said.split() == [b"%d" % number for number in range(1, 31)]
