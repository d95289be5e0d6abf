"""Commands: what a caller may ask to run, checked against the kernel's limits, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.records import ExecDefaults

#: Linux: one argument or environment string is at most 32 pages, its NUL included (MAX_ARG_STRLEN).
MAX_STRING: Final = 32 * 4096 - 1
#: Linux: arguments and environment together, a quarter of an 8 MiB stack, less what the kernel puts there.
MAX_TOTAL: Final = 2 * 1024 * 1024 - 16 * 1024
OUTPUT_LIMIT: Final = 10 * 1024 * 1024
STDIN_LIMIT: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Command:
    """One command. Exactly one of `shell` (for the login shell) and `argv`. `timeout` in seconds."""

    exec_id: str
    shell: str | None = None
    argv: Sequence[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    stdin: bytes | None = None
    timeout: float = 3600.0
    encoding: str = "utf-8"
    max_output: int = OUTPUT_LIMIT
    kill_on_limit: bool = False
    detach: bool = False


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended. `reason`: exited, signaled, timeout, oom, cancelled, output_limit, sandbox_gone. CPU times
    in milliseconds; `max_rss_kb` is the most that one of its processes had resident; `oom_kills` counts those
    that the kernel has killed for want of memory, also when the command went on. All is what the guest says."""

    exit_code: int
    reason: str
    duration_ms: float
    signal: str | None = None
    signal_number: int | None = None
    detail: str | None = None
    user_ms: float = 0.0
    system_ms: float = 0.0
    max_rss_kb: int = 0
    oom_kills: int = 0


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a finished command left. `*_head_bytes`: where base64 output has its gap."""

    exec_id: str
    end: CommandEnd
    stdout: str
    stderr: str
    encoding: str
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    stdout_head_bytes: int | None = None
    stderr_head_bytes: int | None = None


def timeout_told(timeout: float | None, end: CommandEnd) -> str:
    """What a caller is told of a command that its time limit has ended. One that starts anew what the kernel kills for
    want of memory, as pools of workers do, waits for its end until then: the limit is not what was wrong."""
    text = f"the command ran into its timeout of {timeout:g} s and was killed" if timeout else "timeout"
    if end.oom_kills:
        text += f"; {end.oom_kills} of its processes had been killed before, because there was no memory left"
    return text


def with_defaults(command: Command, defaults: ExecDefaults) -> dict[str, object]:
    """Environment, directory and user after the sandbox's own defaults have been laid under the caller's."""
    return {
        "env": {**defaults.env, **command.env},
        "cwd": command.cwd if command.cwd is not None else defaults.cwd,
        "user": command.user or defaults.user,
    }


def _too_large(what: str, size: int, limit: int, verb: str = "has") -> ClocheError:
    return ClocheError(
        "exec.too_large",
        f"{what} {verb} {size} bytes, the limit of the kernel is {limit}; write it to a file and run that",
        details={"field": what, "limit_bytes": limit, "bytes": size},
    )


def check_size(argv: Sequence[str] | None, shell: str | None, env: Mapping[str, str]) -> None:
    """Raises `exec.too_large` for what `execve` would refuse, `request.invalid` for what it cannot take.

    Source: execve(2), "Limits on size of arguments and environment".
    """
    total = 0
    named: list[tuple[str, str]] = [("cmd", shell)] if shell is not None else []
    named += [(f"argv[{index}]", word) for index, word in enumerate(argv or ())]
    for what, text in named:
        if "\0" in text:
            raise ClocheError("request.invalid", f"{what} holds a NUL character", details={"field": what})
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_STRING:
            raise _too_large(what, size, MAX_STRING)
        total += size + 1 + 8
    for name, value in env.items():
        _check_env(name, value)
        size = len(name.encode()) + 1 + len(value.encode("utf-8", "surrogatepass"))
        if size > MAX_STRING:
            raise _too_large(f"env.{name[:64]}", size, MAX_STRING)
        total += size + 1 + 8
    if total > MAX_TOTAL:
        raise _too_large("arguments and environment together", total, MAX_TOTAL, "have")


def _check_env(name: str, value: str) -> None:
    if not name or "=" in name or "\0" in name or not (name[0].isalpha() or name[0] == "_"):
        raise _bad_env()
    if not all(c.isalnum() or c in "_.-" for c in name) or not name.isascii():
        raise _bad_env()
    if "\0" in value:
        raise ClocheError(
            "request.invalid",
            f"the value of the variable {name[:64]} holds a NUL character",
            details={"field": "env"},
        )


def _bad_env() -> ClocheError:
    return ClocheError(
        "request.invalid",
        "the name of an environment variable must begin with a letter or _ and hold only letters, digits, _ . -",
        details={"field": "env"},
    )


def check_env(env: Mapping[str, str]) -> None:
    """The same checks for the environment of a sandbox."""
    check_size(None, None, env)
