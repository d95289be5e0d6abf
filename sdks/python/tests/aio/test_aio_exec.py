"""Commands that are waited for."""

from __future__ import annotations

import json

import pytest
from cloche import (
    AsyncSandbox,
    CommandFailed,
    CommandTimeout,
    ConnectionLost,
    InvalidRequestError,
    ProtocolError,
    SandboxGone,
)
from cloche_fake import FakeCloche, Reply, Request
from cloche_fake.http import Abort


async def test_streams_and_exit_code_are_apart(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    result = await sandbox.exec("fail 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("half", "no such thing\n", 3)
    assert result.termination.reason == "exited"
    assert not result.ok
    with pytest.raises(CommandFailed, match="exit code 3: no such thing") as caught:
        result.check()
    assert caught.value.result is result
    assert (caught.value.exit_code, caught.value.stdout) == (3, "half")
    assert (await sandbox.exec("echo ok")).check().stdout == "ok\n"


async def test_argument_vectors_pass_unchanged(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    words = ["a b", "$HOME", "x'y", "", "*", "line1\nline2", "\u2028", "é"]
    assert json.loads((await sandbox.exec(["argv", *words])).stdout) == words
    for wrong in ([], [1], b"echo", 7):
        with pytest.raises((TypeError, ValueError)):
            await sandbox.exec(wrong)  # type: ignore[arg-type]


async def test_options(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    result = await sandbox.exec("context", env={"A": "1"}, cwd="/x y", user="me", timeout=2.5)
    assert json.loads(result.stdout) == {"env": {"A": "1"}, "cwd": "/x y", "user": "me", "timeout_seconds": 2.5}
    assert (await sandbox.exec("cat", stdin="日本")).stdout == "日本"
    assert (await sandbox.exec("cat", stdin=b"abc")).stdout == "abc"
    with pytest.raises(ValueError, match="UTF-8"):
        await sandbox.exec("cat", stdin=b"\xff")
    with pytest.raises(TypeError, match="timout"):
        await sandbox.exec("true", timout=1)  # type: ignore[call-arg]


async def test_bytes_survive(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    result = await sandbox.exec_bytes("raw")
    assert (result.stdout, result.stderr) == (b"\xff\xfeok", b"\x80")
    assert (await sandbox.exec("separators")).stdout == "a\u2028b\u2029c\u0085d\r\ne"


async def test_callbacks(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    seen: list[str] = []

    async def note(text: str) -> None:
        seen.append(text)

    result = await sandbox.exec("count 3", on_stdout=note)
    assert seen == ["1\n", "2\n", "3\n"]
    assert (result.stdout, result.exit_code) == ("1\n2\n3\n", 5)


async def test_timeout_keeps_the_partial_output(fake: FakeCloche) -> None:
    async def timeout(request: Request, reply: Reply) -> None:
        details = {"stdout": "so far", "stderr": "", "exit_code": 137, "termination": {"reason": "timeout"}}
        await reply.error(504, "exec.timeout", "the command ran into its timeout", timeout_seconds=2, details=details)

    async def told_late(request: Request, reply: Reply) -> None:
        await reply.begin(200, "application/json")
        await reply.chunk(b"\n  ")
        body = {"error": "too slow", "code": "exec.timeout", "exit_code": 124, "stdout": "so far", "stderr": ""}
        await reply.chunk(json.dumps({**body, "timeout_seconds": 2}).encode())
        await reply.end()

    sandbox = await AsyncSandbox.create()
    for handler, code in ((timeout, 137), (told_late, 124)):
        fake.on("POST", "/exec", handler)
        with pytest.raises(CommandTimeout) as caught:
            await sandbox.exec("sleep 100", timeout=2)
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.stdout, caught.value.exit_code) == ("so far", code)
        assert caught.value.timeout_seconds == 2
        assert caught.value.result is not None
        assert caught.value.result.termination.reason == "timeout"


async def test_white_space_before_a_late_answer(fake: FakeCloche) -> None:
    async def late(request: Request, reply: Reply) -> None:
        await reply.begin(200, "application/json")
        for _ in range(3):
            await reply.chunk(b" \n")
        await reply.chunk(b'{"exec_id": "x", "stdout": "done", "stderr": "", "exit_code": 0}')
        await reply.end()

    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/exec", late)
    assert (await sandbox.exec("x")).stdout == "done"


async def test_a_command_is_never_run_twice(fake: FakeCloche) -> None:
    async def vanish(request: Request, reply: Reply) -> None:
        await request.body()
        raise Abort

    async def half(request: Request, reply: Reply) -> None:
        await reply.begin(200, "application/json", 1000)
        await reply.raw(b'{"stdout": "')
        raise Abort

    async def chunked_half(request: Request, reply: Reply) -> None:
        await reply.begin(200, "application/json")
        await reply.chunk(b'{"exit_code": 0, "stdout": "", "stderr": ""}')
        raise Abort

    async def gone(request: Request, reply: Reply) -> None:
        await reply.error(502, "exec.sandbox_gone", "connect: connection refused", retryable=True)

    sandbox = await AsyncSandbox.create()
    for handler in (vanish, half, chunked_half):
        fake.on("POST", "/exec", handler)
        with pytest.raises(ConnectionLost) as caught:
            await sandbox.exec("echo x")
        assert caught.value.exec_id
    fake.on("POST", "/exec", gone)
    with pytest.raises(SandboxGone):
        await sandbox.exec("echo x")
    assert fake.count("POST", "/exec") == 4


async def test_answers_that_are_no_answers(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    answers = [(200, b"<html>"), (200, b"[]"), (200, b'{"stdout": ""}'), (302, b""), (200, b"null")]
    for status, body in answers:

        async def odd(request: Request, reply: Reply, status: int = status, body: bytes = body) -> None:
            await reply.send(status, body)

        fake.on("POST", "/exec", odd)
        with pytest.raises(ProtocolError):
            await sandbox.exec("echo x")

    async def nested(request: Request, reply: Reply) -> None:
        await reply.json(422, {"error": {"code": 5, "message": "no"}})

    fake.on("POST", "/exec", nested)
    with pytest.raises(InvalidRequestError, match="HTTP status 422"):
        await sandbox.exec("echo x")
