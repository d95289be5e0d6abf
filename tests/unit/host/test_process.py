"""Processes: bounded, killed with all that they started, told from their successors."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.host import process


def gone(pid: int, within: float = 3.0) -> bool:
    """Whether a process that is not our child has ended, or does so shortly."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        stat = process._stat(pid)
        if stat is None or stat[0] in "ZX":
            return True
        time.sleep(0.01)
    return False


async def test_returns_streams_apart_and_exit_code() -> None:
    done = await process.run(["sh", "-c", "echo out; echo err >&2; exit 3"], check=False)
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 3)


async def test_feeds_stdin_larger_than_a_pipe() -> None:
    data = os.urandom(3_000_000)
    done = await process.run(["cat"], stdin=data)
    assert done.stdout == data


async def test_a_child_that_ignores_stdin_is_no_failure() -> None:
    done = await process.run(["true"], stdin=b"x" * 1_000_000)
    assert done.returncode == 0


async def test_without_stdin_there_is_nothing_to_read() -> None:
    assert (await process.run(["cat"])).stdout == b""


async def test_failure_names_the_program_and_shows_the_last_lines() -> None:
    with pytest.raises(ClocheError) as caught:
        await process.run(["sh", "-c", "echo why >&2; exit 7"], error_code="template.bake_failed")
    assert caught.value.code == "template.bake_failed"
    assert "`sh` ended with exit code 7" in caught.value.message
    assert caught.value.details["output"] == ["why"]
    assert caught.value.details["returncode"] == 7


async def test_a_full_disk_has_its_own_code() -> None:
    with pytest.raises(ClocheError) as caught:
        await process.run(["sh", "-c", "echo 'tar: x: No space left on device'; exit 2"])
    assert caught.value.code == "host.disk_full"


async def test_death_by_signal_is_said() -> None:
    with pytest.raises(ClocheError, match="killed by SIGTERM"):
        await process.run(["sh", "-c", "kill -TERM $$"])


async def test_missing_program() -> None:
    with pytest.raises(ClocheError) as caught:
        await process.run(["no-such-program-here"])
    assert caught.value.code == "host.unsupported"


async def test_keeps_the_end_of_too_much_output() -> None:
    done = await process.run(["sh", "-c", "head -c 500000 /dev/zero; echo end"], max_output=1000)
    assert done.truncated
    assert len(done.stdout) == 1000
    assert done.stdout.endswith(b"end\n")


async def test_timeout_kills_the_whole_group(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/pid; echo started >&2; wait"
    began = time.monotonic()
    with pytest.raises(ClocheError, match=r"longer than 0\.5 s") as caught:
        await process.run(["sh", "-c", script], timeout=0.5)
    assert time.monotonic() - began < 3
    assert caught.value.details["output"] == ["started"]
    assert gone(int((tmp_path / "pid").read_text()))


async def test_cancel_kills_the_whole_group(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/tmp; mv {tmp_path}/tmp {tmp_path}/pid; wait"
    task = asyncio.create_task(process.run(["sh", "-c", script]))
    while not (tmp_path / "pid").exists():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(int((tmp_path / "pid").read_text()))


async def test_cancel_while_it_is_being_started_leaves_nothing(tmp_path: Path) -> None:
    mark = f"sleep-{os.getpid()}-{time.monotonic_ns()}"
    task = asyncio.create_task(process.run(["sh", "-c", "sleep 60", mark]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        assert not (entry.exists() and mark.encode() in entry.read_bytes())


async def test_term_grace_lets_a_program_clean_up(tmp_path: Path) -> None:
    script = f"trap 'echo > {tmp_path}/cleaned; exit 0' TERM; echo > {tmp_path}/up; while :; do sleep 0.05; done"
    with pytest.raises(ClocheError):
        await process.run(["sh", "-c", script], timeout=1.0, term_grace=5)
    assert (tmp_path / "cleaned").exists()


async def test_a_grandchild_that_holds_the_pipe_does_not_hold_us_up(tmp_path: Path) -> None:
    began = time.monotonic()
    done = await process.run(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; echo done"])
    assert done.stdout == b"done\n"
    assert time.monotonic() - began < 5
    assert gone(int((tmp_path / "pid").read_text()))


async def test_lines_are_seen_as_they_come() -> None:
    seen: list[str] = []
    await process.run(["sh", "-c", "printf 'a\\nb' >&2; sleep 0.05; printf 'c\\nlast' >&2"], on_line=seen.append)
    assert seen == ["a", "bc", "last"]


async def test_environment_and_directory(tmp_path: Path) -> None:
    done = await process.run(["/bin/sh", "-c", "pwd; echo $X"], cwd=tmp_path, env={"X": "1"})
    assert done.text == f"{tmp_path}\n1\n"


async def test_no_descriptor_leaks_into_the_child() -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        done = await process.run(["ls", f"/proc/self/fd/{writer}"], check=False)
        assert done.returncode != 0
        passed = await process.run(["ls", f"/proc/self/fd/{writer}"], check=False, pass_fds=[writer])
        assert passed.returncode == 0
    finally:
        os.close(reader)
        os.close(writer)


async def test_nothing_stays_open_after_many_runs() -> None:
    await process.run(["true"])
    before = len(list(Path("/proc/self/fd").iterdir()))
    await asyncio.gather(*(process.run(["true"], stdin=b"x") for _ in range(20)))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ------------------------------------------------------------------ detached


def start(tmp_path: Path, script: str) -> tuple[int, int]:
    pid = process.spawn_detached(["sh", "-c", script], stdout_path=tmp_path / "log")
    started = process.start_time(pid)
    assert started is not None
    return pid, started


async def test_detached_writes_to_its_file_in_its_own_session(tmp_path: Path) -> None:
    pid, started = start(tmp_path, "echo hello; echo error >&2; sleep 60")
    try:
        assert process.is_alive(pid, started)
        assert os.getsid(pid) == pid
        while (tmp_path / "log").read_bytes() != b"hello\nerror\n":
            await asyncio.sleep(0.01)
    finally:
        assert process.kill(pid, started)
    assert await process.wait_exit(pid, started, 5)
    assert not process.is_alive(pid, started)


def test_detached_outlives_its_starter(tmp_path: Path) -> None:
    code = (
        "from cloche_server.host.process import spawn_detached, start_time\n"
        "pid = spawn_detached(['sleep', '60'])\n"
        "print(pid, start_time(pid))"
    )
    output = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, check=True)
    assert output.stderr == b""
    pid, started = map(int, output.stdout.split())
    assert process.is_alive(pid, started)
    assert process.kill(pid, started, signal.SIGKILL)
    assert gone(pid)


def test_detached_passes_only_the_descriptors_named(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pid = process.spawn_detached(["bash", "-c", f"echo yes >&{writer}"], pass_fds=[writer])
    os.close(writer)
    assert os.read(reader, 10) == b"yes\n"
    os.close(reader)
    os.waitpid(pid, 0)


def test_detached_missing_program() -> None:
    with pytest.raises(ClocheError) as caught:
        process.spawn_detached(["/no/such/qemu"])
    assert caught.value.code == "host.unsupported"


async def test_an_ended_child_is_reaped_and_not_alive(tmp_path: Path) -> None:
    pid, started = start(tmp_path, "sleep 0.1; exit 4")
    assert await process.wait_exit(pid, started, 5)
    assert process.start_time(pid) is None
    assert process.reap(pid) is None


async def test_wait_exit_gives_up_after_its_timeout(tmp_path: Path) -> None:
    pid, started = start(tmp_path, "exec sleep 60")
    assert not await process.wait_exit(pid, started, 0.05)
    process.kill(pid, started)
    assert await process.wait_exit(pid, started, 5)


async def test_a_successor_with_the_same_pid_is_never_hit(tmp_path: Path) -> None:
    pid, started = start(tmp_path, "exec sleep 60")
    try:
        assert not process.is_alive(pid, started - 1)
        assert not process.kill(pid, started - 1)
        assert process.open_pidfd(pid, started - 1) is None
        assert await process.wait_exit(pid, started - 1)
        assert process.is_alive(pid, started)
    finally:
        process.kill(pid, started)
        await process.wait_exit(pid, started)


def test_start_time_of_a_process_with_an_odd_name(tmp_path: Path) -> None:
    odd = tmp_path / "a) Z 1 (b"
    odd.symlink_to("/bin/sleep")
    pid = process.spawn_detached([odd, "60"])
    started = process.start_time(pid)
    assert started is not None
    assert started > 1
    process.kill(pid, started)
    os.waitpid(pid, 0)


def test_no_process_has_no_start_time() -> None:
    assert process.start_time(2**22 + 1) is None
    assert not process.is_alive(2**22 + 1, 1)
