"""Request and answer types of processes and terminals."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, Field, StrictBool, StrictInt, StringConstraints, model_validator

from cloche_server.api.wire import Argument, Cwd, Env, ExecTermination, User
from cloche_server.api.wire_base import Seconds, Wire
from cloche_server.core.process import NAME_MAX, RECORD_KB, RECORD_KB_MAX, SIZE_MAX

Cells = Annotated[StrictInt, Field(ge=1, le=SIZE_MAX)]
Limit = Literal["as", "core", "cpu", "data", "fsize", "memlock", "nofile", "nproc", "stack"]


class SizeBody(Wire):
    cols: Cells = Field(description="Columns.")
    rows: Cells = Field(description="Lines.")


class ProcessBody(Wire):
    command: Argument | list[Argument] | None = Field(
        None,
        validation_alias=AliasChoices("command", "cmd"),
        description="A string for the login shell, or an argv list. With a terminal it may be left out: the shell.",
    )
    argv: list[Argument] | None = Field(None, description="Program and arguments, no shell.")
    env: Env = Field(default_factory=dict, description="Laid over the environment of the sandbox.")
    cwd: Cwd | None = Field(None, description="Absolute; default: the sandbox's.", json_schema_extra={"pattern": "^/"})
    user: User | None = Field(None, description="Name, number, `name:group` or `uid:gid`; default: the sandbox's.")
    stdin: Literal["none", "pipe"] = Field("none", description="`pipe`: an input that can be written to and ended.")
    pty: SizeBody | None = Field(None, description="A terminal of this size: input and output, which is all `stdout`.")
    timeout_seconds: Seconds | None = Field(None, description="Killed after so long; 0 or absent: never.")
    rlimits: dict[Limit, Annotated[StrictInt, Field(ge=-1, le=2**62)]] = Field(
        default_factory=dict,
        description="Limits of the kernel: seconds (`cpu`), counts (`nproc`, `nofile`), bytes (all others); -1 = none.",
    )
    name: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=NAME_MAX)] | None = Field(
        None, description="A label, for whoever reads the list. It need not be unique."
    )
    buffer_kb: Annotated[StrictInt, Field(ge=4, le=RECORD_KB_MAX)] = Field(
        RECORD_KB, description="Output that is kept for readers, in KiB; the oldest goes first."
    )

    @model_validator(mode="after")
    def _one_command(self) -> ProcessBody:
        if isinstance(self.command, list):
            if self.argv is not None:
                raise ValueError("give one of command and argv")
            self.argv, self.command = self.command, None
        if self.command is not None and self.argv is not None:
            raise ValueError("give one of command and argv")
        if self.command is None and self.argv is None and self.pty is None:
            raise ValueError("command is required: a string for the shell or an argv list")
        if self.argv is not None and (not self.argv or not self.argv[0]):
            raise ValueError("argv must name a program")
        if self.pty is not None and self.stdin == "pipe":
            raise ValueError("a terminal is its own input: leave out stdin")
        return self


class SignalBody(Wire):
    signal: (
        Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Z0-9]{1,16}$")]
        | Annotated[StrictInt, Field(ge=1, le=64)]
    ) = Field(description="`TERM`, `SIGTERM` or 15.")
    target: Literal["process", "group", "tree"] = Field(
        "process", description="The process itself, its process group, or all that descends from it."
    )


class InputBody(Wire):
    data: Annotated[str, StringConstraints(strict=True)] = Field("", description="What is written.")
    encoding: Literal["utf-8", "base64"] = Field("utf-8", description="Of `data`.")
    close: StrictBool = Field(False, description="End the input behind it.")


class SizeAnswer(BaseModel):
    cols: int
    rows: int


class ProcessAnswer(BaseModel):
    process_id: str
    name: str | None = None
    command: str | None = Field(None, description="Cut; absent when it was not started by this API.")
    pid: int = Field(description="In the sandbox; 0 when the program could not be started.")
    status: Literal["running", "exited", "lost"] = Field(
        description="`lost`: its machine was stopped while it ran, and how it would have ended nobody knows."
    )
    started_at: str
    stdin: Literal["none", "pipe", "closed", "pty"]
    pty: SizeAnswer | None = None
    output_bytes: int = Field(description="Of both streams.")
    kept_from: int = Field(description="The offset of the oldest output that is kept.")
    stdout_bytes: int
    stderr_bytes: int
    exit_code: int | None = None
    duration_ms: int | None = None
    termination: ExecTermination | None = None


class GuestProcessAnswer(BaseModel):
    pid: int
    ppid: int
    uid: int
    user: str
    state: str = Field(description="One letter, as in proc(5).")
    cpu_ms: float
    rss_kb: int
    started_at: str
    name: str
    command: str
    process_id: str | None = Field(None, description="The process or command that it belongs to.")


class ProcessListAnswer(BaseModel):
    processes: list[ProcessAnswer]
    guest: list[GuestProcessAnswer] | None = Field(None, description="With `all`: all that runs in the sandbox.")
    truncated: bool | None = Field(None, description="With `all`: there are more.")


class WrittenAnswer(BaseModel):
    bytes: int = Field(description="So many were taken; send the rest again.")
    closed: bool = Field(description="The process takes no more.")


class ProcessOutputEvent(BaseModel):
    """`stdout` and `stderr`. The `id:` of the event is the offset to go on from, in bytes of both streams, or of the
    one that was asked for."""

    chunk: str = Field(description="Text that is never cut within a character; base64 when that was asked for.")
    offset: int | None = Field(None, description="Bytes of this stream before it, where that is known.")
    encoding: Literal["base64"] | None = Field(None, description="Only when that was asked for.")


class ProcessExitEvent(BaseModel):
    """`exit`: the process has ended."""

    exit_code: int
    duration_ms: int
    termination: ExecTermination
    process_id: str


class OutputEndEvent(BaseModel):
    """`end`: all that there is so far, without `follow`."""

    offset: int
