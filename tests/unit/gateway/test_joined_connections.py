"""Two connections that are joined: how it ends."""

from __future__ import annotations

import asyncio

import pytest

from cloche_server.gateway.forward import relay


class End:
    """A side that says these, and then ends, breaks or says nothing more."""

    def __init__(self, *said: bytes | Exception | None) -> None:
        self._said = list(said)
        self.heard: list[bytes] = []
        self.over = False

    async def read(self) -> bytes:
        if not self._said:
            await asyncio.Event().wait()
        one = self._said.pop(0)
        if isinstance(one, Exception):
            raise one
        return one or b""

    async def write(self, data: bytes) -> None:
        self.heard.append(data)

    async def write_eof(self) -> None:
        self.over = True

    def close(self) -> None:
        raise AssertionError("whoever has opened it closes it")


async def test_ends_are_passed_on_singly() -> None:
    one, other = End(b"a", None), End(b"b", b"c", None)
    beats: list[None] = []
    await relay(one, other, lambda: beats.append(None))
    assert (other.heard, one.heard, len(beats)) == ([b"a"], [b"b", b"c"], 3)
    assert one.over
    assert other.over


@pytest.mark.parametrize("error", [ConnectionResetError("cut"), BrokenPipeError("gone")])
async def test_what_breaks_is_the_end_of_both_and_an_error_of_its_own_kind(error: Exception) -> None:
    """Not one in a group, which whoever waits for connections that break would not know."""
    with pytest.raises(ConnectionResetError):
        await relay(End(b"a", error), End(), lambda: None)
