"""The input of a command as one long call, to the real agent."""

from __future__ import annotations

import hashlib
import os

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient
from cloche_server.guest.frames import Exit, Output
from cloche_server.guest.streams import ExecCall
from cloche_server.guest.types import ExecRequest

pytestmark = pytest.mark.thorough

DATA = os.urandom(3_000_000)


async def said(call: ExecCall) -> str:
    return b"".join([frame.data async for frame in call if isinstance(frame, Output)]).decode()


async def test_all_of_it_arrives(agent_client: GuestClient) -> None:
    async with agent_client.exec(ExecRequest(id="f1", shell="sleep 0.2; sha256sum", keep_stdin=True)) as call:
        feed = await agent_client.process_feed("f1")
        for at in range(0, len(DATA), 333_333):
            assert await feed.write(DATA[at : at + 333_333])
        feed.finish()
        assert await said(call) == f"{hashlib.sha256(DATA).hexdigest()}  -\n"
        feed.close()


async def test_a_command_that_takes_no_more(agent_client: GuestClient) -> None:
    async with agent_client.exec(ExecRequest(id="f2", shell="head -c 3; exec <&-; sleep 60", keep_stdin=True)):
        feed = await agent_client.process_feed("f2")
        while await feed.write(DATA):
            pass
        assert not await feed.write(b"more")
        feed.finish()
        feed.close()
        with pytest.raises(ClocheError) as caught:
            await agent_client.process_feed("f2")
        assert caught.value.code == "process.no_input"


async def test_one_that_ends_and_one_that_is_unknown(agent_client: GuestClient) -> None:
    async with agent_client.exec(ExecRequest(id="f3", shell="head -c 3", keep_stdin=True)) as call:
        feed = await agent_client.process_feed("f3")
        assert await feed.write(b"abc")
        ends = [frame.exit_code async for frame in call if isinstance(frame, Exit)]
        assert ends == [0]
        while await feed.write(b"more"):
            pass
        feed.close()
    for unknown, code in (("f3", "process.ended"), ("f9", "process.not_found"), ("/", "process.not_found")):
        with pytest.raises(ClocheError) as caught:
            await agent_client.process_feed(unknown)
        assert caught.value.code == code
