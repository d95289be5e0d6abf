"""What the client hands out: frozen records, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, AnyStr, Generic, Self, TypeVar, overload

from ._events import EventGap, SandboxEvent, WebhookInfo, WebhookTest
from .errors import ClocheError, CommandFailed

__all__ = [
    "EventGap",
    "ExecEvent",
    "ExecInfo",
    "ExecResult",
    "Exit",
    "FileEntry",
    "ForkResult",
    "Gap",
    "Isolation",
    "Lifecycle",
    "Load",
    "Promotion",
    "SandboxEvent",
    "SandboxInfo",
    "SandboxTermination",
    "SnapshotInfo",
    "Stderr",
    "Stdout",
    "Template",
    "Termination",
    "WebhookInfo",
    "WebhookTest",
    "WriteResult",
]


# --- commands


@dataclass(frozen=True, slots=True)
class Termination:
    """Why a command ended: `exited`, `signaled`, `timeout`, `oom`, `cancelled`, `output_limit` or `sandbox_gone`.
    `oom_kills`: processes of it that the kernel has killed for want of memory, also when the command went on."""

    reason: str = "exited"
    signal: str | None = None
    signal_number: int | None = None
    detail: str | None = None
    oom_kills: int = 0

    def __str__(self) -> str:
        words = {"oom": "out of memory", "output_limit": "output limit", "sandbox_gone": "sandbox gone"}
        text = words.get(self.reason, self.reason)
        more = f", {self.oom_kills} processes killed before for want of memory" if self.reason != "oom" else ""
        return (f"{text} ({self.signal})" if self.signal else text) + (more if self.oom_kills else "")


@dataclass(frozen=True, slots=True)
class ExecResult(Generic[AnyStr]):
    """A finished command. `stdout` and `stderr` are text, or bytes from the bytes variants.

    `exit_code` is 0-255, or 128 + signal for a command that was killed; `termination` tells which it was.
    `stdout_dropped_bytes` and `stderr_dropped_bytes` count what was over the output limit.
    """

    exec_id: str
    stdout: AnyStr
    stderr: AnyStr
    exit_code: int
    duration_ms: float = 0.0
    termination: Termination = field(default_factory=Termination)
    truncated: bool = False
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    stdout_head_bytes: int | None = None
    stderr_head_bytes: int | None = None

    @property
    def ok(self) -> bool:
        """The command exited by itself with code 0."""
        return self.exit_code == 0 and self.termination.reason == "exited"

    def check(self) -> Self:
        """Return the result, or raise `CommandFailed` if the command did not succeed."""
        if self.ok:
            return self
        if self.termination.reason == "exited":
            message = f"the command ended with exit code {self.exit_code}"
        else:
            message = f"the command was ended: {self.termination}, exit code {self.exit_code}"
        last = _last_line(self.stderr)
        error = CommandFailed(f"{message}: {last}" if last else message)
        error.result = self
        raise error


def _last_line(output: str | bytes) -> str:
    text = output[-1000:].decode("utf-8", "replace") if isinstance(output, bytes) else output[-1000:]
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""


@dataclass(frozen=True, slots=True)
class Stdout(Generic[AnyStr]):
    """A piece of standard output. `offset`: output position after it, where the server tells it."""

    data: AnyStr
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Stderr(Generic[AnyStr]):
    """A piece of error output."""

    data: AnyStr
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """`bytes` of output are missing at this point: over the output limit, or no longer kept by the server.

    `stream`: `stdout`, `stderr` or `both`.
    """

    bytes: int
    offset: int | None = None
    stream: str = "both"


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a command: always the last event of its stream."""

    exit_code: int
    duration_ms: float = 0.0
    termination: Termination = field(default_factory=Termination)
    truncated: bool = False
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0

    @property
    def ok(self) -> bool:
        """The command exited by itself with code 0."""
        return self.exit_code == 0 and self.termination.reason == "exited"


ExecEvent = Stdout[AnyStr] | Stderr[AnyStr] | Gap | Exit


@dataclass(frozen=True, slots=True)
class ExecInfo:
    """A command as the server lists it; `result` is there once it has finished."""

    exec_id: str
    running: bool
    pid: int | None = None
    result: ExecResult[str] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


# --- sandboxes


@dataclass(frozen=True, slots=True)
class Isolation:
    """`accel` is `kvm`, or `tcg` for software emulation; `jailed`: its process on the host has no rights."""

    boundary: str = ""
    vmm: str = ""
    accel: str = ""
    jailed: bool = False


@dataclass(frozen=True, slots=True)
class SandboxTermination:
    """Why a sandbox ended."""

    reason: str
    signal: str | None = None
    detail: str | None = None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as the server describes it. `raw` holds the whole answer.

    `status_reason` says why it is paused or hibernated: `asked`, `idle` or `budget`. `ends_at`: the end that no renewal
    moves. `parent_id` and `fork_tree_id` are those of a fork's child; `from_snapshot`: what it continued from.
    """

    id: str
    status: str
    template: str
    template_resolved: str
    template_id: str
    cpus: int
    memory_mb: int
    disk_mb: int
    isolation: Isolation
    metadata: Mapping[str, str] = field(default_factory=dict)
    env_keys: tuple[str, ...] = ()
    created_at: datetime | None = None
    started_at: datetime | None = None
    expires_at: datetime | None = None
    ends_at: datetime | None = None
    ttl_seconds: int = 0
    max_lifetime_seconds: int = 0
    persistent: bool = False
    boot_ms: float = 0.0
    boot_mode: str = ""
    termination: SandboxTermination | None = None
    name: str | None = None
    status_reason: str | None = None
    idle_seconds: int = 0
    idle_action: str = ""
    parent_id: str | None = None
    fork_tree_id: str | None = None
    from_snapshot: str | None = None
    network_group: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """When a sandbox ends. `ttl_seconds` 0 means never."""

    ttl_seconds: int
    persistent: bool
    idle_seconds: float = 0.0
    expires_at: datetime | None = None


Child = TypeVar("Child")


@dataclass(frozen=True, slots=True)
class ForkResult(Sequence[Child]):
    """The children of one fork: a sequence of those that live, at least one.

    `errors` says why the others do not, by their number from 0. `pause_ms`: how long the parent stood still.
    """

    children: tuple[Child, ...]
    tree_id: str
    parent_id: str
    errors: Mapping[int, ClocheError] = field(default_factory=dict)
    pause_ms: float = 0.0

    def __iter__(self) -> Iterator[Child]:
        return iter(self.children)

    def __len__(self) -> int:
        return len(self.children)

    @overload
    def __getitem__(self, index: int) -> Child: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Child, ...]: ...
    def __getitem__(self, index: int | slice) -> Child | tuple[Child, ...]:
        return self.children[index]


@dataclass(frozen=True, slots=True)
class Promotion:
    """What promoting a child did to its siblings: which were deleted, and why others could not be, by their ids."""

    winner: str
    tree_id: str
    deleted: tuple[str, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot as the server describes it. `raw` holds the whole answer.

    `memory`: it holds memory and processes; else the disk only. `size_bytes` is that of memory and device state,
    `disk_bytes` that of all its disk layers, which others may share.
    """

    id: str
    sandbox_id: str
    name: str | None = None
    template: str = ""
    template_resolved: str = ""
    template_id: str = ""
    cpus: int = 0
    memory_mb: int = 0
    disk_mb: int = 0
    memory: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int = 0
    disk_bytes: int = 0
    parent_snapshot_id: str | None = None
    created_at: datetime | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class SnapshotLineage:
    """`ancestors`: nearest first. `missing_ancestor_id`: the one above the last of them, which was deleted. `children`
    were taken next, of what went on from it; `sandboxes`: ids of the living that have gone on from it. `raw` holds the
    whole answer."""

    ancestors: Sequence[SnapshotInfo]
    children: Sequence[SnapshotInfo]
    sandboxes: Sequence[str]
    missing_ancestor_id: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Load:
    """What runs in a sandbox now, as its guest tells. `raw` holds the whole answer."""

    cpu_ms: float
    memory_bytes: int
    memory_limit_bytes: int
    processes: int
    disk_used_bytes: int
    disk_bytes: int
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Template:
    """What a sandbox can be made from."""

    name: str
    state: str
    aliases: tuple[str, ...] = ()
    description: str = ""
    cpus: int = 0
    memory_mb: int = 0
    disk_mb: int = 0
    size_bytes: int = 0
    created_at: datetime | None = None
    #: All workspaces may use it; False: this one has promoted it.
    is_global: bool = True
    from_snapshot: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


# --- files


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file, directory, link or other entry. Links are not followed.

    A name that is not UTF-8 holds surrogate escapes; `path` can be passed back to every file call as it is.
    """

    name: str
    path: str
    type: str
    size: int
    mode: int
    mtime_ns: int
    uid: int
    gid: int
    owner: str
    group: str
    target: str | None = None

    @property
    def is_dir(self) -> bool:
        """A directory; never true for a link to one."""
        return self.type == "dir"

    @property
    def is_file(self) -> bool:
        """A regular file; never true for a link to one."""
        return self.type == "file"

    @property
    def is_symlink(self) -> bool:
        """A symbolic link; `target` says where to."""
        return self.type == "symlink"

    @property
    def mtime(self) -> float:
        """Seconds since the epoch."""
        return self.mtime_ns / 1e9


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a write did. `bytes` counts what the server received."""

    path: str
    bytes: int
    created: bool
    etag: str | None = None
