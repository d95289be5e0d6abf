"""Requests to the agent and its answers, as the rest of the server sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ..core.network import GuestNetwork
from .frames import Exit

EntryType: TypeAlias = Literal["file", "dir", "symlink", "fifo", "socket", "block", "char", "unknown"]
ENTRY_TYPES: Final[tuple[EntryType, ...]] = (
    "file",
    "dir",
    "symlink",
    "fifo",
    "socket",
    "block",
    "char",
    "unknown",
)


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """`uptime_ms` of the guest's kernel; sizes in MiB."""

    generation: int
    version: str
    boot_id: str
    pid: int
    uptime_ms: float
    cpus: int
    memory_mb: int
    disk_mb: int
    execs_running: int


@dataclass(frozen=True, slots=True)
class RenewRequest:
    """What a machine gets after a restore. None or false: leave as it is.

    `entropy`: 32 to 512 bytes. `time_ns`: Unix time; `time_now` instead takes the host's clock at the
    moment the request goes out, when a reconnect may have taken a while. `network`: sets the card up if it is not, and
    ends all TCP connections with other machines. `ca_pem`: certificate of an authority that programs in the guest are
    to trust. `thaw`: as the last step, as `GuestClient.thaw` with `keep`.
    """

    entropy: bytes | None = None
    time_ns: int | None = None
    time_now: bool = False
    hostname: str | None = None
    machine_id: str | None = None
    ca_pem: str | None = None
    grow_disk: bool = False
    warm: bool = False
    thaw: bool = False
    network: GuestNetwork | None = None


@dataclass(frozen=True, slots=True)
class RenewResult:
    """`steps`: milliseconds of each step that was done. `disk_mb`: size of the root file system."""

    steps: Mapping[str, float]
    disk_mb: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Load of the machine; `cpu_ms` since its boot."""

    cpu_ms: float
    memory_bytes: int
    memory_limit_bytes: int
    processes: int
    disk_used_bytes: int
    disk_bytes: int
    oom_kills: int


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """A command to run; exactly one of `argv` and `shell`.

    `timeout_ms` and `max_output` (bytes per stream): 0 means none. `stdin` None: no input (EOF at once).
    """

    id: str
    argv: Sequence[str] | None = None
    shell: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    stdin: bytes | None = None
    timeout_ms: int = 0
    detach: bool = False
    max_output: int = 0
    kill_on_limit: bool = False
    rlimits: Mapping[str, int] = field(default_factory=dict)
    #: See docs/agent-protocol.md, §3.6.
    keep_stdin: bool = False
    pty: tuple[int, int] | None = None
    tools: bool = False
    #: Of attached commands: empty or "hangup".
    on_lost: str = ""
    #: Of detached commands.
    record_bytes: int = 0
    linger_ms: int = 0
    tag: str = ""


@dataclass(frozen=True, slots=True)
class ExecInfo:
    """One command the agent knows. `exit` is there when it has ended; `offset`: bytes of output so far, of which
    those from `first` on are kept. `pty`: columns and rows. `stdin`: none, pipe, closed or pty."""

    id: str
    pid: int
    running: bool
    started_ns: int
    detach: bool
    exit: Exit | None
    offset: int
    first: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdin: str = "none"
    pty: tuple[int, int] | None = None
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Execs:
    """All commands that the agent knows. `boot_id` is another one after each start of the machine."""

    boot_id: str
    execs: Sequence[ExecInfo]


@dataclass(frozen=True, slots=True)
class GuestProcess:
    """One process of the guest. Text as the guest says it; `command` is cut."""

    pid: int
    ppid: int
    uid: int
    user: str
    state: str
    cpu_ms: float
    rss_kb: int
    started_ns: int
    name: str
    command: str
    exec_id: str | None


@dataclass(frozen=True, slots=True)
class Written:
    """What a process has taken of its input. `closed`: it takes no more."""

    bytes: int
    closed: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory. `raw_name` is exact; `name` has U+FFFD where that is not UTF-8."""

    name: str
    raw_name: bytes
    path: str
    type: EntryType
    size: int
    mode: int
    mtime_ns: int
    uid: int
    gid: int
    owner: str
    group: str
    target: str | None


@dataclass(frozen=True, slots=True)
class DirListing:
    """Entries in the order of their raw names. `next`: pass it as `after` to go on, None at the end."""

    path: str
    entries: Sequence[Entry]
    next: bytes | None

    @property
    def truncated(self) -> bool:
        return self.next is not None


@dataclass(frozen=True, slots=True)
class WriteResult:
    """`bytes` written; `created` is false when a file was replaced or appended to."""

    path: str
    bytes: int
    created: bool
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class ListeningPort:
    """A TCP socket that listens in the guest. `pid` 0 and `process` empty: it is not known whose it is."""

    port: int
    address: str
    pid: int = 0
    process: str = ""
