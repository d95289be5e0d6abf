"""Between the JSON of the API and the records of `runs`: pure functions, no I/O."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ._wire import Json, given, record, required, timestamp
from .runs import Run, RunFailure, RunLanguage, RunResult, RunStep


def body(
    language: str, source: str, files: Mapping[str, str | bytes] | None, stdin: str | bytes | None, **more: Any
) -> dict[str, Any]:
    """A run as it is sent."""
    made = given(language=language, source=source, **more)
    if stdin is not None:
        is_text = isinstance(stdin, str)
        made["stdin"] = stdin if isinstance(stdin, str) else base64.b64encode(stdin).decode("ascii")
        made["stdin_base64"] = not is_text
    if files:
        made["files"] = [_file(path, content) for path, content in files.items()]
    return made


def _file(path: str, content: str | bytes) -> dict[str, str]:
    if isinstance(content, str):
        return {"path": path, "content": content}
    return {"path": path, "content": base64.b64encode(content).decode("ascii"), "encoding": "base64"}


def step(data: Json) -> RunStep:
    return RunStep(
        stdout=str(data.get("stdout") or ""),
        stderr=str(data.get("stderr") or ""),
        exit_code=int(required(data, "exit_code")),
        reason=str(data.get("reason") or ""),
        signal=_text(data, "signal"),
        detail=_text(data, "detail"),
        duration_ms=float(data.get("duration_ms") or 0),
        cpu_ms=float(data.get("cpu_ms") or 0),
        memory_kb=int(data.get("memory_kb") or 0),
        stdout_dropped_bytes=int(data.get("stdout_dropped_bytes") or 0),
        stderr_dropped_bytes=int(data.get("stderr_dropped_bytes") or 0),
    )


def result(data: Json) -> RunResult:
    compiler = data.get("compile")
    return RunResult(
        status=str(required(data, "status")),
        language=str(data.get("language") or ""),
        template=str(data.get("template") or ""),
        verdict=_text(data, "verdict"),
        program=step(data) if "exit_code" in data else None,
        compiler=None if compiler is None else step(record(compiler)),
        timing_ms={str(name): float(ms) for name, ms in dict(data.get("timing_ms") or {}).items()},
        raw=data,
    )


def failure(data: Json) -> RunFailure:
    return RunFailure(
        message=str(data.get("error") or ""),
        code=str(required(data, "code")),
        retryable=bool(data.get("retryable")),
        details=dict(data.get("details") or {}),
    )


def item(data: Json) -> RunResult | RunFailure:
    """One of a batch."""
    if (why := data.get("failure")) is not None:
        return failure(record(why))
    return result(record(required(data, "result")))


def run(data: Json) -> Run:
    created = timestamp(required(data, "created_at"))
    assert created is not None, "a required time is there"
    made, why, callback = data.get("result"), data.get("failure"), data.get("callback")
    return Run(
        id=str(required(data, "id")),
        state=str(required(data, "state")),
        language=str(data.get("language") or ""),
        created_at=created,
        finished_at=timestamp(data.get("finished_at")),
        result=None if made is None else result(record(made)),
        failure=None if why is None else failure(record(why)),
        callback=None if callback is None else str(record(callback).get("state")),
        raw=data,
    )


def language(data: Json) -> RunLanguage:
    return RunLanguage(
        name=str(required(data, "name")),
        title=str(data.get("title") or ""),
        aliases=tuple(str(one) for one in data.get("aliases") or []),
        compiled=bool(data.get("compiled")),
        template=str(data.get("template") or ""),
        available=bool(data.get("available")),
    )


def _text(data: Json, name: str) -> str | None:
    value = data.get(name)
    return None if value is None else str(value)
