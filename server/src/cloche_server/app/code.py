"""Code in the kernels of a sandbox: runs, and the contexts that they keep their state in."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry
from cloche_server.app.exec import HOST_GRACE, lost
from cloche_server.app.patience import Patience
from cloche_server.app.template_service import start_service
from cloche_server.core import code
from cloche_server.core.code import (
    CodeAlive,
    CodeContext,
    CodeEnd,
    CodeEvent,
    CodeRefused,
    CodeStarted,
)
from cloche_server.core.command import check_env
from cloche_server.core.errors import ClocheError
from cloche_server.core.secrets import guest_env
from cloche_server.core.streams import LastingStream
from cloche_server.guest.client import GuestClient
from cloche_server.telemetry import metrics

DIAL_SECONDS: Final = 15.0
#: A bridge that has to be started first, in a machine that was booted, has so long.
START_SECONDS: Final = 180.0
#: A call that is no run is answered within this; a kernel may have to be started for it.
CALL_SECONDS: Final = 180.0
#: The bridge says every few seconds that it is there; silence of a machine that runs is an end.
SILENCE: Final = 60.0
#: What the bridge needs to end a run that does not want to end.
KILL_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class CodeRun:
    """What a caller wants to be run. `timeout` in seconds. `input`: somebody answers when the code asks."""

    code: str
    timeout: float
    language: str | None = None
    context_id: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    input: bool = False


class CodeLink:
    """A connection to the bridge, which has one request after the other. It is kept between two of them: a new one
    takes an emulated machine as long as a short cell."""

    def __init__(self, stream: LastingStream, entry: Entry, guest: GuestClient) -> None:
        self._stream = stream
        self._entry = entry
        self._guest = guest
        #: A request was sent whose last answer was not read.
        self.busy = False
        self._reader = code.FrameReader()
        self._ready: deque[dict[str, Any]] = deque()

    @staticmethod
    def kept(entry: Entry, guest: GuestClient) -> CodeLink | None:
        """The one that was left by an earlier request, if it leads there and nothing has come of it since."""
        link, entry.code_link = entry.code_link, None
        if not isinstance(link, CodeLink):
            return None
        if link._guest is guest and link._stream.is_quiet:
            return link
        link._stream.close()
        return None

    async def send(self, request: Mapping[str, Any]) -> None:
        self.busy = True
        data = code.frame(request)
        self._entry.traffic.bytes_in += len(data)
        await self._stream.write(data)

    async def next(self) -> dict[str, Any]:
        """Raises `ConnectionError` when the connection ends, `guest.protocol`."""
        while not self._ready:
            data = await self._stream.read()
            if not data:
                raise ConnectionResetError("the bridge has closed the connection")
            self._entry.traffic.out(len(data))
            self._ready.extend(self._reader.feed(data))
        return self._ready.popleft()

    def leave(self) -> None:
        """To who comes next, or closed where more than its answer has come, or less."""
        is_clean = not (self.busy or self._ready or self._reader.waiting) and self._stream.is_quiet
        if is_clean and self._entry.code_link is None and self._entry.guest is self._guest:
            self._entry.code_link = self
        else:
            self._stream.close()


class Codes:
    """Errors of every method: those of `Access.serving`, and `code.*`."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._starting: dict[str, asyncio.Lock] = {}

    async def run(self, workspace: str, sandbox_id: str, wanted: CodeRun) -> CodeStream:
        """Starts a run; raises at once what keeps it from starting. Closing the stream early interrupts it."""
        check_env(wanted.env)
        entry, guest = await self._access.serving(workspace, sandbox_id)
        self._access.count_exec(entry)
        held = contextlib.ExitStack()
        held.enter_context(self._access.busy(entry))
        try:
            link = await self._open(entry, guest)
            held.callback(link.leave)
            request = {
                **self._surroundings(entry),
                "op": "run",
                "code": wanted.code,
                "timeout_ms": max(1, round(wanted.timeout * 1000)),
                "env": dict(wanted.env),
                "cell_cwd": wanted.cwd,
                "input": wanted.input,
                "language": wanted.language,
                "context": wanted.context_id,
            }
            stream = CodeStream(entry, link, wanted, held)
            await stream.begin(request)
        except BaseException:
            held.close()
            raise
        return stream

    # ---------------------------------------------------------------- contexts

    async def contexts(self, workspace: str, sandbox_id: str) -> list[CodeContext]:
        return code.contexts((await self._ask(workspace, sandbox_id, {"op": "list"})).get("contexts"))

    async def create(self, workspace: str, sandbox_id: str, language: str, cwd: str | None) -> CodeContext:
        """A context whose kernel is started. Raises `code.too_many_contexts`, `code.kernel_failed`."""
        answer = await self._ask(
            workspace, sandbox_id, {"op": "create", "language": language, "cwd": cwd}, counted=True
        )
        return code.context(answer.get("context"))

    async def delete(self, workspace: str, sandbox_id: str, context_id: str) -> None:
        await self._ask(workspace, sandbox_id, {"op": "delete", "context": context_id})

    async def interrupt(self, workspace: str, sandbox_id: str, context_id: str) -> bool:
        """Whether something ran."""
        answer = await self._ask(workspace, sandbox_id, {"op": "interrupt", "context": context_id})
        return answer.get("interrupted") is True

    async def restart(self, workspace: str, sandbox_id: str, context_id: str) -> None:
        """A new kernel without the state of the old one."""
        await self._ask(workspace, sandbox_id, {"op": "restart", "context": context_id})

    async def answer(self, workspace: str, sandbox_id: str, context_id: str, text: str) -> None:
        """Raises `code.not_waiting` when nothing asks for input."""
        await self._ask(workspace, sandbox_id, {"op": "input", "context": context_id, "text": text})

    # ---------------------------------------------------------------- inside

    async def _ask(
        self, workspace: str, sandbox_id: str, request: dict[str, Any], *, counted: bool = False
    ) -> dict[str, Any]:
        entry, guest = await self._access.serving(workspace, sandbox_id)
        chosen = request.get("context")
        if chosen is not None and not code.is_context_id(chosen):
            raise _context_not_found()
        if counted:
            self._access.count_exec(entry)
        with self._access.busy(entry):
            link = await self._open(entry, guest)
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    await link.send({**self._surroundings(entry), **request})
                    answer = await link.next()
                    link.busy = False
            except TimeoutError:
                raise _silent(entry) from None
            except ConnectionError as error:
                raise await _lost(entry) from error
            finally:
                link.leave()
        if answer.get("type") == "refused":
            raise _refusal(code.refused(answer))
        if answer.get("type") != "reply":
            raise code.nonsense("no reply")
        return answer

    def _surroundings(self, entry: Entry) -> dict[str, Any]:
        """What a kernel is started with, and has from the first cell on: as a command has it."""
        defaults = entry.record.defaults
        base = {**(guest_env(entry.record.grants) if entry.record.is_read else {}), **defaults.env}
        return {
            "base": base,
            "home": defaults.cwd,
            "user": None if defaults.user in {"", "root", "0"} else defaults.user,
        }

    async def _open(self, entry: Entry, guest: GuestClient) -> CodeLink:
        """A connection to the bridge, which is started when it is not there. Raises `code.not_available`."""
        if (kept := CodeLink.kept(entry, guest)) is not None:
            return kept
        try:
            return CodeLink(await guest.tunnel(code.CODE_PORT, timeout=DIAL_SECONDS), entry, guest)
        except ClocheError as error:
            if error.code != "port.closed":
                raise
        lock = self._starting.setdefault(entry.record.id, asyncio.Lock())
        try:
            async with lock:
                return CodeLink(await self._started(entry, guest), entry, guest)
        finally:
            if not lock.locked():
                self._starting.pop(entry.record.id, None)

    async def _started(self, entry: Entry, guest: GuestClient) -> LastingStream:
        until = asyncio.timeout(START_SECONDS)
        begun = False
        try:
            async with until:
                while True:
                    try:
                        return await guest.tunnel(code.CODE_PORT, timeout=DIAL_SECONDS)
                    except ClocheError as error:
                        if error.code != "port.closed":
                            raise
                    if not begun:
                        await self._start(entry, guest)
                        begun = True
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise ClocheError(
                "code.kernel_failed",
                f"the code interpreter in sandbox {entry.record.id} has not started within {START_SECONDS:g} seconds",
            ) from None

    async def _start(self, entry: Entry, guest: GuestClient) -> None:
        try:
            await start_service(guest, (code.BRIDGE,), entry.record.defaults.env)
        except ClocheError as error:
            if error.code != "template.bake_failed":
                raise
            raise ClocheError(
                "code.not_available",
                f"sandbox {entry.record.id} was made from {entry.record.template_name}, which has no code interpreter; "
                f"create one from the template {code.TEMPLATE}",
                details={"template": code.TEMPLATE},
            ) from None


class CodeStream:
    """The events of a run, in order; iterate once, and always `aclose`. The last one is a `CodeEnd`."""

    def __init__(self, entry: Entry, link: CodeLink, wanted: CodeRun, held: contextlib.ExitStack) -> None:
        self._entry = entry
        self._link = link
        self._wanted = wanted
        self._held = held
        self._first: CodeEvent | None = None

    async def begin(self, request: Mapping[str, Any]) -> None:
        """Sends the request and waits for its turn. Raises what keeps it from being run."""
        try:
            await self._link.send(request)
            while isinstance(first := await self._next(Patience(self._entry, SILENCE)), CodeAlive):
                pass
        except ConnectionError as error:
            raise await _lost(self._entry) from error
        if isinstance(first, CodeRefused):
            self._link.busy = False
            raise _refusal(first)
        if not isinstance(first, CodeStarted):
            raise code.nonsense("a run that has not started")
        self._first = first

    async def aclose(self) -> None:
        self._held.close()

    async def __aiter__(self) -> AsyncIterator[CodeEvent]:
        assert self._first is not None
        yield self._first
        #: Seconds that the guest has for itself: what a slow client takes is not counted.
        left = self._wanted.timeout + HOST_GRACE + KILL_SECONDS
        try:
            while True:
                patience = Patience(self._entry, min(SILENCE, max(left, 1.0)))
                event = await self._next(patience)
                left -= patience.passed
                if isinstance(event, CodeEnd):
                    self._link.busy = False
                    metrics.execs.labels(f"code_{event.status}").inc()
                    metrics.exec_seconds.observe(event.duration_ms / 1000)
                    yield event
                    return
                if isinstance(event, CodeRefused | CodeStarted):
                    raise code.nonsense("an event at a wrong place")
                if left <= 0:
                    raise _silent(self._entry)
                if not isinstance(event, CodeAlive):
                    yield event
        except ConnectionError as error:
            raise await _lost(self._entry) from error

    async def _next(self, patience: Patience) -> CodeEvent:
        """Raises `code.lost` when a machine that runs says nothing for too long."""
        try:
            async with patience:
                return code.event(await self._link.next())
        except TimeoutError:
            raise _silent(self._entry) from None


async def _lost(entry: Entry) -> ClocheError:
    told = await lost(entry, ClocheError("sandbox.unreachable", "the connection to the code interpreter broke"))
    if told.code == "exec.sandbox_gone":
        return told
    if told.code == "exec.suspended":
        why = "was hibernated while the code ran, which interrupts it; the state of its contexts is kept"
    else:
        why = "has lost its code interpreter; the next call starts it anew, without state"
    return ClocheError(
        "code.lost", f"sandbox {entry.record.id} {why}", details={"sandbox_status": entry.record.status.value}
    )


def _silent(entry: Entry) -> ClocheError:
    return ClocheError("code.lost", f"the code interpreter in sandbox {entry.record.id} does not answer")


def _context_not_found() -> ClocheError:
    return ClocheError("code.context_not_found", "there is no such context in the sandbox; it may have been deleted")


def _refusal(found: CodeRefused) -> ClocheError:
    reason = found.reason
    if reason == "no_context":
        return _context_not_found()
    if reason == "too_many":
        return ClocheError(
            "code.too_many_contexts",
            f"the sandbox has {code.MAX_CONTEXTS} contexts, those of the languages included, which is the limit; "
            "delete one first",
            details={"limit": code.MAX_CONTEXTS},
        )
    if reason == "busy":
        return ClocheError("sandbox.busy", "too many runs wait for this context; use others, or wait", retry_after=1)
    if reason == "not_waiting":
        return ClocheError("code.not_waiting", "no code of this context waits for input")
    if reason == "no_language":
        return ClocheError(
            "request.invalid",
            "the template of this sandbox has no kernel for the language; python and bash are always there",
            details={"field": "language"},
        )
    if reason == "no_user":
        return ClocheError("exec.user_not_found", "the user of the sandbox does not exist in it")
    if reason == "no_directory":
        return ClocheError(
            "exec.invalid_cwd",
            "the directory does not exist in the sandbox, or its user may not enter it",
            details={"field": "cwd"},
        )
    if reason == "start_failed":
        return ClocheError("code.kernel_failed", "the kernel could not be started; the sandbox may be short of memory")
    raise code.nonsense("a refusal of what was asked for rightly")
