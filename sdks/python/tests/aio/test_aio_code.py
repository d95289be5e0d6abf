"""Code in kernels: what has been shown, how it ended, and contexts."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from cloche_fake import FakeCloche, faults

from cloche import AsyncSandbox, CodeEnd, CodeStdout, ConnectionLost, NotFoundError, UnsupportedError

STARTED = ("started", {"context_id": "python", "language": "python"})
PICTURE = ("result", {"data": {"image/png": base64.b64encode(b"\x89PNG").decode()}, "main": False, "dropped": {}})
VALUE = ("result", {"data": {"text/plain": "21"}, "main": True, "dropped": {"text/html": 9}})
RAISED = ("error", {"name": "ValueError", "message": "no", "traceback": "Traceback: no"})
CONTEXT = {
    "id": "c1",
    "language": "bash",
    "state": "idle",
    "cells": 2,
    "execution_count": 1,
    "created_at": "2026-01-02T03:04:05Z",
}


def end(status: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "end", {"status": status, "execution_count": 3, "duration_ms": 1.5, "state_lost": False, **more}


async def test_a_run(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    told = [STARTED, ("stdout", {"text": "a"}), ("gap", {"stream": "stdout", "count": 7}), ("news", {}), PICTURE, VALUE]
    asked: list[Any] = []
    fake.on("POST", "/code", faults.recorded(asked, faults.events([*told, end("ok")])))
    seen: list[Any] = []
    found = await sandbox.run_code("x + 1", timeout=5, env={"A": "b"}, on_stdout=seen.append, on_result=seen.append)
    assert (found.ok, found.text, found.stdout_dropped_bytes) == (True, "21", 7)
    assert found.results[0].png == b"\x89PNG"
    assert found.results[1].dropped == {"text/html": 9}
    assert seen == ["a", *found.results]
    assert (found.context_id, found.execution_count, found.error) == ("python", 3, None)
    assert asked == [{"code": "x + 1", "stream": True, "timeout_seconds": 5, "env": {"A": "b"}}]


async def test_exceptions_and_ends_are_results(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/code", faults.events([STARTED, RAISED, end("error")]))
    found = await sandbox.run_code("1")
    assert not found.ok
    assert found.error is not None
    assert (found.error.name, str(found.error)) == ("ValueError", "Traceback: no")
    fake.on("POST", "/code", faults.events([STARTED, end("oom", state_lost=True, detail="no memory left")]))
    found = await sandbox.run_code("1")
    assert (found.status, found.state_lost, found.detail) == ("oom", True, "no memory left")


async def test_a_stream(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/code", faults.events([STARTED, ("stdout", {"text": "a"}), end("ok")]))
    found = [event async for event in sandbox.run_code_stream("1", language="bash", input=True)]
    assert found[1] == CodeStdout("a")
    assert isinstance(found[-1], CodeEnd)


async def test_an_end_that_is_not_known_is_no_success(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/code", faults.events([STARTED]))
    with pytest.raises(ConnectionLost):
        await sandbox.run_code("1")
    fake.on("POST", "/code", faults.events([STARTED, ("failed", {"error": "it is gone", "code": "code.lost"})]))
    with pytest.raises(Exception, match="it is gone"):
        await sandbox.run_code("1")
    fake.on("POST", "/code", faults.error(409, "code.not_available", "no interpreter"))
    with pytest.raises(UnsupportedError, match="no interpreter"):
        await sandbox.run_code("1")
    with pytest.raises(TypeError):
        await sandbox.run_code(1)  # type: ignore[arg-type]


async def test_contexts(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/code/contexts", faults.says(201, CONTEXT))
    made = await sandbox.contexts.create("bash", cwd="/srv")
    assert (made.id, made.language, made.cells) == ("c1", "bash", 2)
    assert made.created_at is not None
    fake.on("GET", "/code/contexts", faults.says(200, {"contexts": [CONTEXT]}))
    assert [one.id for one in await sandbox.contexts.list()] == ["c1"]
    fake.on("POST", "/code/contexts/c1/interrupt", faults.says(200, {"interrupted": True}))
    assert await sandbox.contexts.interrupt(made)
    fake.on("POST", "/code/contexts/c1/restart", faults.answer(204, b""))
    await sandbox.contexts.restart(made)
    fake.on("POST", "/code/contexts/c1/input", faults.answer(204, b""))
    await sandbox.contexts.answer("c1", "hi")
    fake.on("DELETE", "/code/contexts/c1", faults.error(404, "code.context_not_found"))
    with pytest.raises(NotFoundError):
        await sandbox.contexts.delete(made)
