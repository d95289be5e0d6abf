"""Commands that are waited for."""

from __future__ import annotations

import json

import pytest
from cloche_fake import FakeCloche, faults

from cloche import (
    AsyncSandbox,
    CommandFailed,
    CommandTimeout,
    ConnectionLost,
    InvalidRequestError,
    ProtocolError,
    SandboxGone,
)


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
    assert (await sandbox.exec_bytes("cat", stdin=b"\xff\0")).stdout == b"\xff\0"
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
    text = "the command ran into its timeout"
    output = {"stdout": "so far", "stderr": ""}
    details = {**output, "exit_code": 137, "termination": {"reason": "timeout"}}
    refused = faults.error(504, "exec.timeout", text, timeout_seconds=2, details=details)
    late = {"error": text, "code": "exec.timeout", "exit_code": 124, "timeout_seconds": 2, **output}
    told_late = faults.pieces([b"\n  ", json.dumps(late).encode()])
    sandbox = await AsyncSandbox.create()
    for handler, code in ((refused, 137), (told_late, 124)):
        fake.on("POST", "/exec", handler)
        with pytest.raises(CommandTimeout) as caught:
            await sandbox.exec("sleep 100", timeout=2)
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.stdout, caught.value.exit_code) == ("so far", code)
        assert caught.value.timeout_seconds == 2
        assert caught.value.result is not None
        assert caught.value.result.termination.reason == "timeout"


async def test_white_space_before_a_late_answer(fake: FakeCloche) -> None:
    body = b'{"exec_id": "x", "stdout": "done", "stderr": "", "exit_code": 0}'
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/exec", faults.pieces([b" \n", b" \n", b" \n", body]))
    assert (await sandbox.exec("x")).stdout == "done"


async def test_a_command_is_never_run_twice(fake: FakeCloche) -> None:
    broken = [
        faults.abort,
        faults.pieces([b'{"stdout": "'], length=1000, cut=True),
        faults.pieces([b'{"exit_code": 0, "stdout": "", "stderr": ""}'], cut=True),
    ]
    text = "connect: connection refused"
    sandbox = await AsyncSandbox.create()
    for handler in broken:
        fake.on("POST", "/exec", handler)
        with pytest.raises(ConnectionLost) as caught:
            await sandbox.exec("echo x")
        assert caught.value.exec_id
    fake.on("POST", "/exec", faults.error(502, "exec.sandbox_gone", text, retryable=True))
    with pytest.raises(SandboxGone):
        await sandbox.exec("echo x")
    assert fake.count("POST", "/exec") == 4


async def test_answers_that_are_no_answers(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    answers = [(200, b"<html>"), (200, b"[]"), (200, b'{"stdout": ""}'), (302, b""), (200, b"null")]
    for status, body in answers:
        fake.on("POST", "/exec", faults.answer(status, body))
        with pytest.raises(ProtocolError):
            await sandbox.exec("echo x")
    fake.on("POST", "/exec", faults.answer(422, b'{"error": {"code": 5}}'))
    with pytest.raises(InvalidRequestError, match="HTTP status 422"):
        await sandbox.exec("echo x")
