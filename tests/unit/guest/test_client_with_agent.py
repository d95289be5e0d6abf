"""The client against the real agent in its developer mode.

The agent is built from `agent/` when there is a Go compiler; see `agent_binary` in conftest.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
import uuid
from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient
from cloche_server.guest.errors import LinkLost
from cloche_server.guest.frames import Exit, Frame, Gap, Output
from cloche_server.guest.types import ExecRequest, RenewRequest

pytestmark = pytest.mark.thorough


@pytest.fixture
def client(agent_client: GuestClient) -> GuestClient:
    return agent_client


def fresh() -> str:
    return uuid.uuid4().hex[:12]


async def run(client: GuestClient, shell: str, **fields: object) -> tuple[bytes, bytes, Exit, list[Frame]]:
    out, err, frames = b"", b"", []
    async with client.exec(ExecRequest(id=fresh(), shell=shell, **fields)) as call:  # type: ignore[arg-type]
        async for frame in call:
            frames.append(frame)
            if isinstance(frame, Output):
                out, err = (out + frame.data, err) if frame.stream == 1 else (out, err + frame.data)
    end = frames[-1]
    assert isinstance(end, Exit)
    return out, err, end, frames


async def until_gone(pattern: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        seen = [p for p in Path("/proc").glob("[0-9]*/cmdline") if pattern.encode() in quiet_read(p)]
        if not seen:
            return
        assert time.monotonic() < deadline, f"still alive: {seen}"
        await asyncio.sleep(0.02)


def quiet_read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# --- machine


async def test_machine(client: GuestClient) -> None:
    info = await client.info()
    assert info.generation == 1
    assert info.cpus > 0
    assert (await client.usage()).disk_bytes > 0
    await client.renew(RenewRequest(warm=True))
    with pytest.raises(ClocheError) as caught:
        await client.renew(RenewRequest(hostname="Not Allowed!"))
    assert caught.value.code == "request.invalid"
    assert caught.value.details["field"] == "hostname"


# --- exec


async def test_exec_streams_and_codes(client: GuestClient) -> None:
    out, err, end, _ = await run(client, "echo out; echo err >&2; exit 3", user="root", cwd="/")
    assert (out, err, end.exit_code, end.reason) == (b"out\n", b"err\n", 3, "exited")
    assert (await run(client, "kill -9 $$"))[2][:3] == (137, "signaled", "SIGKILL")
    assert (await run(client, "exit 256"))[2].exit_code == 0
    async with client.exec(ExecRequest(id=fresh(), argv=["/no/such/program"])) as call:
        codes = [f.exit_code async for f in call if isinstance(f, Exit)]
    assert codes == [127]


async def test_arguments_environment_and_input_arrive_unchanged(client: GuestClient) -> None:
    words = ["a b", "$HOME", "x'y", "", "*", "line1\nline2", "日本é😀"]
    out = b""
    async with client.exec(ExecRequest(id=fresh(), argv=["/usr/bin/printf", "%s|", *words])) as call:
        async for frame in call:
            out += frame.data if isinstance(frame, Output) else b""
    assert out == "".join(w + "|" for w in words).encode()
    data = os.urandom(5_000_000)
    out, _, _, _ = await run(client, 'sleep 0.1; sha256sum; printf %s "$K"', stdin=data, env={"K": "a'b\"$(id)\nd"})
    assert out == hashlib.sha256(data).hexdigest().encode() + b"  -\na'b\"$(id)\nd"


async def test_big_output_is_whole(client: GuestClient) -> None:
    out, err, end, _ = await run(client, "head -c 10485760 /dev/zero | tr '\\0' x >&2; echo end; exit 3")
    assert (len(err), err.strip(b"x"), out, end.exit_code) == (10485760, b"", b"end\n", 3)


async def test_output_limit_keeps_head_and_tail(client: GuestClient) -> None:
    out, _, end, frames = await run(client, "seq 1 20000", max_output=1000)
    assert out.startswith(b"1\n2\n")
    assert out.endswith(b"19999\n20000\n")
    gaps = [f for f in frames if isinstance(f, Gap)]
    assert len(gaps) == 1
    assert gaps[0].bytes == end.stdout_dropped == end.stdout_bytes - len(out)


async def test_a_background_child_does_not_hold_the_call(client: GuestClient) -> None:
    began = time.monotonic()
    out, _, _, _ = await run(client, "echo first; (sleep 3; echo late) &")
    assert out == b"first\n"
    assert time.monotonic() - began < 2


async def test_timeout(client: GuestClient) -> None:
    _, _, end, _ = await run(client, "echo x; sleep 54321", timeout_ms=200)
    assert (end.exit_code, end.reason) == (137, "timeout")
    await until_gone("54321")


@pytest.mark.parametrize("how", ["leave", "cancel", "kill"])
async def test_ending_a_command_early_kills_it(client: GuestClient, how: str) -> None:
    mark = f"5{uuid.uuid4().int % 10**8:08d}"
    exec_id = fresh()
    async with client.exec(ExecRequest(id=exec_id, shell=f"echo go; sleep {mark}; sleep {mark}")) as call:
        assert isinstance(await anext(call), Output)
        if how == "cancel":
            await call.cancel()
        elif how == "kill":
            await client.exec_kill(exec_id)
            assert [f.reason async for f in call if isinstance(f, Exit)] == ["cancelled"]
    await until_gone(mark)


async def test_losing_the_link_kills_what_is_attached_and_spares_what_is_detached(client: GuestClient) -> None:
    mark = f"6{uuid.uuid4().int % 10**8:08d}"
    detached, attached = fresh(), fresh()
    async with client.exec(ExecRequest(id=detached, shell="echo one; sleep 0.6; echo two", detach=True)) as call:
        assert await anext(call) == Output(1, 0, b"one\n")
        other = client.exec(ExecRequest(id=attached, shell=f"sleep {mark}"))
        await other.__aenter__()
        link = client._caller.link
        assert link is not None
        link._transport.abort()
        with pytest.raises(LinkLost):
            await anext(call)
    await until_gone(mark)
    async with client.exec_output(detached, 4) as again:
        rest = [f async for f in again]
    assert rest[0] == Output(1, 4, b"two\n")
    assert again.started.pid > 0
    info = await client.exec_info(detached)
    assert not info.running
    assert info.exit is not None
    assert info.exit.exit_code == 0
    assert detached in [i.id for i in await client.execs()]


@pytest.mark.parametrize("how", ["keep", "renew", "cancel"])
async def test_losing_the_link_in_a_freeze(client: GuestClient, how: str) -> None:
    exec_id = fresh()
    call = client.exec(ExecRequest(id=exec_id, shell="yes"))
    await call.__aenter__()
    assert "commands" in await client.freeze()
    link = client._caller.link
    assert link is not None
    link._transport.abort()
    await client.wait_lost()
    await asyncio.sleep(0.1)  # this agent has a socket per link, and could hear of the loss after the thaw
    assert [i.id for i in await client.execs()] == [exec_id]
    if how == "renew":
        assert "thaw" in (await client.renew(RenewRequest(thaw=True))).steps
    else:
        await client.thaw(how == "keep")
    if how != "cancel":
        await asyncio.sleep(0.1)
        assert (await client.exec_info(exec_id)).running
        await client.exec_kill(exec_id)
    deadline = time.monotonic() + 5
    while await client.execs():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_thirty_reconnects_in_mid_stream(client: GuestClient) -> None:
    for _ in range(30):
        async with client.exec(ExecRequest(id=fresh(), shell="yes")) as call:
            await anext(call)
            link = client._caller.link
            assert link is not None
            link._transport.abort()
        assert (await client.info(timeout=5)).generation == 1


async def test_a_reader_that_stops_holds_up_nobody(client: GuestClient) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(5):
            call = client.exec(ExecRequest(id=fresh(), shell="yes"))
            await stack.enter_async_context(call)
        await asyncio.sleep(0.3)
        began = time.monotonic()
        assert (await run(client, "echo hi"))[0] == b"hi\n"
        assert time.monotonic() - began < 2


async def test_exec_errors(client: GuestClient) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"user": "nobody-of-this-name"}, "exec.user_not_found"),
        ({"cwd": "/no/such/dir"}, "exec.invalid_cwd"),
        ({"cwd": "/etc/passwd"}, "exec.invalid_cwd"),
        ({"env": {"A=B": "c"}}, "request.invalid"),
        ({"env": {"A": "b\0"}}, "request.invalid"),
    ]
    for fields, code in cases:
        with pytest.raises(ClocheError) as caught:
            await run(client, "true", **fields)
        assert caught.value.code == code, fields
    with pytest.raises(ClocheError) as caught:
        await client.exec_info("never-was")
    assert caught.value.code == "exec.not_found"
    async with client.exec(ExecRequest(id="twice", shell="sleep 9")):
        with pytest.raises(ClocheError) as caught:
            async with client.exec(ExecRequest(id="twice", shell="true")):
                pass
    assert caught.value.code == "exec.conflict"


async def test_arguments_over_the_kernels_limit(client: GuestClient) -> None:
    with pytest.raises(ClocheError) as caught:
        async with client.exec(ExecRequest(id=fresh(), argv=["/bin/echo", "a" * 200_000])):
            pass
    assert caught.value.code == "exec.too_large"
    assert (await run(client, "echo ok"))[0] == b"ok\n"


async def test_many_at_once(client: GuestClient) -> None:
    results = await asyncio.gather(*(run(client, f"echo {n}; exit {n}") for n in range(60)))
    assert [(r[0], r[2].exit_code) for r in results] == [(b"%d\n" % n, n) for n in range(60)]
