"""One-shot runs."""

from __future__ import annotations

from cloche_fake import FakeCloche, faults

from cloche import AsyncClient, RunFailure, RunResult

STEP = {
    "stdout": "5\n", "stderr": "", "stdout_dropped_bytes": 0, "stderr_dropped_bytes": 1, "exit_code": 0,
    "reason": "exited", "duration_ms": 1.5, "cpu_ms": 1.0, "memory_kb": 9000,
}  # fmt: skip
RESULT = {"status": "ok", "language": "c", "template": "polyglot", "verdict": "accepted", "timing_ms": {"total": 9.0}}
REFUSED = {"error": "no", "code": "run.unknown_language", "retryable": False, "details": {"a": 1}}


async def test_a_program_is_sent_and_its_result_read(fake: FakeCloche) -> None:
    async with AsyncClient() as client:
        fake.on("POST", "/run", faults.says(200, {**RESULT, **STEP, "compile": STEP}, fake.bodies))
        result = await client.runs.run("c", "int main…", stdin=b"\xff", files={"a": "x", "b": b"\x00"}, network="open")
        assert fake.bodies[-1] == {
            "language": "c",
            "source": "int main…",
            "stdin": "/w==",
            "stdin_base64": True,
            "files": [{"path": "a", "content": "x"}, {"path": "b", "content": "AA==", "encoding": "base64"}],
            "network": {"mode": "open"},
        }
        assert (result.ok, result.verdict, result.stdout, result.timing_ms["total"]) == (True, "accepted", "5\n", 9.0)
        assert result.compiler is not None
        assert result.compiler.stderr_dropped_bytes == 1
        fake.on("POST", "/run", faults.says(200, {**RESULT, "status": "compile_error", "compile": STEP}))
        refused = await client.runs.run("c", "int main(", stdin="text")
        assert (refused.ok, refused.program, refused.stdout) == (False, None, "")


async def test_a_batch_has_results_and_failures_in_order(fake: FakeCloche) -> None:
    async with AsyncClient() as client:
        told = {"results": [{"result": {**RESULT, **STEP}}, {"failure": REFUSED}]}
        fake.on("POST", "/run/batch", faults.says(200, told, fake.bodies))
        good, bad = await client.runs.batch([{"language": "c", "source": ""}, {"language": "x", "source": ""}])
        assert isinstance(good, RunResult)
        assert isinstance(bad, RunFailure)
        assert (bad.code, bad.details["a"]) == ("run.unknown_language", 1)


async def test_a_run_nobody_waits_for(fake: FakeCloche) -> None:
    queued = {"id": "r1", "state": "queued", "language": "c", "created_at": "2026-01-02T03:04:05Z"}
    done = {**queued, "state": "done", "finished_at": "2026-01-02T03:04:06Z", "result": {**RESULT, **STEP}}
    async with AsyncClient() as client:
        fake.on("POST", "/run", faults.says(202, queued, fake.bodies))
        run = await client.runs.submit("c", "x", callback_url="https://a.test/", timeout_seconds=3)
        assert (run.id, run.state, run.result, run.callback) == ("r1", "queued", None, None)
        assert fake.bodies[-1] == {
            "language": "c", "source": "x", "wait": False, "callback_url": "https://a.test/", "timeout_seconds": 3,
        }  # fmt: skip
        fake.on("GET", "/run/r1", faults.says(200, {**done, "callback": {"state": "pending"}}))
        run = await client.runs.get("r1")
        assert run.result is not None
        assert (run.result.stdout, run.callback) == ("5\n", "pending")
        fake.on("GET", "/run/r1", faults.says(200, {**queued, "state": "lost", "failure": REFUSED}))
        run = await client.runs.get("r1")
        assert run.failure is not None
        assert run.failure.message == "no"
        fake.on("DELETE", "/run/r1", faults.says(204))
        await client.runs.delete("r1")


async def test_languages(fake: FakeCloche) -> None:
    told = {"name": "c", "title": "C", "aliases": ["cc"], "file": "main.c", "compiled": True, "template": "polyglot"}
    async with AsyncClient() as client:
        fake.on("GET", "/run/languages", faults.says(200, {"languages": [{**told, "available": False}]}))
        (one,) = await client.runs.languages()
        assert (one.name, one.aliases, one.compiled, one.available) == ("c", ("cc",), True, False)
