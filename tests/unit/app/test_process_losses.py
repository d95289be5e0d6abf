"""A character that a loss has cut: its halves are never joined with what comes behind the loss."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

from cloche_server.app.exec import ExecStream, StreamChunk, StreamGap
from cloche_server.app.process_output import Loss, ProcessStream, TextChunk
from cloche_server.core.lifecycle import Status
from cloche_server.guest.frames import STDERR, STDOUT, Frame, Gap, Output

CUP = "☕".encode()
FRAMES: list[Frame] = [
    Output(STDOUT, 0, b"a" + CUP[:2]),
    Output(STDERR, 3, CUP[:1]),
    Gap(STDOUT, 4, 10),
    Output(STDOUT, 14, CUP[2:] + b"b"),
    Output(STDERR, 16, CUP[1:]),
]


class Call:
    """What the guest says."""

    started = SimpleNamespace(stdout_at=0, stderr_at=0)

    def __init__(self, frames: list[Frame]) -> None:
        self._left = iter(frames)

    async def __anext__(self) -> Frame:
        for frame in self._left:
            return frame
        raise StopAsyncIteration

    async def __aexit__(self, *_: object) -> None:
        pass


class Site:
    entry: Any = SimpleNamespace(
        traffic=SimpleNamespace(out=lambda _: None), record=SimpleNamespace(id="sb", status=Status.RUNNING)
    )

    @contextlib.contextmanager
    def busy(self, _: Any) -> Iterator[None]:
        yield


async def _all(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def test_in_the_output_of_a_process() -> None:
    site = Site()
    stream = ProcessStream(site.entry, Call(FRAMES), site, None, 0, "utf-8", None)  # type: ignore[arg-type]
    found = await _all(stream.texts())
    await stream.aclose()
    shown = [(one.stream, one.text) if isinstance(one, TextChunk) else one.count for one in found]
    assert shown == [("stdout", "a"), ("stdout", "\ufffd"), 10, ("stdout", "\ufffdb"), ("stderr", "☕")]
    assert isinstance(found[2], Loss)
    assert found[1].next is None


async def test_in_a_stream_of_a_command() -> None:
    site = Site()
    stream = ExecStream(site.entry, Call(FRAMES), "utf-8", None, site)  # type: ignore[arg-type]
    found = await _all(aiter(stream))
    await stream.aclose()
    shown = [(one.stream, one.text) if isinstance(one, StreamChunk) else one.count for one in found]
    assert shown == [("stdout", "a"), ("stdout", "\ufffd"), 10, ("stdout", "\ufffdb"), ("stderr", "☕")]
    assert isinstance(found[2], StreamGap)
