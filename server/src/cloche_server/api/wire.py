"""Request and answer types of the API. Nothing outside `api/` knows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    Field,
    StrictBool,
    StrictInt,
    StringConstraints,
    model_validator,
)

from cloche_server.api.wire_base import Seconds as Seconds
from cloche_server.api.wire_base import Wire as Wire
from cloche_server.api.wire_network import GrantAnswer, GrantBody, GroupName, NetworkBody
from cloche_server.api.wire_usage import BudgetBody
from cloche_server.core.command import OUTPUT_LIMIT, STDIN_LIMIT
from cloche_server.core.expiry import MAX_TTL_SECONDS

#: Permission bits in octal, as in the query of a write.
MODE = r"^0?[0-7]{1,4}$"
SANDBOX_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_NO_NUL = r"^[^\x00]*$"
_NO_CONTROLS = r"^[^\x00-\x1f\x7f]*$"

Text = Annotated[str, StringConstraints(strict=True)]
#: Checked by hand, for a better sentence; this is for the document.
Path = Annotated[Text, Field(json_schema_extra={"pattern": r"^/[^\x00]*$", "maxLength": 4095})]
Argument = Annotated[Text, Field(json_schema_extra={"pattern": _NO_NUL})]
ShortText = Annotated[str, StringConstraints(strict=True, max_length=256)]
Name = Annotated[str, StringConstraints(strict=True, pattern=SANDBOX_NAME)]
User = Annotated[str, StringConstraints(strict=True, max_length=256, pattern=_NO_CONTROLS)]
Cwd = Annotated[str, StringConstraints(strict=True, max_length=4095, pattern=_NO_NUL)]
MetadataKey = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128)]
MetadataValue = Annotated[str, StringConstraints(strict=True, max_length=4096)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=64)]
Env = Annotated[
    dict[Text, Argument],
    Field(max_length=4096, json_schema_extra={"propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_.-]*$"}}),
]

Ttl = Annotated[StrictInt, Field(ge=0, le=MAX_TTL_SECONDS)]
#: Longest life: the same range as a TTL.
LIFETIME = "Deleted so long after its creation, whatever is renewed, resumed or started; 0 = never."


# ------------------------------------------------------------------ requests


class IsolationBody(Wire):
    minimum: Literal["any", "microvm", "microvm-kvm"] = Field(
        "any", description="Refuse to create with a weaker isolation than this."
    )


class CreateBody(Wire):
    template: ShortText = Field("base", description="Name or alias of a template.")
    name: Name | None = Field(None, description="Unique among the living of the workspace.")
    if_exists: Literal["error", "connect", "replace"] = Field(
        "error",
        description="When the name is in use: 409; or the sandbox that has it, awake, and nothing else of this body "
        "counts; or that one is deleted first.",
    )
    from_snapshot: ShortText | None = Field(
        None, description="Id of a snapshot to continue from; template and sizes are then its own."
    )
    cpus: Annotated[StrictInt, Field(ge=1, le=1024)] | None = Field(
        None, validation_alias=AliasChoices("cpus", "cpu", "vcpus"), description="vCPUs."
    )
    memory_mb: Annotated[StrictInt, Field(ge=128, le=16_777_216)] | None = Field(None, description="Memory in MiB.")
    disk_mb: Annotated[StrictInt, Field(ge=1, le=16_777_216)] | None = Field(None, description="Disk in MiB.")
    disk_gb: Annotated[StrictInt, Field(ge=1, le=16_384)] | None = Field(None, description="Disk in GiB.")
    ttl_seconds: Ttl | None = Field(
        None, description="Deleted this long after creation; 0 = never. Default: the server's."
    )
    persistent: StrictBool = Field(False, description="No TTL at all.")
    max_lifetime_seconds: Ttl = Field(0, description=LIFETIME)
    budget: BudgetBody | None = Field(None, description="What it may use.")
    idle_seconds: Ttl = Field(
        0, description="After so long without a command, a transfer or a call: `idle_action`; 0 = never."
    )
    idle_action: Literal["pause", "hibernate", "stop", "delete"] = Field("hibernate", description="What happens then.")
    metadata: Metadata = Field(default_factory=dict, description="Labels. Keys `secret.*` are never shown again.")
    env: Env = Field(default_factory=dict, description="Environment of every command.")
    cwd: Cwd | None = Field(
        None, description="Working directory of commands; absolute.", json_schema_extra={"pattern": "^/"}
    )
    user: User | None = Field(None, description="User of commands: name, number, `name:group` or `uid:gid`.")
    volumes: list[Any] | None = Field(None, description="Not available in this release: a non-empty list answers 501.")
    secrets: Annotated[list[GrantBody], Field(max_length=64)] = Field(
        default_factory=list, description="Secrets of the workspace that it may use without knowing them."
    )
    network: NetworkBody | None = Field(
        None, description="What it may reach; default: that of the snapshot, else what the operator has set."
    )
    network_group: GroupName | None = Field(None, description="Reaches the workspace's sandboxes with the same one.")
    minimum_boundary: Literal["any", "microvm", "microvm-kvm"] = Field(
        "any", description="Refuse to create with a weaker isolation than this."
    )
    isolation: IsolationBody | None = Field(None, description="`minimum` is the same as `minimum_boundary`.")


class ExecBody(Wire):
    cmd: Argument | list[Argument] | None = Field(None, description="A string for the login shell, or an argv list.")
    argv: list[Argument] | None = Field(None, description="Program and arguments, no shell.")
    env: Env = Field(default_factory=dict, description="Laid over the environment of the sandbox.")
    cwd: Cwd | None = Field(None, description="Absolute; default: the sandbox's.", json_schema_extra={"pattern": "^/"})
    user: User | None = Field(None, description="Name, number, `name:group` or `uid:gid`; default: the sandbox's.")
    stdin: Annotated[str, StringConstraints(strict=True, max_length=STDIN_LIMIT)] | None = Field(
        None,
        description="Input; without it the command sees end of file. With `stdin_base64` true it is base64.",
    )
    stdin_base64: StrictBool = Field(False, description="`stdin` is base64.")
    timeout_seconds: Seconds | None = Field(None, description="0 or absent: the server's default.")
    encoding: Literal["utf-8", "base64"] = Field("utf-8", description="How output is written in the answer.")
    max_output_bytes: Annotated[StrictInt, Field(ge=1024, le=OUTPUT_LIMIT)] = Field(
        OUTPUT_LIMIT, description="Kept of each stream: head and tail."
    )
    on_output_limit: Literal["truncate", "kill"] = Field(
        "truncate", description="`kill` ends the command with the reason `output_limit`."
    )
    detach: StrictBool = Field(False, description="A hang-up leaves the command running.")
    background: StrictBool = Field(False, description="Answer 202 at once; implies `detach`.")
    exec_id: Annotated[str, StringConstraints(strict=True, pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")] | None = Field(
        None, description="Chosen by the caller; one that is in use answers 409."
    )
    keepalive: StrictBool = Field(False, description="Start the answer with white space when the command takes long.")

    @model_validator(mode="after")
    def _one_command(self) -> ExecBody:
        if (self.cmd is None) == (self.argv is None):
            raise ValueError("exactly one of cmd and argv is required")
        if isinstance(self.cmd, list):
            self.cmd, self.argv = None, self.cmd
        if self.cmd is not None and not self.cmd.strip():
            raise ValueError("cmd must not be empty")
        if self.argv is not None and (not self.argv or not self.argv[0]):
            raise ValueError("argv needs a program")
        return self


class LifecycleBody(Wire):
    ttl_seconds: Ttl | None = Field(None, description="Counted from now; 0 = never.")
    persistent: StrictBool | None = Field(None, description="True: no TTL at all.")


class SandboxPatch(Wire):
    metadata: Annotated[dict[MetadataKey, MetadataValue | None], Field(max_length=64)] | None = Field(
        None, description="Keys to set; null removes a key."
    )
    ttl_seconds: Ttl | None = Field(None, description="Counted from now; 0 = never.")
    persistent: StrictBool | None = Field(None, description="True: no TTL at all.")
    idle_seconds: Ttl | None = Field(None, description="Counted from now; 0 = never.")
    idle_action: Literal["pause", "hibernate", "stop", "delete"] | None = Field(None, description="What happens then.")
    network_group: GroupName | Literal[""] | None = Field(None, description="Into this group; empty: out of any.")


class MkdirBody(Wire):
    path: Path = Field(description="Absolute.")
    mode: Annotated[str, StringConstraints(strict=True, pattern=MODE)] | None = Field(None, description="Octal.")
    parents: StrictBool = Field(True, description="Make missing parents; an existing directory is no error then.")
    user: User | None = Field(None, description="Whose rights apply.")


class MoveBody(Wire):
    source: Path = Field(validation_alias="from", serialization_alias="from", description="Absolute.")
    to: Path = Field(description="Absolute; the new name itself, never a directory to move into.")
    overwrite: StrictBool = Field(False, description="Replace what is there.")
    user: User | None = Field(None, description="Whose rights apply.")


# ------------------------------------------------------------------ answers (for the OpenAPI document)


class ErrorAnswer(BaseModel):
    error: str = Field(description="One sentence.")
    code: str = Field(description="Stable, dotted; see the error catalogue.")
    retryable: bool
    request_id: str
    details: dict[str, Any]
    action: str | None = Field(None, description="What to do about it.")
    detail: str | None = Field(None, description="Only with 401: why.")
    timeout_seconds: float | None = Field(None, description="Only with `exec.timeout`: the timeout that was in force.")


class IsolationAnswer(BaseModel):
    boundary: Literal["microvm"]
    vmm: Literal["qemu"]
    accel: Literal["kvm", "tcg"]
    jailed: bool = Field(
        description="Its process on the host has a user id, namespaces and a root of its own, and no privileges."
    )


class TerminationAnswer(BaseModel):
    reason: Literal[
        "vmm_died",
        "guest_shutdown",
        "ttl",
        "idle",
        "max_lifetime",
        "budget",
        "deleted",
        "create_failed",
        "host_restart",
    ]
    at: str
    signal: str | None = None
    detail: str | None = None


class SandboxAnswer(BaseModel):
    id: str
    name: str | None = None
    template: str = Field(description="The name that was asked for.")
    template_resolved: str = Field(description="The template it really got.")
    template_id: str
    status: Literal[
        "creating",
        "running",
        "paused",
        "hibernating",
        "hibernated",
        "waking",
        "stopping",
        "stopped",
        "starting",
        "failed",
        "deleting",
        "deleted",
    ]
    cpu: int
    cpus: int
    memory_mb: int
    disk_mb: int
    metadata: dict[str, str]
    env_keys: list[str]
    workspace: str
    created_at: str
    started_at: str | None = None
    expires_at: str | None = None
    ttl_seconds: int
    persistent: bool
    max_lifetime_seconds: int
    ends_at: str | None = Field(None, description="The end that nothing moves.")
    boot_ms: int
    boot_mode: Literal["warm", "launched", "snapshot", "fork", "wake", "cold"]
    isolation: IsolationAnswer
    network_mode: Literal["none", "allow-list", "open"]
    network_group: str | None = Field(None, description="It reaches the workspace's sandboxes with the same one.")
    secrets: list[GrantAnswer] | None = Field(None, description="What it may use without knowing it.")
    termination: TerminationAnswer | None = None
    generation: int
    status_reason: Literal["asked", "idle", "budget"] | None = Field(
        None, description="Why it is paused or hibernated."
    )
    idle_seconds: int
    idle_action: Literal["pause", "hibernate", "stop", "delete"]
    parent_id: str | None = Field(None, description="The sandbox it was forked from.")
    fork_tree_id: str | None = Field(None, description="Children of one fork share it.")
    from_snapshot: str | None = Field(None, description="The snapshot it continued from.")
    checkpoint_id: str | None = Field(None, description="The snapshot last taken of it, or that it last went on from.")


class LifecycleAnswer(BaseModel):
    ttl_seconds: int
    persistent: bool
    idle_seconds: int
    expires_at: str | None = None
    ends_at: str | None = None


class LoadAnswer(BaseModel):
    cpu_ms: float
    memory_bytes: int
    memory_limit_bytes: int
    processes: int
    disk_used_bytes: int
    disk_bytes: int
    oom_kills: int


class ExecTermination(BaseModel):
    reason: Literal["exited", "signaled", "timeout", "oom", "cancelled", "output_limit", "sandbox_gone"]
    signal: str | None = None
    signal_number: int | None = None
    detail: str | None = None
    oom_kills: int | None = Field(
        None,
        description="Processes of the command that the kernel has killed for want of memory, whatever the reason is. "
        "Absent when there were none.",
    )


class ExecAnswer(BaseModel):
    exec_id: str
    stdout: str
    stderr: str
    encoding: Literal["utf-8", "base64"]
    exit_code: int
    duration_ms: int = Field(description="Measured in the guest, from start to end of the command.")
    duration_us: int
    termination: ExecTermination
    truncated: bool
    stdout_dropped_bytes: int
    stderr_dropped_bytes: int
    stdout_head_bytes: int | None = None
    stderr_head_bytes: int | None = None


class OutputEvent(BaseModel):
    """`stdout` and `stderr`. The `id:` of the event is the output offset to go on from."""

    chunk: str = Field(description="Text that is never cut within a character; base64 when that was asked for.")
    encoding: Literal["base64"] | None = Field(None, description="Only when that was asked for.")


class GapEvent(BaseModel):
    """`gap`: output that is not kept any more."""

    bytes: int
    stream: Literal["stdout", "stderr", "both"]


class ExitEvent(BaseModel):
    """`exit`: the command has ended. A timeout is an `error` event instead."""

    exit_code: int
    duration_ms: int
    termination: ExecTermination
    exec_id: str


class ExecStarted(BaseModel):
    exec_id: str
    status: Literal["running"]
    pid: int


class ExecInfoAnswer(BaseModel):
    exec_id: str
    status: Literal["running", "exited"]
    pid: int
    detached: bool
    started_at: str
    output_bytes: int
    exit_code: int | None = None
    duration_ms: int | None = None
    termination: ExecTermination | None = None
    stdout: str | None = None
    stderr: str | None = None
    encoding: Literal["utf-8", "base64"] | None = None
    truncated: bool | None = None
    stdout_dropped_bytes: int | None = None
    stderr_dropped_bytes: int | None = None


class ExecListAnswer(BaseModel):
    execs: list[ExecInfoAnswer]


class FileEntry(BaseModel):
    name: str
    path: str
    type: Literal["file", "dir", "symlink", "fifo", "socket", "block", "char", "unknown"]
    is_dir: bool
    size: int
    mode: str
    mtime: int
    mtime_ns: int
    uid: int
    gid: int
    owner: str
    group: str
    target: str | None = None
    name_b64: str | None = Field(None, description="base64url of the raw name when it is not UTF-8.")


class DirAnswer(BaseModel):
    path: str
    entries: list[FileEntry]
    truncated: bool
    next: str | None = None


class WriteAnswer(BaseModel):
    path: str
    bytes: int
    created: bool
    etag: str | None = Field(None, description="State of the file as it is now, for `If-Match`.")
