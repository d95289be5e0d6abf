"""Answers that begin before their work has ended."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from cloche_server.api import keepalive
from cloche_server.api.keepalive import KeepaliveResponse
from cloche_server.core.command import CommandEnd, CommandResult
from cloche_server.core.errors import ClocheError

RESULT = CommandResult("x1", CommandEnd(3, "exited", 12.4), "out", "err", "utf-8")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(keepalive, "LATE_SECONDS", 0.2)
    monkeypatch.setattr(keepalive, "THEN_SECONDS", 0.02)


class Call:
    def __init__(self, work: Any, *, asked: bool = True) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.stopping = asyncio.Event()
        app = SimpleNamespace(state=SimpleNamespace(services=SimpleNamespace(stopping=self.stopping)))
        self.scope = {"type": "http", "app": app, "headers": [], "cloche.request_id": "r1"}
        self.response = KeepaliveResponse(Request(self.scope, self.receive), work, {"X-Exec-Id": "x1"}, asked=asked)

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def run(self) -> None:
        await self.response(self.scope, self.receive, self.send)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def _after(seconds: float, error: ClocheError | None = None) -> CommandResult:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return RESULT


async def test_quick_work_is_an_ordinary_answer() -> None:
    call = Call(_after(0))
    await call.run()
    assert call.status == 200
    assert json.loads(call.body)["exit_code"] == 3
    assert not call.body.startswith(b" ")


async def test_a_quick_failure_keeps_its_status() -> None:
    call = Call(_after(0, ClocheError("exec.timeout", "timeout")))
    await call.run()
    assert call.status == 504


async def test_slow_work_begins_with_white_space() -> None:
    call = Call(_after(0.2))
    await call.run()
    assert call.status == 200
    assert dict(call.sent[0]["headers"])[b"x-exec-id"] == b"x1"
    assert call.body.startswith(b"   ")
    assert json.loads(call.body)["stdout"] == "out"
    assert call.sent[-1]["more_body"] is False


async def test_who_has_not_asked_keeps_the_status_for_longer() -> None:
    call = Call(_after(0.1, ClocheError("exec.timeout", "timeout")), asked=False)
    await call.run()
    assert call.status == 504


@pytest.mark.parametrize(("code", "exit_code"), [("exec.timeout", 124), ("exec.sandbox_gone", 1)])
async def test_a_late_failure_is_told_in_the_body(code: str, exit_code: int) -> None:
    call = Call(_after(0.2, ClocheError(code, "why")))
    await call.run()
    body = json.loads(call.body)
    assert call.status == 200
    assert (body["code"], body["exit_code"], body["stdout"], body["stderr"]) == (code, exit_code, "", "")
    assert body["error"] == "why"


async def test_a_late_failure_keeps_the_output() -> None:
    call = Call(_after(0.2, ClocheError("exec.timeout", "why", details={"result": RESULT})))
    await call.run()
    body = json.loads(call.body)
    assert (body["stdout"], body["stderr"], body["exit_code"]) == ("out", "err", 124)


@pytest.mark.parametrize("wait", [0.01, 0.1])
async def test_a_hang_up_cancels_the_work(wait: float) -> None:
    ended: list[int] = []

    async def long() -> CommandResult:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)
        raise AssertionError

    call = Call(long())
    task = asyncio.ensure_future(call.run())
    await asyncio.sleep(wait)
    call.gone.set()
    async with asyncio.timeout(2):
        await task
    assert ended == [1]


async def test_the_end_of_the_server_before_the_answer_began() -> None:
    call = Call(_after(60))
    task = asyncio.ensure_future(call.run())
    await asyncio.sleep(0)
    call.stopping.set()
    task.cancel()
    await task
    assert call.status == 502
    assert json.loads(call.body)["code"] == "exec.cancelled"
