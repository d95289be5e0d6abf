"""One-shot runs over a host in memory: what they do, what they leave, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from app_host import Crew, Host, settings
from receiver import Receiver, answer
from run_kit import Guests, ended, forever, jobs_on, request, runs_on

from cloche_server.app import run_jobs as run_jobs_module
from cloche_server.app import runs as runs_module
from cloche_server.app.run_jobs import RunJobs, shown_result, told
from cloche_server.app.runs import DIRECTORY, Runs
from cloche_server.core.command import Command, CommandResult
from cloche_server.core.errors import ClocheError
from cloche_server.core.runs import CallbackState, RunFile, RunState
from cloche_server.core.webhooks import secret_from_random
from kit.fake_engine import World, settle


@pytest.fixture
def guests() -> Guests:
    return Guests()


@pytest.fixture
def runs(host: Host, guests: Guests, tmp_path: Path) -> Runs:
    return runs_on(host, guests, settings(tmp_path))


@pytest.fixture
async def jobs(host: Host, runs: Runs, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunJobs]:
    monkeypatch.setattr(run_jobs_module, "delay", lambda failures, random: 0.0)
    jobs = jobs_on(host, runs, crew)
    yield jobs
    await jobs.close()


async def nothing_left(host: Host, runs: Runs) -> None:
    await runs.close()
    assert await host.left() == []


async def state_of(jobs: RunJobs, run_id: str, state: RunState) -> None:
    for _ in range(2000):
        if (await jobs.get("w", run_id)).state is state:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"it is {(await jobs.get('w', run_id)).state}")


# ------------------------------------------------------------------ one run


async def test_a_program_runs_in_a_sandbox_of_its_own_that_is_gone_afterwards(
    host: Host, runs: Runs, guests: Guests
) -> None:
    files = (RunFile("data/a.txt", b"a"), RunFile("data/b.txt", b"b"))
    result = await runs.run("w", "r1", request(stdin=b"in", args=("1", "-x"), files=files, env={"A": "b"}))
    assert (result.status, result.program and result.program.stdout) == ("ok", "hello\n")
    assert {"queued", "create", "files", "run", "total"} == set(result.timing)
    (command,) = guests.commands
    assert command.argv == ("python3", "main.py", "1", "-x")
    assert (command.cwd, command.stdin, command.env, command.kill_on_limit) == (DIRECTORY, b"in", {"A": "b"}, True)
    ((_, tree),) = guests.files.items()
    assert tree == {
        f"{DIRECTORY}/main.py": b"print('hello')",
        f"{DIRECTORY}/data/a.txt": b"a",
        f"{DIRECTORY}/data/b.txt": b"b",
    }
    await nothing_left(host, runs)


async def test_its_sandbox_has_no_network_and_ends_by_itself(host: Host, runs: Runs, guests: Guests) -> None:
    seen = []

    async def look(command: Command) -> CommandResult:
        (entry,) = host.supervisor.entries()
        seen.append(entry.record)
        return ended()

    guests.program = look
    await runs.run("w", "r1", request(timeout=7))
    assert seen[0].network.mode.value == "none"
    assert (seen[0].ttl_seconds, seen[0].metadata) == (67, {"run": "r1"})
    await nothing_left(host, runs)


async def test_what_cannot_be_compiled_is_not_run(host: Host, runs: Runs, guests: Guests) -> None:
    async def gcc(command: Command) -> CommandResult:
        return ended(code=1)

    guests.program = gcc
    result = await runs.run("w", "r1", request("c", "int main(", template="base"))
    assert result.status == "compile_error"
    assert result.program is None
    assert [command.argv[0] for command in guests.commands if command.argv] == ["gcc"]
    shown = shown_result(result)
    assert "stdout" not in shown
    assert shown["compile"]["exit_code"] == 1
    await nothing_left(host, runs)


async def test_a_timeout_is_a_result_with_the_output_so_far(host: Host, runs: Runs, guests: Guests) -> None:
    async def slow(command: Command) -> CommandResult:
        raise ClocheError("exec.timeout", "too slow", details={"result": ended("part", 137, "timeout")})

    guests.program = slow
    result = await runs.run("w", "r1", request(expected="part"))
    assert (result.status, result.verdict) == ("timeout", "timeout")
    assert result.program is not None
    assert result.program.stdout == "part"
    await nothing_left(host, runs)


async def test_the_template_of_a_language_that_is_not_there_is_named(runs: Runs) -> None:
    with pytest.raises(ClocheError, match=r"Rust needs the template polyglot.*template bake polyglot") as caught:
        await runs.run("w", "r1", request("rust"))
    assert caught.value.code == "template.not_found"


@pytest.mark.parametrize("where", ["Guest.renew", "Machine.restore"])
async def test_a_sandbox_that_does_not_start_leaves_nothing(host: Host, runs: Runs, world: World, where: str) -> None:
    world.fault[where] = ClocheError("sandbox.boot_failed", "no")
    with pytest.raises(ClocheError, match="no"):
        await runs.run("w", "r1", request())
    world.fault.clear()
    await nothing_left(host, runs)


async def test_a_caller_who_goes_away_leaves_nothing(host: Host, runs: Runs, guests: Guests) -> None:
    guests.program = forever
    task = asyncio.create_task(runs.run("w", "r1", request()))
    await settle(lambda: bool(guests.commands))
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    await nothing_left(host, runs)


# ------------------------------------------------------------------ many


async def test_runs_wait_for_their_turn_in_order_and_too_many_are_refused(
    host: Host, guests: Guests, tmp_path: Path
) -> None:
    runs = runs_on(host, guests, settings(tmp_path, run_parallel=1, run_queue=2))
    gate = asyncio.Event()
    order: list[str] = []

    async def program(command: Command) -> CommandResult:
        order.append(str(command.env["N"]))
        await gate.wait()
        return ended()

    guests.program = program
    tasks = [asyncio.create_task(runs.run("w", f"r{n}", request(env={"N": str(n)}))) for n in range(3)]
    await settle(lambda: order == ["0"])
    with pytest.raises(ClocheError, match="2 runs of this workspace wait already") as caught:
        await runs.run("w", "r4", request())
    assert caught.value.code == "run.queue_full"
    other = asyncio.create_task(runs.run("other", "r5", request(env={"N": "other"})))
    gate.set()
    await asyncio.gather(*tasks, other)
    assert order == ["0", "1", "2", "other"]
    await nothing_left(host, runs)


async def test_a_run_without_room_waits_for_it_and_then_is_refused(
    host: Host, runs: Runs, guests: Guests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "ASK_AGAIN", 0.0)
    create, refusals = host.creator.create, iter([True, True, False])

    async def full(wanted: object) -> object:
        if next(refusals, True):
            raise ClocheError("capacity.unavailable", "full")
        return await create(wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(host.creator, "create", full)
    assert (await runs.run("w", "r1", request())).status == "ok"
    hurried = runs_on(host, guests, settings(tmp_path, run_queue_seconds=0))
    with pytest.raises(ClocheError, match="full"):
        await hurried.run("w", "r2", request())
    await runs.close()
    await nothing_left(host, hurried)


# ------------------------------------------------------------------ runs nobody waits for


async def test_a_job_is_queued_runs_and_keeps_its_result(jobs: RunJobs, guests: Guests, host: Host) -> None:
    gate = asyncio.Event()

    async def program(command: Command) -> CommandResult:
        await gate.wait()
        return ended("5\n")

    guests.program = program
    record = await jobs.submit("w", request(expected="5"), None, None)
    assert told(record)["state"] == "queued"
    await state_of(jobs, record.id, RunState.RUNNING)
    gate.set()
    await state_of(jobs, record.id, RunState.DONE)
    shown = told(await jobs.get("w", record.id))
    assert (shown["result"]["verdict"], shown["result"]["stdout"]) == ("accepted", "5\n")
    assert "callback" not in shown
    with pytest.raises(ClocheError, match="no such run"):
        await jobs.get("other", record.id)
    host.clock.time += 25 * 3600
    await jobs.prune()
    with pytest.raises(ClocheError, match="not kept any more"):
        await jobs.get("w", record.id)


async def test_a_job_that_cannot_run_says_why(jobs: RunJobs, world: World) -> None:
    world.fault["Guest.renew"] = ClocheError("sandbox.boot_failed", "no luck")
    record = await jobs.submit("w", request(), None, None)
    await state_of(jobs, record.id, RunState.DONE)
    failure = told(await jobs.get("w", record.id))["failure"]
    assert (failure["code"], failure["retryable"]) == ("sandbox.boot_failed", False)


async def test_a_receiver_is_told_signed_until_it_takes_it(jobs: RunJobs, receiver: Receiver) -> None:
    secret = secret_from_random(b"s" * 32)
    receiver.reactions = [answer(500), answer(302), answer(204)]
    record = await jobs.submit("w", request(), receiver.url, secret)
    await settle(lambda: len(receiver.got) == 3)
    assert {one.headers["webhook-id"] for one in receiver.got} == {record.id}
    assert all(one.signed_with(secret) for one in receiver.got)
    event = receiver.got[-1].event
    assert (event["id"], event["state"], event["result"]["stdout"]) == (record.id, "done", "hello\n")
    for _ in range(500):
        if (await jobs.get("w", record.id)).callback_state is CallbackState.DELIVERED:
            break
        await asyncio.sleep(0.002)
    assert told(await jobs.get("w", record.id))["callback"] == {"state": "delivered"}


async def test_a_receiver_that_never_takes_it_is_given_up(jobs: RunJobs, receiver: Receiver) -> None:
    receiver.reactions = [answer(500)] * 20
    record = await jobs.submit("w", request(), receiver.url, None)
    for _ in range(2000):
        if (await jobs.get("w", record.id)).callback_state is CallbackState.FAILED:
            break
        await asyncio.sleep(0.002)
    assert len(receiver.got) == run_jobs_module.CALLBACK_TRIES
    assert told(await jobs.get("w", record.id))["callback"] == {
        "state": "failed",
        "error": "the receiver answered 500",
    }


async def test_a_server_that_ended_leaves_lost_runs_and_its_successor_tells_so(
    jobs: RunJobs, host: Host, runs: Runs, crew: Crew, guests: Guests, receiver: Receiver
) -> None:
    guests.program = forever
    record = await jobs.submit("w", request(), receiver.url, None)
    await state_of(jobs, record.id, RunState.RUNNING)
    await jobs.close()
    successor = jobs_on(host, runs, crew)
    await successor.start()
    await settle(lambda: len(receiver.got) == 1)
    assert receiver.got[0].event["state"] == "lost"
    assert told(await successor.get("w", record.id))["failure"]["code"] == "run.lost"
    await successor.close()
    await nothing_left(host, runs)


async def test_a_deleted_run_is_ended_and_forgotten(jobs: RunJobs, host: Host, runs: Runs, guests: Guests) -> None:
    guests.program = forever
    record = await jobs.submit("w", request(), None, None)
    await state_of(jobs, record.id, RunState.RUNNING)
    with pytest.raises(ClocheError, match="no such run"):
        await jobs.delete("other", record.id)
    await jobs.delete("w", record.id)
    with pytest.raises(ClocheError, match="no such run"):
        await jobs.get("w", record.id)
    await nothing_left(host, runs)
