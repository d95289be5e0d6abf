"""One-shot runs: a program in a fresh sandbox of its own, its output, and nothing left.

A run waits for its turn, and for room on the host, in the order in which runs were asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from cloche_server.app.create import CreateRequest, Creator
from cloche_server.app.exec import Execs
from cloche_server.app.files import Files, WriteOptions
from cloche_server.app.lifecycle import LifecycleVerbs
from cloche_server.core.command import Command, CommandResult
from cloche_server.core.errors import ClocheError
from cloche_server.core.languages import BASE, Language, command, file_name
from cloche_server.core.network import NetworkMode, NetworkPolicy
from cloche_server.core.records import Sandbox
from cloche_server.core.runs import RunRequest, RunResult, RunStep, status_of, step_of, verdict_of
from cloche_server.settings import Settings
from cloche_server.storage.templates import TemplateCatalog
from cloche_server.telemetry import log

_log = log.get("runs")

#: Where the program lies in its sandbox.
DIRECTORY: Final = "/tmp/run"  # noqa: S108 - in a sandbox that nobody else is in
#: So often a run without room on the host asks again (seconds).
ASK_AGAIN: Final = 0.1
#: The sandbox ends by itself so long after its program should have (seconds).
TTL_GRACE: Final = 60
#: What goes on at once for each CPU of the host: machines wait as much as they compute.
PER_CPU: Final = 2

Observer = Callable[[], None]


class Runs:
    """Errors of every method: `template.not_found`, what a create raises, `run.queue_full`, `exec.*`."""

    def __init__(
        self,
        settings: Settings,
        catalog: TemplateCatalog,
        creator: Creator,
        execs: Execs,
        files: Files,
        lifecycle: LifecycleVerbs,
        cpus: int,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._creator = creator
        self._execs = execs
        self._files = files
        self._lifecycle = lifecycle
        self._turns = asyncio.Semaphore(settings.run_parallel or max(2, PER_CPU * cpus))
        self._waiting: Counter[str] = Counter()
        self._ending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Returns when the sandboxes of runs that have ended are gone."""
        if self._ending:
            await asyncio.wait(set(self._ending), timeout=10)

    async def run(self, workspace: str, run_id: str, request: RunRequest, begun: Observer = lambda: None) -> RunResult:
        """Runs a program to its end. `begun` is called when its turn has come. Cancelled, it leaves nothing."""
        template = self.template_of(workspace, request)
        asked = time.perf_counter()
        timing: dict[str, float] = {}
        with self._counted(workspace):
            await self._turns.acquire()
        try:
            begun()
            async with self._sandbox(workspace, run_id, template, request, asked, timing) as record:
                compiler, program = await self._work(record, request, timing)
        finally:
            self._turns.release()
        timing["total"] = _since(asked)
        status = "compile_error" if program is None else status_of(program)
        return RunResult(
            status=status,
            language=request.language.name,
            template=template,
            program=program,
            compiler=compiler,
            verdict=verdict_of(status, program.stdout if program else "", request.expected, request.compare),
            timing={phase: round(ms, 1) for phase, ms in timing.items()},
        )

    def template_of(self, workspace: str, request: RunRequest) -> str:
        """Which template it runs in. Raises `template.not_found`."""
        wanted = request.template or request.language.template
        if self._catalog.resolve(wanted, workspace) is not None:
            return wanted
        what = f"{request.language.title} needs the template {wanted}, which is not there"
        if request.template is None and wanted != BASE:
            what += f"; the operator makes it with `cloche-server template bake {wanted}`"
        raise ClocheError("template.not_found", what, details={"template": wanted, "language": request.language.name})

    def is_available(self, workspace: str, language: Language) -> bool:
        """Whether the template that has the language is there."""
        return self._catalog.resolve(language.template, workspace) is not None

    @contextmanager
    def _counted(self, workspace: str) -> Iterator[None]:
        """A place in the queue. Raises `run.queue_full`."""
        most = self._settings.run_queue
        if self._waiting[workspace] >= most:
            raise ClocheError(
                "run.queue_full",
                f"{most} runs of this workspace wait already, and that is the limit",
                details={"limit": most},
                retry_after=1,
            )
        self._waiting[workspace] += 1
        try:
            yield
        finally:
            self._waiting[workspace] -= 1
            if not self._waiting[workspace]:
                del self._waiting[workspace]

    # ---------------------------------------------------------------- the sandbox

    @asynccontextmanager
    async def _sandbox(
        self,
        workspace: str,
        run_id: str,
        template: str,
        request: RunRequest,
        asked: float,
        timing: dict[str, float],
    ) -> AsyncIterator[Sandbox]:
        """Ends with the block; the caller does not wait for that."""
        timing["queued"] = _since(asked)
        began = time.perf_counter()
        record = await self._create(workspace, run_id, template, request, asked)
        timing["create"] = _since(began)
        try:
            yield record
        finally:
            task = asyncio.create_task(self._end(record))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _create(self, workspace: str, run_id: str, template: str, request: RunRequest, asked: float) -> Sandbox:
        """Without room on the host it waits for some, as long as runs may."""
        seconds = request.timeout + (request.compile_timeout if request.language.is_compiled else 0)
        wanted = CreateRequest(
            workspace=workspace,
            template=template,
            cpus=request.cpus,
            memory_mb=self._memory(request),
            ttl_seconds=int(seconds) + TTL_GRACE,
            metadata={"run": run_id},
            network=request.network or NetworkPolicy(NetworkMode.NONE),
        )
        while True:
            try:
                return await self._creator.create(wanted)
            except ClocheError as error:
                waited = time.perf_counter() - asked
                if error.code != "capacity.unavailable" or waited > self._settings.run_queue_seconds:
                    raise
            await asyncio.sleep(ASK_AGAIN)

    def _memory(self, request: RunRequest) -> int | None:
        if request.memory_mb is not None or request.language.memory_mb is None:
            return request.memory_mb
        return max(request.language.memory_mb, self._settings.default_memory_mb)

    async def _end(self, record: Sandbox) -> None:
        try:
            await self._lifecycle.delete(record.workspace, record.id)
        except ClocheError as error:
            # It has ended by itself, or its time will end it.
            if error.code != "sandbox.not_found":
                _log.warning("run.sandbox_not_deleted", sandbox=record.id, error=error.message)

    # ---------------------------------------------------------------- what is done in it

    async def _work(
        self, record: Sandbox, request: RunRequest, timing: dict[str, float]
    ) -> tuple[RunStep | None, RunStep | None]:
        """What the compiler and the program left; no program when there is nothing to run."""
        language, began = request.language, time.perf_counter()
        file = file_name(language, request.source)
        await self._put(record, file, request)
        timing["files"] = _since(began)
        compiler = None
        if language.is_compiled:
            began = time.perf_counter()
            argv = command(language.compile, file, request.flags)
            compiler = await self._step("compile", record, request, argv, b"", request.compile_timeout)
            timing["compile"] = _since(began)
            if status_of(compiler) != "ok":
                return compiler, None
        began = time.perf_counter()
        argv = (*command(language.run, file), *request.args)
        program = await self._step("program", record, request, argv, request.stdin, request.timeout)
        timing["run"] = _since(began)
        return compiler, program

    async def _put(self, record: Sandbox, file: str, request: RunRequest) -> None:
        # What is missing on the way to a file is made with it.
        sources = [(file, request.source.encode()), *((one.path, one.data) for one in request.files)]
        for path, data in sources:
            whole = f"{DIRECTORY}/{path}"
            options = WriteOptions(length=len(data))
            await self._files.write(record.workspace, record.id, whole, _body(data), options, None)

    async def _step(
        self, name: str, record: Sandbox, request: RunRequest, argv: tuple[str, ...], stdin: bytes, timeout: float
    ) -> RunStep:
        wanted = Command(
            exec_id=name,
            argv=argv,
            env=request.env,
            cwd=DIRECTORY,
            stdin=stdin,
            timeout=timeout,
            encoding=request.encoding,
            max_output=request.max_output,
            kill_on_limit=True,
        )
        try:
            return step_of(await self._execs.run(record.workspace, record.id, wanted))
        except ClocheError as error:
            result = error.details.get("result")
            if error.code == "exec.timeout" and isinstance(result, CommandResult):
                return step_of(result)
            raise


async def _body(data: bytes) -> AsyncIterator[bytes]:
    for place in range(0, len(data), 65536):
        yield data[place : place + 65536]


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000
