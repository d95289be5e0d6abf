"""A netd that nobody needs ends; one that is needed does not."""

from __future__ import annotations

import asyncio
import socket

from cloche_server.host.carrier import has_carrier
from cloche_server.netd.vigil import until_alone


async def test_it_ends_when_it_was_not_needed_all_the_time() -> None:
    asked = 0

    def needed() -> bool:
        nonlocal asked
        asked += 1
        return asked in (5, 12)

    await asyncio.wait_for(until_alone(needed, 0.02), 30)
    assert asked == 12 + 20


async def test_it_goes_on_as_long_as_it_is_needed() -> None:
    watch = asyncio.ensure_future(until_alone(lambda: True, 0.0))
    for _ in range(200):
        await asyncio.sleep(0)
    assert not watch.done()
    watch.cancel()
    await asyncio.wait({watch})


def test_an_interface_that_is_not_there_has_no_carrier() -> None:
    with socket.socket() as sock:
        assert has_carrier(sock, "lo")
        assert not has_carrier(sock, "cloche-none")
