"""Frozen records: what a sandbox, a template and a token are. No behaviour that does I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from cloche_server.core.lifecycle import Status
from cloche_server.core.network import NetworkPolicy, SecretGrant
from cloche_server.core.scopes import Scope
from cloche_server.core.walls import Walls, moved

#: Metadata keys with this prefix are write-only: they never come back in an answer.
SECRET_METADATA_PREFIX = "secret."  # noqa: S105 - the name of a prefix


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a machine that is fixed when its template is baked. `memory_mb` in MiB."""

    cpus: int
    memory_mb: int

    def __str__(self) -> str:
        return f"{self.cpus}c{self.memory_mb}m"


@dataclass(frozen=True, slots=True)
class Resources:
    """What one sandbox gets. Sizes in MiB."""

    cpus: int
    memory_mb: int
    disk_mb: int

    @property
    def shape(self) -> Shape:
        return Shape(self.cpus, self.memory_mb)


class BootMode(StrEnum):
    WARM = "warm"  # taken from the pool of restored and warmed machines
    LAUNCHED = "launched"  # taken from the pool of launched processes, restored now
    SNAPSHOT = "snapshot"  # process started and snapshot restored now
    FORK = "fork"  # continues from the memory of a running sandbox
    COLD = "cold"  # booted from its own disk
    WAKE = "wake"  # continues from its own memory, which was on disk


class IdleAction(StrEnum):
    """What happens to a sandbox in which nothing has been going on for a while."""

    PAUSE = "pause"
    HIBERNATE = "hibernate"
    STOP = "stop"
    DELETE = "delete"


class TerminationReason(StrEnum):
    VMM_DIED = "vmm_died"
    GUEST_SHUTDOWN = "guest_shutdown"
    TTL = "ttl"
    IDLE = "idle"
    MAX_LIFETIME = "max_lifetime"
    BUDGET = "budget"
    DELETED = "deleted"
    CREATE_FAILED = "create_failed"
    HOST_RESTART = "host_restart"


@dataclass(frozen=True, slots=True)
class Termination:
    """Why a sandbox ended. `at` is Unix seconds; `signal` a name such as SIGKILL."""

    reason: TerminationReason
    at: float
    signal: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Isolation:
    """The boundary a sandbox really has."""

    boundary: str = "microvm"
    vmm: str = "qemu"
    accel: str = "tcg"
    #: Its process has a user id, namespaces and a root of its own, and no privileges.
    jailed: bool = False


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process that outlives us: its pid and its start time (clock ticks since boot), so that a
    reused pid is never taken for it."""

    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class ExecDefaults:
    """What an exec gets when its caller says nothing: of the template, then of the sandbox."""

    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Furnishing:
    """What a template has beside its files: a service that is started before the snapshot and lives on in every
    sandbox, ready when something listens on its port; commands that are run after that; its sizes (0: as usual)."""

    service: tuple[str, ...] = ()
    service_port: int = 0
    warm: tuple[tuple[str, ...], ...] = ()
    memory_mb: int = 0
    min_memory_mb: int = 0


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One sandbox. `version` grows with every change of the record and guards its updates.

    Times are Unix seconds. `template` is the name the caller asked for, `template_name` the family it
    resolved to and `template_id` the baked template it runs on.
    """

    id: str
    workspace: str
    status: Status
    template: str
    template_name: str
    template_id: str
    resources: Resources
    isolation: Isolation
    defaults: ExecDefaults
    metadata: Mapping[str, str]
    created_at: float
    #: Unique among the living of its workspace.
    name: str | None = None
    ttl_seconds: int = 0
    persistent: bool = False
    expires_at: float | None = None
    started_at: float | None = None
    boot_ms: int = 0
    boot_mode: BootMode = BootMode.SNAPSHOT
    process: ProcessRef | None = None
    termination: Termination | None = None
    ended_at: float | None = None
    generation: int = 1
    version: int = 1
    #: The disk layer it writes to; empty for a sandbox of a server that knew no layers.
    layer_id: str = ""
    #: Whether its memory is a difference to nothing (booted from its disk) or to the memory of its template.
    cold: bool = False
    parent_id: str | None = None
    fork_tree_id: str | None = None
    snapshot_id: str | None = None
    #: The snapshot that was last taken of it, or that it last went on from.
    checkpoint_id: str | None = None
    #: After so many seconds without a command, a transfer or a call: `idle_action`. 0: never.
    idle_seconds: int = 0
    idle_action: IdleAction = IdleAction.HIBERNATE
    #: Why it is paused, hibernated or stopped: `asked`, `idle` or `budget`.
    status_reason: str | None = None
    #: The end that nothing moves, and what was asked for; 0: none.
    max_lifetime_seconds: int = 0
    ends_at: float | None = None
    walls: Walls = field(default_factory=Walls)
    #: CPU seconds that its first process had used before it was this sandbox's.
    cpu_origin: float = 0.0
    #: The budget that its usage counts against.
    account_id: str | None = None
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    grants: tuple[SecretGrant, ...] = ()
    #: Sandboxes of its workspace with the same one reach each other; `group_address`: where they see it, for its life.
    network_group: str | None = None
    group_address: str = ""

    @property
    def is_read(self) -> bool:
        """Whether HTTPS of it may be read on the host, so that programs in it must trust its workspace's authority."""
        return bool(self.grants) or any(rule.reads_http for rule in self.network.rules)

    @property
    def deadline(self) -> float | None:
        """When it is deleted, by its TTL or by its lifetime, whichever comes first."""
        return min((at for at in (self.expires_at, self.ends_at) if at is not None), default=None)


def with_status(record: Sandbox, status: Status, now: float, **changes: Any) -> Sandbox:
    """The record in another state, which it enters now."""
    return replace(record, status=status, walls=moved(record.walls, record.status, status, now), **changes)


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """An API token without its secret. `sandbox_id`: the only sandbox that exists for it."""

    prefix: str
    name: str
    workspace: str
    created_at: float
    revoked_at: float | None = None
    scope: Scope = Scope.ADMIN
    sandbox_id: str | None = None
    expires_at: float | None = None

    def ended(self, now: float) -> bool:
        """Whether it opens nothing any more."""
        return self.revoked_at is not None or (self.expires_at is not None and self.expires_at <= now)
