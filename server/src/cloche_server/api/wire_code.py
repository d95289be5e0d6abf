"""Request and answer types of the code interpreter."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt, StringConstraints

from cloche_server.api.wire import Env
from cloche_server.api.wire_base import Seconds, Wire
from cloche_server.core.code import CodeStatus

Code = Annotated[str, StringConstraints(min_length=1, max_length=1024 * 1024)]
LanguageName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Directory = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$", max_length=4095)]


class CodeBody(Wire):
    code: Code = Field(description="What is run, as one cell.")
    language: LanguageName | None = Field(
        None,
        description="`python` (unless given), `javascript`, `typescript`, `bash` or, in a template that has it, `r`; "
        "`py`, `js`, `node`, `ts`, `sh` are the same. Each has a context of its own, which is used when `context` is "
        "not given.",
    )
    context: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = Field(
        None, description="Id of the context; instead of `language`."
    )
    timeout_seconds: Seconds | None = Field(
        None, description="After this the code is interrupted, and its kernel killed if that does not help."
    )
    env: Env = Field(default_factory=dict, description="Variables of this run alone.")
    cwd: Directory | None = Field(None, description="Absolute directory of this run alone.")
    stream: StrictBool = Field(False, description="Answer with server-sent events as the code runs.")
    input: StrictBool = Field(
        False,
        description="The code may ask for input, which `POST …/input` answers; without it, to ask is an error at once.",
    )


class ContextBody(Wire):
    language: LanguageName = Field("python", description="As for a run.")
    cwd: Directory | None = Field(None, description="Absolute directory that its kernel starts in.")


class CodeInputBody(Wire):
    text: Annotated[str, StringConstraints(max_length=65536)] = Field(description="The line, without its end.")


class ContextAnswer(BaseModel):
    id: str = Field(description="The context that a language has by itself has the name of the language.")
    language: str
    cwd: str | None = Field(None, description="The directory it started in; left out where that is the home.")
    state: Literal["idle", "busy", "not_started"]
    cells: int = Field(description="How many runs it has seen.")
    execution_count: int = Field(description="The number of the last run since its kernel was started.")
    created_at: str


class ContextListAnswer(BaseModel):
    contexts: list[ContextAnswer]


class InterruptAnswer(BaseModel):
    interrupted: bool = Field(description="Whether something ran.")


class CodeStartedEvent(BaseModel):
    context_id: str
    language: str


class CodeTextEvent(BaseModel):
    text: str


class CodeGapEvent(BaseModel):
    stream: Literal["stdout", "stderr", "result"]
    count: int = Field(description="Bytes of output, or results, that are missing here.")


class CodeResultItem(BaseModel):
    """One thing that the code has shown, in all its forms."""

    data: dict[str, Any] = Field(
        description="By MIME type: text, base64 for pictures and PDF, and for JSON the value. A matplotlib figure "
        "also has `application/vnd.cloche.chart+json`, the data it is drawn from."
    )
    main: bool = Field(description="It is the value of the last expression.")
    dropped: dict[str, int] = Field(description="Sizes of forms that were left out: too large, or broken.")


class CodeErrorItem(BaseModel):
    """An exception that the code has not caught."""

    name: str
    message: str
    traceback: str


class CodeInputEvent(BaseModel):
    """The code waits; `POST …/contexts/{context_id}/input` answers."""

    prompt: str
    password: bool = Field(description="What is typed should not be shown.")


class CodeEndEvent(BaseModel):
    status: CodeStatus
    execution_count: int
    duration_ms: float
    state_lost: bool = Field(description="The kernel has ended and a new one was started: variables are gone.")
    detail: str | None = Field(None, description="A sentence about an end that was not that of the code.")


class CodeAnswer(CodeEndEvent):
    context_id: str
    language: str
    stdout: str
    stderr: str
    stdout_dropped_bytes: int = Field(description="Bytes that are missing in the middle, where a line says so.")
    stderr_dropped_bytes: int
    results: list[CodeResultItem]
    results_dropped: int = Field(
        description="Results that were left out because there were too many or too large ones."
    )
    error: CodeErrorItem | None = Field(None, description="Left out when the code has raised nothing.")


class ReplSessionBody(Wire):
    language: LanguageName = Field("python", description="As for a run.")


class ReplRunBody(Wire):
    code: Code = Field(description="What is run.")
    timeout_ms: Annotated[StrictInt, Field(ge=1, le=86_400_000)] = Field(30_000, description="Milliseconds.")


class ReplBody(Wire):
    code: Code = Field(description="What is run.")
    language: LanguageName = Field("python", description="`python`, `py`, `node`, `js`, `bash`, `sh` or `ruby`.")


class ReplSessionAnswer(BaseModel):
    id: str
    session_id: str = Field(description="The same as `id`.")
    sandbox_id: str
    language: str
    created_at: str
    cells: int


class ReplRunAnswer(BaseModel):
    stdout: str
    stderr: str
    exit: int = Field(description="0, or 1 when the code has raised an exception.")
    exit_code: int = Field(description="The same as `exit`.")
    duration_ms: float
    error: str = Field(description="The traceback; empty when there is none.")
    results: list[dict[str, str]] = Field(description="By MIME type; JSON as text.")


class ReplAnswer(BaseModel):
    language: str
    stdout: str
    stderr: str
    exit_code: int
