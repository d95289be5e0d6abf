"""Runs over a host in memory: what would be done in a guest is a function of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from app_host import Host

from cloche_server.app.run_jobs import RunJobs
from cloche_server.app.runs import Runs
from cloche_server.core.command import Command, CommandEnd, CommandResult
from cloche_server.core.languages import LANGUAGES
from cloche_server.core.runs import RunRequest
from cloche_server.host.outbound import Sender
from cloche_server.store.runs import RunStore

Program = Callable[[Command], Awaitable[CommandResult]]


def ended(stdout: str = "", code: int = 0, reason: str = "exited") -> CommandResult:
    end = CommandEnd(code, reason, 12.0, user_ms=3.0, system_ms=1.0, max_rss_kb=9000)
    return CommandResult("x", end, stdout, "", "utf-8")


async def hello(command: Command) -> CommandResult:
    return ended("hello\n")


@dataclass
class Guests:
    """Stands for `Execs` and `Files`. `files` by sandbox and path; `commands` in their order."""

    program: Program = hello
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)

    async def run(self, workspace: str, sandbox_id: str, command: Command) -> CommandResult:
        self.commands.append(command)
        return await self.program(command)

    async def write(
        self, workspace: str, sandbox_id: str, path: str, body: AsyncIterator[bytes], options: Any, user: str | None
    ) -> None:
        data = b"".join([part async for part in body])
        assert len(data) == options.length
        self.files.setdefault(sandbox_id, {})[path] = data


def runs_on(host: Host, guests: Guests, settings: Any, cpus: int = 1) -> Runs:
    catalog: Any = host.creator._catalog
    return Runs(settings, catalog, host.creator, guests, guests, host.lifecycle, cpus)  # type: ignore[arg-type]


def jobs_on(host: Host, runs: Runs, group: Any) -> RunJobs:
    return RunJobs(runs, RunStore(host.database), Sender(private=True), host.clock, group, 24.0)


def request(language: str = "python", source: str = "print('hello')", **changes: Any) -> RunRequest:
    return RunRequest(LANGUAGES[language], source, **changes)


async def forever(command: Command) -> CommandResult:
    await asyncio.Event().wait()
    raise AssertionError
