"""Commands whose output is followed, and commands in the background."""

from __future__ import annotations

import gc
import time

import pytest
from cloche_fake import FakeCloche, faults

from cloche import (
    AsyncExecStream,
    AsyncSandbox,
    CommandTimeout,
    ConnectionLost,
    ExecNotFound,
    Exit,
    Gap,
    ProtocolError,
    Stderr,
    Stdout,
    WaitTimeout,
)


async def test_events_in_order_with_one_exit(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    events = [event async for event in sandbox.exec_stream("fail 7")]
    assert [type(event) for event in events] == [Stdout, Stderr, Exit]
    assert events[0] == Stdout("half", 4)
    assert isinstance(events[-1], Exit)
    assert events[-1].exit_code == 7


async def test_characters_cut_in_two_and_odd_separators(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    for command, text in (("bytewise", "日本é😀"), ("separators", "a\u2028b\u2029c\u0085d\r\ne")):
        events = [event async for event in sandbox.exec_stream(command)]
        assert "".join(event.data for event in events if isinstance(event, Stdout)) == text
    raw = [event async for event in sandbox.exec_stream_bytes("bytewise")]
    assert b"".join(event.data for event in raw if isinstance(event, Stdout)) == "日本é😀".encode()


async def test_raw_separators_cut_anywhere_on_the_wire(fake: FakeCloche) -> None:
    """Not ASCII-escaped, CRLF line ends, one byte at a time: still the same event."""
    wire = 'event: stdout\r\ndata: {"chunk": "a\u2028é\u0085😀"}\r\n\r\nevent: exit\ndata: {"exit_code": 0}\n\n'
    hostile = faults.pieces([bytes([byte]) for byte in wire.encode()], kind=faults.SSE)
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/exec/stream", hostile)
    events = [event async for event in sandbox.exec_stream("x")]
    assert events[0] == Stdout("a\u2028é\u0085😀")


async def test_an_end_without_result_is_never_success(fake: FakeCloche) -> None:
    tidy = faults.events([("stdout", {"chunk": "partial"}, 7)])
    wire = b'id: 7\nevent: stdout\ndata: {"chunk": "partial"}\n\nevent: exit\ndata: {"exit_code": 0}'
    cut = faults.pieces([wire], kind=faults.SSE, cut=True)
    sandbox = await AsyncSandbox.create()
    for handler in (tidy, cut):
        fake.on("POST", "/exec/stream", handler)
        seen: list[object] = []
        stream = sandbox.exec_stream("x", on_stdout=seen.append)
        with pytest.raises(ConnectionLost) as caught:
            async for _ in stream:
                pass
        assert seen == ["partial"]
        assert caught.value.exec_id == stream.exec_id
        assert stream.exit is None
        fake.on("POST", "/exec/stream", handler)
        with pytest.raises(ConnectionLost):
            await sandbox.exec("x", on_stdout=seen.append)
    assert fake.count("POST", "/exec/stream") == 4


async def test_a_silent_stream_is_given_up(fake: FakeCloche, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await AsyncSandbox.create(timeout=0.3)
    module = __import__(AsyncSandbox.__module__, fromlist=["SILENCE"])
    monkeypatch.setattr(module, "SILENCE", 0.3)
    fake.on("POST", "/exec/stream", faults.silence())
    before = time.monotonic()
    with pytest.raises(ConnectionLost):
        async for _ in sandbox.exec_stream("x"):
            pass
    assert time.monotonic() - before < 3


async def test_errors_as_events(fake: FakeCloche) -> None:
    failed = ("error", {"error": "too slow", "code": "exec.timeout", "timeout_seconds": 1})
    timeout = faults.events([("stdout", {"chunk": "a"}, 1), failed])
    page = faults.answer(200, b"<html>", kind="text/html")
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/exec/stream", timeout)
    with pytest.raises(CommandTimeout, match="too slow"):
        async for _ in sandbox.exec_stream("x", timeout=1):
            pass
    fake.on("POST", "/exec/stream", page)
    with pytest.raises(ProtocolError):
        async for _ in sandbox.exec_stream("x"):
            pass


async def test_callbacks_and_their_errors(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    seen: list[str] = []
    stream = sandbox.exec_stream("fail 1", on_stdout=seen.append, on_stderr=seen.append)
    async for _ in stream:
        pass
    assert seen == ["half", "no such thing\n"]

    async def broken(text: str) -> None:
        raise ZeroDivisionError(text)

    with pytest.raises(ZeroDivisionError):
        async for _ in sandbox.exec_stream("count 3", on_stdout=broken):
            pass


async def test_leaving_early_closes_the_connection(fake: FakeCloche) -> None:
    fake.execs.delay = 0.05
    sandbox = await AsyncSandbox.create()
    async with sandbox.exec_stream("count 100") as stream:
        async for event in stream:
            assert event == Stdout("1\n", 2)
            break
    dropped: list[AsyncExecStream[str]] = [sandbox.exec_stream("count 100")]
    assert await anext(dropped[0]) == Stdout("1\n", 2)
    dropped.clear()
    gc.collect()
    assert (await sandbox.exec("echo still here")).ok


async def test_background_commands(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    job = await sandbox.start("count 3")
    assert job.pid == 100
    assert fake.bodies[-1]["detach"] is True
    assert (await job.wait()).exit_code == 5
    result = await job.result()
    assert (result.stdout, result.exit_code) == ("1\n2\n3\n", 5)
    assert [info.exec_id for info in await sandbox.execs()] == [job.exec_id]
    late = [event async for event in sandbox.attach(job.exec_id).stream(from_offset=4)]
    assert late[0] == Stdout("3\n", 6)
    with pytest.raises(ExecNotFound):
        await sandbox.attach("nope").result()


async def test_waiting_has_an_end_and_the_command_goes_on(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    job = await sandbox.start("count 3 # slow")
    with pytest.raises(WaitTimeout):
        await job.wait(timeout=0.1)
    with pytest.raises(WaitTimeout):
        await job.result(timeout=0)
    assert (await job.info()).running
    await job.kill()
    assert (await job.wait(timeout=5)).exit_code == 5
    assert not (await job.info()).running


async def test_a_broken_stream_is_taken_up_where_it_broke(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    job = await sandbox.start("count 12")
    fake.execs.cut_after = 4
    text = ""
    async for event in job.stream():
        text += event.data if isinstance(event, Stdout) else ""
    assert text == "".join(f"{number}\n" for number in range(1, 13))
    assert fake.execs.records[job.exec_id].readers == [0, 8, 16]


async def test_characters_survive_a_break_within_them(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    job = await sandbox.start("bytewise")
    fake.execs.cut_after = 2
    events = [event async for event in job.stream()]
    assert "".join(event.data for event in events if isinstance(event, Stdout)) == "日本é😀"
    raw = await sandbox.start("raw")
    assert (await raw.result_bytes()).stdout == b"\xff\xfeok"
    events = [event async for event in raw.stream()]
    assert events[:2] == [Stdout("\ufffd\ufffdok", 4), Stderr("\ufffd", 5)]
    pieces = [event async for event in raw.stream_bytes()]
    assert pieces[0] == Stdout(b"\xff\xfeok", 4)


async def test_what_was_over_the_limit_is_told(fake: FakeCloche) -> None:
    end = ("exit", {"exit_code": 0, "termination": {"reason": "exited"}})
    parts = [("stdout", {"chunk": "head"}, 4), ("gap", {"bytes": 9, "stream": "stdout"}, 13)]
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/exec/stream", faults.events([*parts, ("stdout", {"chunk": "tail"}, 17), end]))
    result = await sandbox.exec("x", on_stdout=str)
    assert result.stdout == "head\n[cloche: truncated, 9 bytes dropped]\ntail"
    assert (result.truncated, result.stdout_dropped_bytes) == (True, 9)


async def test_what_is_no_longer_kept_is_told(fake: FakeCloche) -> None:
    end = {"exit_code": 137, "termination": {"reason": "oom", "signal": "SIGKILL"}}
    lossy = faults.events([("gap", {"bytes": 12}, 12), ("event_of_the_future", {"x": 1}), ("exit", end)])
    sandbox = await AsyncSandbox.create()
    job = await sandbox.start("count 3")
    fake.on("GET", "/stream", lossy)
    events = [event async for event in job.stream()]
    assert events[0] == Gap(12, 12)
    assert isinstance(events[1], Exit)
    assert str(events[1].termination) == "out of memory (SIGKILL)"


async def test_a_stream_that_never_comes_back_fails(fake: FakeCloche, monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__(AsyncExecStream.__module__, fromlist=["RESUME_DELAYS"])
    monkeypatch.setattr(module, "RESUME_DELAYS", (0.01, 0.01))
    sandbox = await AsyncSandbox.create()
    job = await sandbox.start("count 3")
    fake.on("GET", "/stream", faults.abort, times=100)
    with pytest.raises(ConnectionLost):
        await job.wait()
