"""Request and answer types of one-shot runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt

from cloche_server.api.wire import Env, ErrorAnswer, ShortText, Wire
from cloche_server.api.wire_network import NetworkBody
from cloche_server.core.runs import MAX_BATCH, MAX_FILES, MAX_OUTPUT
from cloche_server.core.webhooks import MAX_URL

RunSeconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, strict=True)]
Word = Annotated[str, Field(max_length=4096)]


class RunFileBody(Wire):
    path: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Relative to the directory of the source, which is the working directory."
    )
    content: str = Field("", description="Text, or base64 with `encoding`.")
    encoding: Literal["utf-8", "base64"] = "utf-8"


class RunBody(Wire):
    language: ShortText = Field(description="A name or alias of `GET /v1/run/languages`.")
    source: str = Field(description="The program.")
    files: Annotated[list[RunFileBody], Field(max_length=MAX_FILES)] = Field(
        default_factory=list, description="Further files beside it."
    )
    stdin: str | None = Field(None, description="Default: empty.")
    stdin_base64: StrictBool = Field(False, description="`stdin` is base64.")
    args: Annotated[list[Word], Field(max_length=1000)] = Field(default_factory=list, description="Of the program.")
    compiler_options: Annotated[list[Word], Field(max_length=100)] = Field(
        default_factory=list, description="Further options of the compiler, where there is one."
    )
    env: Env = Field(default_factory=dict, description="Of compiler and program.")
    timeout_seconds: RunSeconds = Field(10.0, description="So long the program may run.")
    compile_timeout_seconds: RunSeconds = Field(60.0, description="So long the compiler may run.")
    template: ShortText | None = Field(None, description="Default: the one that has the language.")
    cpus: Annotated[StrictInt, Field(ge=1, le=64)] | None = Field(None, description="Default: as any sandbox.")
    memory_mb: Annotated[StrictInt, Field(ge=64, le=1048576)] | None = Field(
        None, description="Default: what the language needs."
    )
    network: NetworkBody | None = Field(None, description="Default: no network at all.")
    expected_output: str | None = Field(None, description="The answer gets a `verdict` about standard output.")
    compare: Literal["exact", "trim", "tokens"] = Field(
        "trim",
        description="`trim` does not look at white space at the ends of lines and of the output, `tokens` only at the "
        "words.",
    )
    max_output_bytes: Annotated[StrictInt, Field(ge=1, le=MAX_OUTPUT)] = Field(
        1024 * 1024, description="Of each stream; a program that writes more is ended."
    )
    encoding: Literal["utf-8", "base64"] = Field("utf-8", description="Of the output in the answer.")
    wait: StrictBool = Field(True, description="False: answer 202 at once; the result is asked for, or told.")
    callback_url: Annotated[str, Field(max_length=MAX_URL)] | None = Field(
        None, description="With `wait` false: it gets the result by POST, some times if need be."
    )
    callback_secret: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="`whsec_` and base64: the POST is signed as those of webhooks are."
    )


class RunBatchBody(Wire):
    runs: Annotated[list[RunBody], Field(min_length=1, max_length=MAX_BATCH)] = Field(
        description="Each by itself; what they say of `wait` and callbacks does not count."
    )


class RunStepAnswer(BaseModel):
    stdout: str
    stderr: str
    stdout_dropped_bytes: int
    stderr_dropped_bytes: int
    exit_code: int = Field(description="128 + signal for a program that a signal has ended.")
    reason: str = Field(description="`exited`, `signaled`, `timeout`, `oom`, `output_limit`.")
    duration_ms: float
    cpu_ms: float = Field(description="User and system time of all its processes.")
    memory_kb: int = Field(description="The most that one of its processes had resident, in KiB.")
    signal: str | None = None
    detail: str | None = None


class RunAnswer(BaseModel):
    """The fields of a step are those of the program; they are absent when it was not run."""

    status: Literal["ok", "compile_error", "runtime_error", "timeout", "out_of_memory", "output_limit"]
    language: str
    template: str
    verdict: str | None = Field(
        None, description="`accepted`, `wrong_answer`, or the status. Only with expected output."
    )
    compile: RunStepAnswer | None = None
    stdout: str | None = None
    stderr: str | None = None
    stdout_dropped_bytes: int | None = None
    stderr_dropped_bytes: int | None = None
    exit_code: int | None = None
    reason: str | None = None
    duration_ms: float | None = None
    cpu_ms: float | None = None
    memory_kb: int | None = None
    signal: str | None = None
    detail: str | None = None
    timing_ms: dict[str, float] = Field(
        description="`queued`, `create`, `files`, `compile`, `run`, and `total` from the call to its end."
    )


class RunCallback(BaseModel):
    state: Literal["pending", "delivered", "failed"]
    error: str | None = None


class RunFailure(BaseModel):
    error: str
    code: str
    retryable: bool
    details: dict[str, Any]


class RunRecordAnswer(BaseModel):
    id: str
    state: Literal["queued", "running", "done", "lost"]
    language: str
    created_at: str
    finished_at: str | None = None
    callback: RunCallback | None = None
    result: RunAnswer | None = None
    failure: RunFailure | None = Field(None, description="Why there is no result.")


class RunBatchItem(BaseModel):
    """One of both."""

    result: RunAnswer | None = None
    failure: ErrorAnswer | None = None


class RunBatchAnswer(BaseModel):
    results: list[RunBatchItem] = Field(description="In the order of the request.")


class LanguageAnswer(BaseModel):
    name: str
    title: str
    aliases: list[str]
    file: str = Field(description="What the source is called.")
    compiled: bool
    template: str
    available: bool = Field(description="Its template is there.")


class LanguageList(BaseModel):
    languages: list[LanguageAnswer]
