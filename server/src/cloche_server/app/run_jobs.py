"""Runs that nobody waits for: kept until they are asked about, and told to a receiver when they end."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Final

from cloche_server.app.delivery import Poster, refusal
from cloche_server.app.runs import Runs
from cloche_server.core.errors import CATALOGUE, ClocheError
from cloche_server.core.ids import id_from_random
from cloche_server.core.runs import (
    CallbackState,
    RunRecord,
    RunRequest,
    RunResult,
    RunState,
    RunStep,
    result_from_json,
    result_to_json,
)
from cloche_server.core.times import rfc3339
from cloche_server.core.webhooks import delay, signed_headers
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.host.outbound import SendFailed
from cloche_server.store.runs import RunStore
from cloche_server.telemetry import log

_log = log.get("runs")

#: So often a receiver is told, with growing pauses, before it is given up.
CALLBACK_TRIES: Final = 6
ID_BYTES: Final = 20


def new_run_id() -> str:
    """Nobody can guess it."""
    return id_from_random(random_bytes(ID_BYTES))


class RunJobs:
    """Errors: `run.not_found`, and those of `Runs`."""

    def __init__(
        self, runs: Runs, store: RunStore, sender: Poster, clock: Clock, group: asyncio.TaskGroup, keep_hours: float
    ) -> None:
        self._runs = runs
        self._store = store
        self._sender = sender
        self._clock = clock
        self._group = group
        self._keep = keep_hours * 3600
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._begun: set[str] = set()
        self._random: Callable[[], float] = random.random

    async def start(self) -> None:
        """What an earlier server has left: runs without an end are lost, receivers that do not know are told."""
        for record in await self._store.unfinished():
            if record.finished_at is None:
                error = ClocheError("run.lost", "the server ended while the run was under way; it was not run again")
                record = await self._finish(record, RunState.LOST, failure(error))
            if record.callback_state is CallbackState.PENDING:
                self._own(record.id, self._tell(record))

    async def close(self) -> None:
        """Ends what is under way; the next server calls it lost, and tells the receivers that wait."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=15)
        await self._sender.aclose()

    async def submit(
        self, workspace: str, request: RunRequest, callback_url: str | None, callback_secret: str | None
    ) -> RunRecord:
        """Records a run and lets it wait for its turn."""
        self._runs.template_of(workspace, request)
        waits = CallbackState.NONE if callback_url is None else CallbackState.PENDING
        record = RunRecord(
            id=new_run_id(),
            workspace=workspace,
            state=RunState.QUEUED,
            language=request.language.name,
            created_at=self._clock.now(),
            callback_url=callback_url,
            callback_secret=callback_secret,
            callback_state=waits,
        )
        await self._store.insert(record)
        self._own(record.id, self._perform(record, request))
        return record

    async def get(self, workspace: str, run_id: str) -> RunRecord:
        record = await self._store.find(workspace, run_id)
        if record is None:
            raise ClocheError("run.not_found", "there is no such run, or its result is not kept any more")
        if record.state is RunState.QUEUED and run_id in self._begun:
            return replace(record, state=RunState.RUNNING)
        return record

    async def delete(self, workspace: str, run_id: str) -> None:
        """Ends it if it goes on, and forgets it."""
        await self.get(workspace, run_id)
        task = self._tasks.get(run_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self._store.delete(workspace, run_id)

    async def prune(self) -> None:
        """Forgets what has been kept long enough."""
        await self._store.prune(self._clock.now() - self._keep)

    # ---------------------------------------------------------------- inside

    def _own(self, run_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks[run_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(run_id, None))

    async def _perform(self, record: RunRecord, request: RunRequest) -> None:
        try:
            result = await self._runs.run(record.workspace, record.id, request, lambda: self._begun.add(record.id))
            outcome: Mapping[str, Any] = {"result": result_to_json(result)}
        except ClocheError as error:
            outcome = failure(error)
        finally:
            self._begun.discard(record.id)
        record = await self._finish(record, RunState.DONE, outcome)
        if record.callback_state is CallbackState.PENDING:
            await self._tell(record)

    async def _finish(self, record: RunRecord, state: RunState, outcome: Mapping[str, Any]) -> RunRecord:
        record = replace(record, state=state, outcome=outcome, finished_at=self._clock.now())
        await self._save(record)
        return record

    async def _save(self, record: RunRecord) -> None:
        try:
            await self._store.update(record)
        except ClocheError as error:
            _log.error("run.not_recorded", run=record.id, error=error.message)

    async def _tell(self, record: RunRecord) -> None:
        """Tells the receiver, several times if need be. A server that ends meanwhile leaves it to its successor."""
        assert record.callback_url is not None
        body = json.dumps(told(record), separators=(",", ":")).encode("ascii")
        why = ""
        for failures in range(1, CALLBACK_TRIES + 1):
            try:
                why = refusal(await self._sender.post(record.callback_url, self._headers(record, body), body)) or ""
            except SendFailed as failed:
                why = str(failed)
            if not why:
                await self._save(replace(record, callback_state=CallbackState.DELIVERED))
                return
            if failures < CALLBACK_TRIES:
                await asyncio.sleep(delay(failures, self._random()))
        _log.warning("run.callback_given_up", run=record.id, error=why)
        await self._save(replace(record, callback_state=CallbackState.FAILED, callback_error=why))

    def _headers(self, record: RunRecord, body: bytes) -> dict[str, str]:
        plain = {"content-type": "application/json", "user-agent": "cloche-runs"}
        if record.callback_secret is None:
            return plain
        return {**plain, **signed_headers(record.callback_secret, record.id, int(self._clock.now()), body)}


def failure(error: ClocheError) -> dict[str, Any]:
    """An error as the outcome of a run."""
    details = {name: value for name, value in error.details.items() if name != "result"}
    return {
        "error": {
            "error": error.message,
            "code": error.code,
            "retryable": CATALOGUE[error.code].retryable,
            "details": details,
        }
    }


def told(record: RunRecord) -> dict[str, Any]:
    """What a caller, or the receiver, is told of a run."""
    shown: dict[str, Any] = {
        "id": record.id,
        "state": record.state.value,
        "language": record.language,
        "created_at": rfc3339(record.created_at),
    }
    if record.finished_at is not None:
        shown["finished_at"] = rfc3339(record.finished_at)
    if record.callback_state is not CallbackState.NONE:
        shown["callback"] = {"state": record.callback_state.value}
        if record.callback_error is not None:
            shown["callback"]["error"] = record.callback_error
    outcome = record.outcome or {}
    if "result" in outcome:
        shown["result"] = shown_result(result_from_json(outcome["result"]))
    if "error" in outcome:
        shown["failure"] = outcome["error"]
    return shown


def shown_result(result: RunResult) -> dict[str, Any]:
    """The public JSON of a result: the program's fields on the level of the result, absent where there is nothing."""
    shown: dict[str, Any] = {"status": result.status, "language": result.language, "template": result.template}
    if result.verdict is not None:
        shown["verdict"] = result.verdict
    if result.compiler is not None:
        shown["compile"] = _shown_step(result.compiler)
    if result.program is not None:
        shown.update(_shown_step(result.program))
    shown["timing_ms"] = dict(result.timing)
    return shown


def _shown_step(step: RunStep) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "stdout": step.stdout,
        "stderr": step.stderr,
        "stdout_dropped_bytes": step.stdout_dropped,
        "stderr_dropped_bytes": step.stderr_dropped,
        "exit_code": step.exit_code,
        "reason": step.reason,
        "duration_ms": round(step.duration_ms, 1),
        "cpu_ms": round(step.user_ms + step.system_ms, 1),
        "memory_kb": step.memory_kb,
    }
    for name in ("signal", "detail"):
        if (value := getattr(step, name)) is not None:
            shown[name] = value
    return shown
