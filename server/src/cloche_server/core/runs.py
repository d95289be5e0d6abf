"""One-shot runs: what is asked for, and what came of it. Records and rules, without any I/O."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final

from cloche_server.core.command import CommandEnd, CommandResult
from cloche_server.core.languages import Language
from cloche_server.core.network import NetworkPolicy

#: Bytes of the source, all files and the input together.
MAX_INPUT: Final = 32 * 1024 * 1024
MAX_FILES: Final = 200
MAX_OUTPUT: Final = 10 * 1024 * 1024
MAX_BATCH: Final = 100


class RunState(Enum):
    """Of a run that is asked for without waiting. `lost`: the server ended while it ran; it is not run again, because
    it may have had effects."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    LOST = "lost"


class Compare(Enum):
    """How output is compared: byte by byte; without white space at the ends of lines and of the whole; or only the
    words, whatever stands between them."""

    EXACT = "exact"
    TRIM = "trim"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class RunFile:
    """`path` is relative to the directory of the source."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Times in seconds, `max_output` in bytes of each stream. `template`, `cpus`, `memory_mb`: None is what the
    language needs."""

    language: Language
    source: str
    files: tuple[RunFile, ...] = ()
    stdin: bytes = b""
    args: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 10.0
    compile_timeout: float = 60.0
    template: str | None = None
    cpus: int | None = None
    memory_mb: int | None = None
    network: NetworkPolicy | None = None
    expected: str | None = None
    compare: Compare = Compare.TRIM
    max_output: int = 1024 * 1024
    encoding: str = "utf-8"


@dataclass(frozen=True, slots=True)
class RunStep:
    """One command of a run: the compiler, or the program. Times in milliseconds; `memory_kb` is the most that one of
    its processes had resident."""

    exit_code: int
    reason: str
    stdout: str
    stderr: str
    stdout_dropped: int
    stderr_dropped: int
    duration_ms: float
    user_ms: float
    system_ms: float
    memory_kb: int
    signal: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """`status`: `ok`, `compile_error`, `runtime_error`, `timeout`, `out_of_memory`, `output_limit`. `verdict` only
    where output was expected: `accepted`, `wrong_answer`, or the status. `timing`: milliseconds by phase."""

    status: str
    language: str
    template: str
    program: RunStep | None = None
    compiler: RunStep | None = None
    verdict: str | None = None
    timing: Mapping[str, float] = field(default_factory=dict)


def step_of(result: CommandResult) -> RunStep:
    end = result.end
    return RunStep(
        exit_code=end.exit_code,
        reason=end.reason,
        stdout=result.stdout,
        stderr=result.stderr,
        stdout_dropped=result.stdout_dropped,
        stderr_dropped=result.stderr_dropped,
        duration_ms=end.duration_ms,
        user_ms=end.user_ms,
        system_ms=end.system_ms,
        memory_kb=end.max_rss_kb,
        signal=end.signal,
        detail=end.detail,
    )


_BY_REASON: Final = {"timeout": "timeout", "oom": "out_of_memory", "output_limit": "output_limit"}


def status_of(end: CommandEnd | RunStep) -> str:
    """What a caller is told of a program that ended so."""
    if end.reason in _BY_REASON:
        return _BY_REASON[end.reason]
    return "ok" if end.reason == "exited" and end.exit_code == 0 else "runtime_error"


def verdict_of(status: str, stdout: str, expected: str | None, how: Compare) -> str | None:
    """None where nothing was expected."""
    if expected is None:
        return None
    if status != "ok":
        return status
    return "accepted" if agrees(stdout, expected, how) else "wrong_answer"


def agrees(output: str, expected: str, how: Compare) -> bool:
    """Whether the output is what was expected."""
    if how is Compare.EXACT:
        return output == expected
    if how is Compare.TOKENS:
        return output.split() == expected.split()
    return _trimmed(output) == _trimmed(expected)


def _trimmed(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def relative_path(path: str) -> str:
    """The path of a file beside the source. Raises ValueError with a sentence."""
    if not path or "\0" in path or path.startswith("/") or len(path.encode()) > 1024:
        raise ValueError("the path of a file must be relative, not empty, and at most 1024 bytes long")
    normal = posixpath.normpath(path)
    if normal in {".", ".."} or normal.startswith("../"):
        raise ValueError("the path of a file must stay below the directory of the source")
    return normal


def result_to_json(result: RunResult) -> dict[str, Any]:
    """The whole result; `result_from_json` turns it back."""
    return asdict(result)


def result_from_json(data: Mapping[str, Any]) -> RunResult:
    """Raises TypeError, KeyError for what `result_to_json` has not written."""
    steps = {name: RunStep(**data[name]) if data[name] is not None else None for name in ("program", "compiler")}
    return RunResult(**{**data, **steps})


class CallbackState(Enum):
    """Of the receiver that is to be told of the end."""

    NONE = "none"
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that nobody waits for. `outcome` is what a caller is answered: a result or an error, as JSON. Times are
    Unix seconds."""

    id: str
    workspace: str
    state: RunState
    language: str
    created_at: float
    finished_at: float | None = None
    outcome: Mapping[str, Any] | None = None
    callback_url: str | None = None
    callback_secret: str | None = field(default=None, repr=False)
    callback_state: CallbackState = CallbackState.NONE
    callback_error: str | None = None
