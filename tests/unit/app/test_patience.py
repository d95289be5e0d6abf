"""Deadlines of a sandbox: what passes while its machine stands still is not counted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cloche_server.app import patience
from cloche_server.app.code import CodeRun, CodeStream
from cloche_server.app.patience import Patience
from cloche_server.core.code import CodeEnd, CodeText
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LOOK", 0.01)


def entry_in(status: Status) -> Any:
    return SimpleNamespace(record=SimpleNamespace(id="s", status=status))


@pytest.mark.parametrize("status", [Status.PAUSED, Status.HIBERNATED])
async def test_it_does_not_end_while_the_machine_stands_still(status: Status) -> None:
    entry = entry_in(status)
    async with Patience(entry, 0.0) as waited:
        await asyncio.sleep(0.1)
    assert waited.passed == 0
    with pytest.raises(TimeoutError):
        async with Patience(entry, 0.0):
            await asyncio.sleep(0.05)
            entry.record.status = Status.RUNNING
            await asyncio.sleep(60)


async def test_it_ends_as_any_timeout_while_the_machine_runs() -> None:
    entry = entry_in(Status.RUNNING)
    with pytest.raises(TimeoutError):
        async with Patience(entry, 0.05) as waited:
            await asyncio.sleep(60)
    assert waited.passed >= 0.05
    async with Patience(entry, None):
        await asyncio.sleep(0.05)
    with pytest.raises(KeyError):
        async with Patience(entry, 60):
            raise KeyError


class Link:
    """What a bridge says, and when it may."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = list(events)
        self.may = asyncio.Event()

    async def send(self, request: Any) -> None:
        pass

    async def next(self) -> dict[str, Any]:
        event = self.events.pop(0)
        if event["type"] != "started":
            await self.may.wait()
        return event


def code_in(entry: Any, link: Link) -> CodeStream:
    held: Any = SimpleNamespace(close=lambda: None)
    return CodeStream(entry, link, CodeRun("1", 0.0), held)  # type: ignore[arg-type]


async def test_code_of_a_paused_sandbox_goes_on_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its timeout nor the silence of its kernel is counted in the meantime."""
    for name, seconds in (("SILENCE", 0.0), ("HOST_GRACE", 0.0), ("KILL_SECONDS", 0.01)):
        monkeypatch.setattr(f"cloche_server.app.code.{name}", seconds)
    entry = entry_in(Status.PAUSED)
    end = {"type": "end", "status": "ok", "execution_count": 1, "duration_ms": 1}
    link = Link({"type": "started", "context": "python", "language": "python"}, {"type": "stdout", "text": "a"}, end)
    stream = code_in(entry, link)
    await stream.begin({})
    asyncio.get_running_loop().call_later(0.1, link.may.set)
    events = [event async for event in stream]
    assert [type(event) for event in events[1:]] == [CodeText, CodeEnd]


async def test_a_kernel_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche_server.app.code.SILENCE", 0.05)
    link = Link({"type": "started", "context": "python", "language": "python"}, {"type": "alive"})
    stream = code_in(entry_in(Status.RUNNING), link)
    await stream.begin({})
    with pytest.raises(ClocheError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "code.lost"
