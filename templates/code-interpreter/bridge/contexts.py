"""Contexts: each has a language, a kernel and a queue of cells, and gets a new kernel when its own has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import zmq
from accounts import account
from kernels import Died, Kernel, Zygote, clock, oom_kills
from languages import LANGUAGES, languages
from outbox import Outbox
from zygote import NO_DIRECTORY

MAX_CONTEXTS = 24
MAX_QUEUED = 32
#: A cell that was interrupted has so many seconds to end, then its kernel is killed.
GRACE = 5.0
#: In the meantime it is interrupted again (seconds).
AGAIN = 1.0
#: Shows something as a cell does that people run, and leaves no name behind.
PRACTICE = "__import__('IPython.display').display.display(1 + 1)"
_SIGNALS = {number.value: number.name for number in signal.Signals}


class Refused(Exception):
    """What was asked for is not done; `reason` is a word of the protocol."""

    def __init__(self, reason: str, **details: Any) -> None:
        super().__init__(reason)
        self.details = {"reason": reason, **details}


class Context:
    def __init__(self, owner: Contexts, context_id: str, language: str, request: dict[str, Any]) -> None:
        self.id = context_id
        self.language = language
        self.created = time.time()
        self.cwd = request.get("cwd")
        self.cells = 0
        self.queued = 0
        self.deleted = False
        self._owner = owner
        self._user = request.get("user")
        self._base = request.get("base") or {}
        #: The directory that its kernel, which is there already, has to go to first.
        self._home: str | None = None
        self._lock = asyncio.Lock()
        self._kernel: Kernel | None = None
        #: Why the present cell is ended from outside: restarted, deleted or interrupted.
        self._stopped = ""

    @property
    def user(self) -> str | None:
        return self._user

    def go_to(self, home: str | None) -> None:
        """Before its first cell."""
        self.cwd = self._home = home

    def describe(self) -> dict[str, Any]:
        kernel = self._kernel
        state = "busy" if self._lock.locked() else "idle" if kernel is not None and not kernel.dead else "not_started"
        return {
            "id": self.id, "language": self.language, "cwd": self.cwd, "created_at": self.created, "state": state,
            "cells": self.cells, "execution_count": kernel.count if kernel is not None else 0, "queued": self.queued,
        }  # fmt: skip

    # ------------------------------------------------------------ kernel

    async def ready(self, *, strict: bool = False) -> Kernel:
        """Raises `Refused`, with `strict` also when its directory cannot be entered."""
        if self._kernel is not None and not self._kernel.dead:
            return self._kernel
        if self._kernel is not None:
            await self._kernel.aclose()
        self._kernel = Kernel(self._owner.zygote, self._owner.sockets, self._owner.root, LANGUAGES[self.language])
        try:
            await self._kernel.start(user=self._user, env=self._base, cwd=self.cwd, strict=strict)
        except KeyError:
            raise Refused("no_user") from None
        except (Died, TimeoutError) as error:
            status = getattr(error, "status", None)
            raise Refused("no_directory" if strict and status == NO_DIRECTORY else "start_failed") from None
        return self._kernel

    async def interrupt(self) -> bool:
        if self._kernel is None or not self._lock.locked():
            return False
        self._stopped = self._stopped or "interrupted"
        await self._kernel.interrupt()
        return True

    async def restart(self) -> None:
        self._stopped = "restarted"
        if self._kernel is not None:
            await self._kernel.kill()
        async with self._lock:
            await self.ready()

    async def delete(self) -> None:
        self.deleted, self._stopped = True, "deleted"
        if self._kernel is not None:
            await self._kernel.kill()
        async with self._lock:
            if self._kernel is not None:
                await self._kernel.aclose()

    async def answer(self, text: str) -> bool:
        return self._kernel is not None and await self._kernel.answer(text)

    # ------------------------------------------------------------ cells

    async def run(self, request: dict[str, Any], out: Outbox, gone: asyncio.Future[None]) -> None:
        """Ends `out` with `end`, or raises `Refused` when nothing was run."""
        if self.queued >= MAX_QUEUED:
            raise Refused("busy", limit=MAX_QUEUED)
        self.queued += 1
        try:
            async with self._lock:
                self.queued -= 1
                try:
                    if gone.done():
                        return
                    if self.deleted:
                        raise Refused("no_context")
                    self._base = {**self._base, **(request.get("base") or {})}
                    await self._run(await self.ready(), request, out, gone)
                finally:
                    self.queued += 1
        finally:
            self.queued -= 1

    async def practise(self) -> None:
        async with self._lock:
            kernel = await self.ready()
            await kernel.execute(PRACTICE, lambda *_: None, extra={}, stdin=False, stored=False)

    async def _run(self, kernel: Kernel, request: dict[str, Any], out: Outbox, gone: asyncio.Future[None]) -> None:
        self._stopped = ""
        self.cells += 1
        began, kills = clock(), oom_kills()
        cell = Cell(out)
        out.pressure = kernel.pause
        out.event({"type": "started", "context": self.id, "language": self.language}, waits=True)
        extra = {
            "base": self._base,
            "env": request.get("env") or {},
            "cwd": request.get("cell_cwd"),
            "home": self._home,
        }
        self._home = None
        work = asyncio.create_task(
            kernel.execute(request["code"], cell.take, extra=extra, stdin=bool(request.get("input")))
        )
        status, lost, code = await self._watch(kernel, work, began + request["timeout_ms"] / 1000, gone)
        if status == "killed" and code == -signal.SIGKILL and oom_kills() > kills:
            status = "oom"
        out.pressure = None
        reply = work.result() if work.done() and not work.cancelled() and work.exception() is None else {}
        if not status:
            status = {"ok": "ok", "error": "error"}.get(reply.get("status", ""), "interrupted")
            if status == "error" and self._stopped == "interrupted":
                status = "interrupted"
        cell.finish(reply)
        end = {
            "type": "end", "status": status, "execution_count": reply.get("execution_count") or kernel.count,
            "duration_ms": round((clock() - began) * 1000, 1), "state_lost": lost, "cause": self._stopped,
        }  # fmt: skip
        if code is not None:
            end.update({"exit_code": code} if code >= 0 else {"signal": _SIGNALS.get(-code, str(-code))})
        out.end(end)
        if lost and not self.deleted:
            self._owner.later(self._again())

    async def _again(self) -> None:
        """A new kernel before somebody asks for it."""
        async with self._lock:
            with contextlib.suppress(Refused):
                await self.ready()

    async def _watch(
        self, kernel: Kernel, work: asyncio.Task[Any], deadline: float, gone: asyncio.Future[None]
    ) -> tuple[str, bool, int | None]:
        """Status ("" for that of the reply), whether the kernel has ended, and how."""
        why = ""
        while True:
            waits: set[asyncio.Future[Any]] = {work} if why else {work, gone}
            left_over = max(0.0, deadline - clock())
            pause = min(left_over, AGAIN) if why else left_over
            await asyncio.wait(waits, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                break
            if why and clock() < deadline:
                # A cell that had not quite begun has not felt the first one.
                await kernel.interrupt()
                continue
            if why:
                await kernel.kill()
                await asyncio.wait({work})
                return why, True, None
            why = "interrupted" if gone.done() else "timeout"
            deadline = clock() + GRACE
            await kernel.interrupt()
        error = work.exception()
        if isinstance(error, Died):
            # What it has still sent is on its way.
            await asyncio.sleep(0.05)
            return why or "killed", True, error.status
        if error is not None:
            raise error
        return why, False, None


class Cell:
    """Translates what a kernel says of one cell. The exception comes last, behind figures that are shown after it."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._error: dict[str, Any] | None = None

    def take(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            self._out.text("stderr" if content.get("name") == "stderr" else "stdout", str(content.get("text", "")))
        elif kind in {"display_data", "execute_result", "update_display_data"}:
            self._out.result(bundle(content.get("data") or {}), kind == "execute_result")
        elif kind == "error":
            trace = "\n".join(str(line) for line in content.get("traceback") or ())
            self._error = {
                "type": "error", "name": str(content.get("ename", ""))[:1000],
                "message": str(content.get("evalue", ""))[:100_000], "traceback": trace[:1_000_000],
            }  # fmt: skip
        elif kind == "input_request":
            self._out.event(
                {
                    "type": "input",
                    "prompt": str(content.get("prompt", ""))[:10_000],
                    "password": bool(content.get("password")),
                }
            )

    def finish(self, reply: dict[str, Any]) -> None:
        told = reply.get("cloche")
        if isinstance(told, dict) and isinstance(told.get("result"), dict):
            self._out.result(bundle(told["result"]), True)
        for payload in reply.get("payload") or ():
            if isinstance(payload, dict) and payload.get("source") == "page":
                self._out.result(bundle(payload.get("data") or {}), False)
        if self._error is None and reply.get("status") == "error":
            self.take("error", reply)
        if self._error is not None:
            self._out.event(self._error)


def bundle(data: dict[str, Any]) -> dict[str, str]:
    """All values as text: JSON as JSON text."""
    found = {}
    for mime, value in list(data.items())[:32]:
        if isinstance(value, list) and all(isinstance(part, str) for part in value) and not mime.endswith("json"):
            value = "".join(value)
        is_text = isinstance(value, str) and not mime.endswith("json")
        found[str(mime)[:200]] = (
            value.rstrip("\n") if is_text and mime.startswith("image/") else value if is_text else json.dumps(value)
        )
    return found


class Contexts:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.zygote = Zygote()
        self.sockets = zmq.Context[Any]()
        self._contexts: dict[str, Context] = {}
        self._later: set[asyncio.Task[None]] = set()

    def later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def start(self) -> None:
        """With a first kernel that has run a cell already."""
        await self.zygote.start()
        kernel = await self._default("python", {}).ready()
        warm = "import sys\nassert 1 + 1 == 2\n"
        await kernel.execute(warm, lambda *_: None, extra={}, stdin=False, silent=True)

    async def practise(self) -> None:
        """A cell in the first kernel, of which nothing stays but caches: for a machine that nobody is in yet."""
        found = self._contexts.get("python")
        if found is not None and not found.cells:
            await found.practise()

    def _default(self, language: str, request: dict[str, Any]) -> Context:
        """The context that a language has without being asked for one; its id is the name of the language."""
        found = self._contexts.get(language)
        if found is not None:
            return found
        return self._add(language, language, {**request, "cwd": request.get("home")})

    def _add(self, context_id: str, language: str, request: dict[str, Any]) -> Context:
        if language not in languages():
            raise Refused("no_language", languages=languages())
        if len(self._contexts) >= MAX_CONTEXTS:
            raise Refused("too_many", limit=MAX_CONTEXTS)
        made = self._contexts[context_id] = Context(self, context_id, language, request)
        return made

    def find(self, context_id: str) -> Context:
        found = self._contexts.get(context_id)
        if found is None:
            raise Refused("no_context")
        return found

    async def chosen(self, request: dict[str, Any]) -> Context:
        """The context of a run."""
        if request.get("context"):
            if request["context"] in LANGUAGES:
                return await self._mine(request["context"], request)
            return self.find(request["context"])
        return await self._mine(request.get("language") or "python", request)

    async def _mine(self, language: str, request: dict[str, Any]) -> Context:
        """That of a language, as the user that the sandbox runs commands as, and in its directory."""
        found = self._contexts.get(language)
        if found is not None and not found.cells and not _is_same(found.user, request.get("user")):
            # The one from before the snapshot, which has been of no use to anybody yet.
            del self._contexts[language]
            await found.delete()
        elif found is not None and not found.cells:
            found.go_to(request.get("home"))
        return self._default(language, request)

    async def create(self, request: dict[str, Any]) -> Context:
        cwd = request.get("cwd") or request.get("home")
        made = self._add(os.urandom(8).hex(), request.get("language") or "python", {**request, "cwd": cwd})
        try:
            await made.ready(strict=request.get("cwd") is not None)
        except BaseException:
            self._contexts.pop(made.id, None)
            raise
        return made

    async def delete(self, context_id: str) -> None:
        await self.find(context_id).delete()
        self._contexts.pop(context_id, None)

    def list(self) -> list[dict[str, Any]]:
        return [context.describe() for context in self._contexts.values()]

    async def aclose(self) -> None:
        for context in self._contexts.values():
            await context.delete()
        await self.zygote.aclose()


def _is_same(one: str | None, other: str | None) -> bool:
    """Whether two spellings mean one user and group. Raises `Refused`."""
    try:
        return account(one) == account(other)
    except KeyError:
        raise Refused("no_user") from None
