"""Background commands: nothing is lost around their end or between two readers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kit import procs, sse
from kit.client import Api, Box
from kit.server import Server
from kit.until import Watch, until


def ended(box: Box, exec_id: str) -> dict[str, Any]:
    """What is known of a command that has ended; empty while it runs."""
    info = box.exec_info(exec_id)
    return info if info["status"] == "exited" else {}


@pytest.mark.slow
async def test_500_very_short_ones_keep_output_and_code(shared: Box, api: Api, server: Server) -> None:
    """Records are kept until 64 newer ones have ended, so each is read when its status says so."""
    fds = procs.fd_count(server.pid)
    path, gate = f"{shared.path}/exec", asyncio.Semaphore(6)
    async with api.aio() as client:

        async def one(number: int) -> None:
            async with gate:
                argv = ["/bin/sh", "-c", "printf x; exit 5"]
                body = {"argv": argv, "background": True, "exec_id": f"short-{number}"}
                answer = await client.call("POST", path, json=body)
                assert answer == {"exec_id": f"short-{number}", "status": "running", "pid": answer["pid"]}
                assert answer["pid"] > 1
                while True:
                    info = await client.call("GET", f"{path}/short-{number}")
                    if info["status"] == "exited":
                        break
                    await asyncio.sleep(0.1)
                assert (info["stdout"], info["stderr"], info["exit_code"]) == ("x", "", 5), info

        async with asyncio.TaskGroup() as group:
            for number in range(500):
                group.create_task(one(number))
    assert procs.fd_count(server.pid) <= fds + 10


@pytest.mark.slow
def test_reattaching_misses_and_repeats_nothing(shared: Box) -> None:
    """The report pauses for 140 s of 300; here 60 lines take 15 s, and the client is away twice."""
    exec_id = shared.start("for i in $(seq 60); do echo $i; sleep 0.25; done; exit 4")
    seen: list[sse.Event] = []
    for stop_at in (5, 25):
        last = seen[-1].id if seen else None
        with shared.follow(exec_id, last_event_id=last) as events:
            for event in events:
                seen.append(event)
                if len(sse.Outcome(seen).stdout.split()) >= stop_at:
                    break
        assert shared.exec_info(exec_id)["status"] == "running", "hanging up leaves it running"
    final = shared.follow_all(exec_id, int(seen[-1].id or 0))
    assert (sse.Outcome(seen).stdout + final.stdout).decode().split() == [str(i) for i in range(1, 61)]
    assert final.exit_code == 4


def test_after_the_end_everything_is_still_there(shared: Box) -> None:
    exec_id = shared.start("echo out; echo err >&2; exit 9")
    info = until(lambda: ended(shared, exec_id))
    assert (info["stdout"], info["stderr"], info["exit_code"]) == ("out\n", "err\n", 9)
    assert info["termination"] == {"reason": "exited"}
    assert info["duration_ms"] >= 0
    for _ in range(2):
        outcome = shared.follow_all(exec_id)
        assert (outcome.stdout, outcome.stderr, outcome.exit_code) == (b"out\n", b"err\n", 9)
    late = shared.follow_all(exec_id, 8)
    assert (late.stdout, late.exit_code) == (b"", 9)
    beyond = shared.api.request("GET", f"{shared.path}/exec/{exec_id}/stream", params={"from": 9})
    assert (beyond.status_code, beyond.json()["code"]) == (400, "request.invalid")
    raw = shared.exec_info(exec_id, encoding="base64")
    assert raw["stdout"] == "b3V0Cg=="


def test_a_character_is_not_cut_where_a_reader_comes_back(shared: Box) -> None:
    exec_id = shared.start(["python3", "-c", "print('é' * 100, end='', flush=True)"])
    until(lambda: ended(shared, exec_id))
    assert shared.follow_all(exec_id, 101, encoding="base64").stdout == ("é" * 100).encode()[101:]


def test_beyond_retention_the_loss_is_stated(shared: Box) -> None:
    """A ring of 1 MiB is kept; what a late reader cannot have any more is a `gap` of so many bytes."""
    exec_id = shared.start(["python3", "-c", "import os\nfor i in range(300): os.write(1, b'%07d\\n' % i * 1000)"])
    info = until(lambda: ended(shared, exec_id), 60)
    assert info["output_bytes"] == 2_400_000
    assert info["stdout_dropped_bytes"] > 0
    outcome = shared.follow_all(exec_id)
    assert outcome.events[0].name == "gap"
    assert outcome.gaps + len(outcome.stdout) == 2_400_000
    assert len(outcome.stdout) >= 900_000
    assert outcome.stdout.endswith(b"0000299\n")
    assert outcome.exit_code == 0


def test_a_chatty_one_needs_no_reader(shared: Box) -> None:
    """Nobody reads, and it must not block on its pipe."""
    exec_id = shared.start("head -c 6000000 /dev/zero; echo end >&2; exit 3")
    info = until(lambda: ended(shared, exec_id), 60)
    assert info["exit_code"] == 3
    assert info["stderr"] == "end\n"


def test_the_list_tells_what_runs(shared: Box) -> None:
    exec_id = shared.start("sleep 71.5")
    running = {item["exec_id"]: item for item in shared.execs()}
    assert running[exec_id]["status"] == "running"
    assert running[exec_id]["detached"] is True
    assert shared.sh(f"cat /proc/{running[exec_id]['pid']}/cmdline | tr '\\0' ' '").startswith(
        ("sleep", "/bin", "bash")
    )
    shared.kill(exec_id)
    info = until(lambda: ended(shared, exec_id))
    assert info["termination"]["reason"] == "cancelled"
    assert info["exit_code"] == 137
    shared.kill(exec_id)  # once more is no error


def test_kill_takes_the_whole_tree(shared: Box) -> None:
    exec_id = shared.start("setsid sh -c 'trap \"\" TERM HUP; sleep 72.5; true' & trap '' TERM; sleep 72.5; true")
    until(lambda: shared.exec("pgrep -fc '^sleep 72.5'").stdout == "2\n")
    shared.kill(exec_id)
    until(lambda: shared.exec("pgrep -f '72.[5]'").code == 1, 20)


def test_kill_of_a_blocking_call_ends_it(shared: Box) -> None:
    with shared.stream("echo on; sleep 60", exec_id="to-be-killed") as events:
        assert next(events).raw == b"on\n"
        watch = Watch()
        shared.kill("to-be-killed")
        outcome = sse.Outcome(list(events))
    assert watch.seconds < 20
    assert outcome.end.data["termination"]["reason"] == "cancelled"


def test_unknown_and_doubled_ids(shared: Box) -> None:
    for method, route in (("GET", ""), ("GET", "/stream"), ("DELETE", "")):
        response = shared.api.request(method, f"{shared.path}/exec/nosuch{route}")
        assert (response.status_code, response.json()["code"]) == (404, "exec.not_found")
    exec_id = shared.start("sleep 20", exec_id="twice")
    error = shared.refused("true", exec_id=exec_id)
    assert (error.status, error.code) == (409, "exec.conflict")
    shared.kill(exec_id)
    assert shared.refused("true", exec_id="Not/An Id").code == "request.invalid"


def test_a_background_timeout_is_recorded(shared: Box) -> None:
    exec_id = shared.start("echo begun; sleep 60", timeout_seconds=2)
    info = until(lambda: ended(shared, exec_id))
    assert info["termination"]["reason"] == "timeout"
    assert info["stdout"] == "begun\n"


def test_what_cannot_start_is_recorded_too(shared: Box) -> None:
    exec_id = shared.start(["/no/such/program"])
    info = until(lambda: ended(shared, exec_id))
    assert info["exit_code"] == 127
    error = shared.refused("true", background=True, cwd="/missing")
    assert error.code == "exec.invalid_cwd"
