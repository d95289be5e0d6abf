"""Framing and life of an event stream, over a fake source and a fake connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from cloche_server.api import sse
from cloche_server.api.sse import SseEvent, SseResponse
from cloche_server.core.errors import ClocheError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["stdout", "exit", "line"]), st.dictionaries(st.text(), JSON), st.none() | st.integers(0))
def test_an_event_is_one_block_of_ascii_lines(name: str, data: dict[str, Any], number: int | None) -> None:
    raw = SseEvent(name, data, None if number is None else str(number)).encode()
    text = raw.decode("ascii")
    assert text.endswith("\n\n")
    assert "\r" not in text
    lines = text.removesuffix("\n\n").split("\n")
    assert lines == text.splitlines()[: len(lines)], "no other character ends a line"
    expected = [f"event: {name}", lines[-1]] if number is None else [f"id: {number}", f"event: {name}", lines[-1]]
    assert lines == expected
    assert json.loads(lines[-1].removeprefix("data: ")) == data


class Connection:
    """What Uvicorn gives a response."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.open.wait()
        self.sent.append(message)

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def names(self) -> list[str]:
        return [line.removeprefix("event: ") for line in self.body.split("\n") if line.startswith("event: ")]

    @property
    def ended(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False


class Case:
    def __init__(self, events: Callable[[], AsyncIterator[SseEvent]]) -> None:
        self.connection = Connection()
        self.stopping = asyncio.Event()
        self.closed = 0
        scope = {"type": "http", "headers": []}
        self.response = SseResponse(
            Request(scope, self.connection.receive),
            events(),
            self.close,
            lambda error: SseEvent("error", {"error": error.message, "code": error.code}),
            self.stopping,
            {"X-Exec-Id": "x1"},
        )

    async def close(self) -> None:
        self.closed += 1

    def run(self) -> asyncio.Task[None]:
        scope = {"type": "http"}
        return asyncio.ensure_future(self.response(scope, self.connection.receive, self.connection.send))


async def _two() -> AsyncIterator[SseEvent]:
    yield SseEvent("stdout", {"chunk": "a"})
    yield SseEvent("exit", {"exit_code": 0})
    raise AssertionError("nothing is asked for after a terminal event")


async def _never() -> AsyncIterator[SseEvent]:
    await asyncio.Event().wait()
    yield SseEvent("stdout", {})


async def _always() -> AsyncIterator[SseEvent]:
    while True:
        yield SseEvent("stdout", {"chunk": "x"})
        await asyncio.sleep(0)


async def test_a_stream_ends_with_its_terminal_event() -> None:
    case = Case(_two)
    await case.run()
    assert case.connection.names == ["stdout", "exit"]
    assert case.connection.ended
    assert case.closed == 1
    headers = dict(case.connection.sent[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"x-exec-id"] == b"x1"


async def test_a_quiet_stream_has_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.01)
    case = Case(_never)
    task = case.run()
    while case.connection.body.count(": ping\n\n") < 3:
        await asyncio.sleep(0.01)
    case.connection.gone.set()
    await task
    assert case.closed == 1
    assert not case.connection.ended, "nobody is there to be told"


@pytest.mark.parametrize("source", [_never, _always])
async def test_the_end_of_the_server_is_told(source: Callable[[], AsyncIterator[SseEvent]]) -> None:
    case = Case(source)
    task = case.run()
    await asyncio.sleep(0.01)
    case.stopping.set()
    async with asyncio.timeout(2):
        await task
    assert case.connection.names[-1] == "error"
    assert case.connection.names.count("error") == 1
    assert '"code":"server.shutting_down"' in case.connection.body
    assert case.connection.ended
    assert case.closed == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(ClocheError("exec.sandbox_gone", "gone"), "exec.sandbox_gone"), (KeyError("bug"), "internal")],
)
async def test_a_source_that_fails_is_told(error: Exception, code: str) -> None:
    async def failing() -> AsyncIterator[SseEvent]:
        yield SseEvent("stdout", {"chunk": "a"})
        raise error

    case = Case(failing)
    await case.run()
    assert case.connection.names == ["stdout", "error"]
    assert f'"code":"{code}"' in case.connection.body
    assert "bug" not in case.connection.body
    assert case.connection.ended


async def test_no_event_is_lost_around_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.0)

    async def slow() -> AsyncIterator[SseEvent]:
        for number in range(50):
            await asyncio.sleep(0.001)
            yield SseEvent("stdout", {"n": number})
        yield SseEvent("exit", {})

    case = Case(slow)
    await case.run()
    numbers = [json.loads(line[6:]).get("n") for line in case.connection.body.split("\n") if line.startswith("data: ")]
    assert numbers == [*range(50), None]


async def test_a_slow_reader_stops_the_source() -> None:
    made: list[int] = []

    async def endless() -> AsyncIterator[SseEvent]:
        while True:
            made.append(1)
            yield SseEvent("stdout", {"chunk": "x"})
            await asyncio.sleep(0)

    case = Case(endless)
    case.connection.open.clear()
    task = case.run()
    await asyncio.sleep(0.05)
    assert len(made) <= 2
    case.connection.gone.set()
    case.connection.open.set()
    async with asyncio.timeout(2):
        await task
    assert case.closed == 1


async def test_a_cancelled_response_closes_its_source() -> None:
    case = Case(_never)
    task = case.run()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert case.closed == 1
