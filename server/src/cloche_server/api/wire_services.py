"""Request and answer types of services."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, Field, StrictBool, StrictInt, StringConstraints, model_validator

from cloche_server.api.wire import Argument, Cwd, Env, ExecTermination, User
from cloche_server.api.wire_base import Wire
from cloche_server.api.wire_process import Limit
from cloche_server.core.process import RECORD_KB, RECORD_KB_MAX
from cloche_server.core.services import DAY, GRACE_MAX, SERVICE_NAME, SERVICES_MAX, Restart, State

Port = Annotated[StrictInt, Field(ge=1, le=65535)]
ServiceName = Annotated[str, StringConstraints(strict=True, pattern=SERVICE_NAME)]
#: Of a tenth of a second to a day.
Span = Annotated[float, Field(ge=0.1, le=DAY, allow_inf_nan=False, strict=True)]
Delay = Annotated[float, Field(ge=0, le=DAY, allow_inf_nan=False, strict=True)]
_PRINTABLE = r"^/[!-~]*$"


class HttpCheckBody(Wire):
    port: Port = Field(description="In the sandbox.")
    path: Annotated[str, StringConstraints(strict=True, max_length=2048, pattern=_PRINTABLE)] = Field(
        "/", description="Asked for with GET; redirections are not followed."
    )
    status: Annotated[StrictInt, Field(ge=100, le=599)] | None = Field(
        None, description="What has to be answered; default: anything from 200 to 399."
    )


class HealthBody(Wire):
    tcp: Port | None = Field(None, description="A port of the sandbox that has to take connections.")
    http: HttpCheckBody | None = Field(None, description="A page that has to answer.")
    command: Argument | list[Argument] | None = Field(
        None, description="A command that has to end with 0, as the user and in the environment of the service."
    )
    argv: list[Argument] | None = Field(None, description="The same as program and arguments, no shell.")
    interval_seconds: Span = Field(10.0, description="Between two checks.")
    timeout_seconds: Span = Field(5.0, description="A check that takes longer has failed.")
    retries: Annotated[StrictInt, Field(ge=1, le=1000)] = Field(
        3, description="So many failures in a row make it unhealthy."
    )
    start_period_seconds: Delay = Field(
        30.0, description="Failures do not count for so long, or until it is healthy; it is asked twice a second then."
    )
    on_unhealthy: Literal["restart", "report"] = Field(
        "restart", description="`restart`: it is ended and started again, unless `restart` is `no`."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> HealthBody:
        if sum(one is not None for one in (self.tcp, self.http, self.command, self.argv)) != 1:
            raise ValueError("give exactly one of tcp, http and command (or argv)")
        if isinstance(self.command, list):
            self.argv, self.command = self.command, None
        if self.argv is not None and (not self.argv or not self.argv[0]):
            raise ValueError("argv must name a program")
        return self


class ServiceBody(Wire):
    command: Argument | list[Argument] | None = Field(
        None,
        validation_alias=AliasChoices("command", "cmd"),
        description="A string for the login shell, or an argv list. It has to stay in the foreground.",
    )
    argv: list[Argument] | None = Field(None, description="Program and arguments, no shell.")
    env: Env = Field(default_factory=dict, description="Laid over the environment of the sandbox.")
    cwd: Cwd | None = Field(None, description="Absolute; default: the sandbox's.", json_schema_extra={"pattern": "^/"})
    user: User | None = Field(None, description="Name, number, `name:group` or `uid:gid`; default: the sandbox's.")
    rlimits: dict[Limit, Annotated[StrictInt, Field(ge=-1, le=2**62)]] = Field(
        default_factory=dict, description="As for a process."
    )
    buffer_kb: Annotated[StrictInt, Field(ge=4, le=RECORD_KB_MAX)] = Field(
        RECORD_KB, description="Output that is kept of all its runs, in KiB; the oldest goes first."
    )
    autostart: StrictBool = Field(True, description="Start it now, and whenever the machine boots.")
    restart: Restart = Field(
        "on-failure",
        description="When it ends: not again; again if it failed (exit code, signal, out of memory); again always.",
    )
    backoff_seconds: Span = Field(1.0, description="Before the first restart; it doubles with each one in the window.")
    max_backoff_seconds: Span | None = Field(
        None, description="The longest it grows to; default: 30, or `backoff_seconds` if that is more."
    )
    max_restarts: Annotated[StrictInt, Field(ge=0, le=1000)] = Field(
        5, description="So many restarts in the window, and it has failed; 0 = no limit."
    )
    window_seconds: Span = Field(300.0, description="For `max_restarts` and the growth of the back-off.")
    stop_signal: Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Z0-9]{1,16}$")] = Field(
        "TERM", description="Sent to all its processes when it is to end."
    )
    stop_grace_seconds: Annotated[float, Field(ge=0, le=GRACE_MAX, allow_inf_nan=False, strict=True)] = Field(
        10.0, description="What is left after so long is killed."
    )
    depends_on: Annotated[list[ServiceName], Field(max_length=SERVICES_MAX - 1)] = Field(
        default_factory=list,
        description="Services that have to be healthy first, or to have ended with exit code 0. They have to exist.",
    )
    health: HealthBody | None = Field(None, description="Without one it is healthy as long as it runs.")

    @model_validator(mode="after")
    def _one_command(self) -> ServiceBody:
        if isinstance(self.command, list):
            if self.argv is not None:
                raise ValueError("give one of command and argv")
            self.argv, self.command = self.command, None
        if (self.command is None) == (self.argv is None):
            raise ValueError("give one of command and argv: a string for the shell or an argv list")
        if self.argv is not None and (not self.argv or not self.argv[0]):
            raise ValueError("argv must name a program")
        if self.max_backoff_seconds is not None and self.max_backoff_seconds < self.backoff_seconds:
            raise ValueError("max_backoff_seconds is below backoff_seconds")
        return self


class HttpCheckAnswer(BaseModel):
    port: int
    path: str
    status: int | None = None


class HealthCheckAnswer(BaseModel):
    tcp: int | None = None
    http: HttpCheckAnswer | None = None
    command: str | None = None
    argv: list[str] | None = None
    interval_seconds: float
    timeout_seconds: float
    retries: int
    start_period_seconds: float
    on_unhealthy: Literal["restart", "report"]


class DefinitionAnswer(BaseModel):
    """The definition, as the sandbox tells it. It can be sent again as it is."""

    command: str | None = None
    argv: list[str] | None = None
    env: dict[str, str] = Field(description="With that of the sandbox.")
    cwd: str | None = None
    user: str | None = None
    rlimits: dict[str, int]
    buffer_kb: int
    autostart: bool
    restart: Restart
    backoff_seconds: float
    max_backoff_seconds: float
    max_restarts: int
    window_seconds: float
    stop_signal: str
    stop_grace_seconds: float
    depends_on: list[str]
    health: HealthCheckAnswer | None = None


class LastExitAnswer(BaseModel):
    exit_code: int
    at: str
    duration_ms: int
    termination: ExecTermination


class ServiceAnswer(BaseModel):
    name: str
    state: State = Field(
        description="`starting`: not healthy yet, or it waits for what it depends on; `backoff`: it waits for its next "
        "start; `stopped`: it was stopped, or has done its work; `failed`: it is not started again."
    )
    detail: str | None = Field(None, description="Why it is in this state, in words of the agent in the sandbox.")
    waiting_for: list[str] = Field(description="Services that have to be healthy first.")
    pid: int | None = Field(None, description="In the sandbox; absent when it does not run.")
    process_id: str | None = Field(None, description="The process of the present run, or of the last one.")
    started_at: str | None = Field(None, description="The last start.")
    restarts: int = Field(description="Since it was started by a call, or at boot.")
    health_failures: int = Field(description="Health checks that failed in a row.")
    retry_in_seconds: float | None = Field(None, description="In `backoff`: until the next start.")
    last_exit: LastExitAnswer | None = Field(None, description="Of the last run that is over.")
    definition: DefinitionAnswer


class ServiceListAnswer(BaseModel):
    services: list[ServiceAnswer]
