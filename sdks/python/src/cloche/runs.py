"""What is known of one-shot runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class RunStep:
    """The compiler, or the program. Times in milliseconds; `memory_kb` is the most that one of its processes had
    resident."""

    stdout: str
    stderr: str
    exit_code: int
    reason: str
    signal: str | None
    detail: str | None
    duration_ms: float
    cpu_ms: float
    memory_kb: int
    stdout_dropped_bytes: int
    stderr_dropped_bytes: int


@dataclass(frozen=True)
class RunResult:
    """How a program has ended. `status`: `ok`, `compile_error`, `runtime_error`, `timeout`, `out_of_memory`,
    `output_limit`; `verdict` when output was expected; no `program` when it could not be compiled."""

    status: str
    language: str
    template: str
    verdict: str | None
    program: RunStep | None
    compiler: RunStep | None
    timing_ms: Mapping[str, float]
    raw: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def stdout(self) -> str:
        """Of the program; empty when it was not run."""
        return "" if self.program is None else self.program.stdout

    @property
    def stderr(self) -> str:
        """Of the program, or of the compiler that refused it."""
        step = self.program or self.compiler
        return "" if step is None else step.stderr


@dataclass(frozen=True)
class RunFailure:
    """Why there is no result."""

    message: str
    code: str
    retryable: bool
    details: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A run that nobody waits for. `state`: `queued`, `running`, `done`, `lost`."""

    id: str
    state: str
    language: str
    created_at: datetime
    finished_at: datetime | None
    result: RunResult | None
    failure: RunFailure | None
    callback: str | None
    raw: Mapping[str, Any] = field(repr=False, default_factory=dict)


@dataclass(frozen=True)
class RunLanguage:
    """A language that programs may be in; `available` when the server has its template."""

    name: str
    title: str
    aliases: Sequence[str]
    compiled: bool
    template: str
    available: bool
