"""Between the JSON of the API and the records of `code`: pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._output import LIMIT, Collector
from ._wire import Json, record, required, timestamp
from .code import (
    CodeContext,
    CodeEnd,
    CodeEvent,
    CodeException,
    CodeGap,
    CodeResult,
    CodeStarted,
    CodeStderr,
    CodeStdout,
    Execution,
    InputRequested,
)
from .errors import ProtocolError


def event(name: str, data: Json) -> CodeEvent | None:
    """An event of a run; None for one that a newer server sends."""
    if name == "stdout":
        return CodeStdout(str(required(data, "text")))
    if name == "stderr":
        return CodeStderr(str(required(data, "text")))
    if name == "result":
        return _result(data)
    if name == "started":
        return CodeStarted(str(required(data, "context_id")), str(required(data, "language")))
    if name == "gap":
        return CodeGap(str(required(data, "stream")), int(required(data, "count")))
    if name == "error":
        return CodeException(
            str(required(data, "name")), str(required(data, "message")), str(data.get("traceback") or "")
        )
    if name == "input_requested":
        return InputRequested(str(data.get("prompt") or ""), bool(data.get("password")))
    if name == "end":
        return CodeEnd(
            required(data, "status"),
            int(data.get("execution_count") or 0),
            float(data.get("duration_ms") or 0.0),
            bool(data.get("state_lost")),
            data.get("detail"),
        )
    return None


def _result(data: Json) -> CodeResult:
    dropped = data.get("dropped")
    sizes: dict[str, int] = {str(k): int(v) for k, v in dropped.items()} if isinstance(dropped, Mapping) else {}
    return CodeResult(dict(record(required(data, "data"))), bool(data.get("main")), sizes)


def context(data: Json) -> CodeContext:
    """A context."""
    return CodeContext(
        id=str(required(data, "id")),
        language=str(required(data, "language")),
        state=str(data.get("state") or "idle"),
        cwd=data.get("cwd"),
        cells=int(data.get("cells") or 0),
        execution_count=int(data.get("execution_count") or 0),
        created_at=timestamp(data.get("created_at")),
        raw=data,
    )


class Gatherer:
    """Puts the result of a run together from its events."""

    def __init__(self) -> None:
        self._outputs = {"stdout": Collector(LIMIT), "stderr": Collector(LIMIT)}
        self._results: list[CodeResult] = []
        self._results_dropped = 0
        self._started: CodeStarted | None = None
        self._error: CodeException | None = None
        self._end: CodeEnd | None = None

    def add(self, found: CodeEvent) -> None:
        """The next event."""
        if isinstance(found, CodeStdout):
            self._outputs["stdout"].add(found.text)
        elif isinstance(found, CodeStderr):
            self._outputs["stderr"].add(found.text)
        elif isinstance(found, CodeResult):
            self._results.append(found)
        elif isinstance(found, CodeGap) and found.stream in self._outputs:
            self._outputs[found.stream].miss(found.count)
        elif isinstance(found, CodeGap):
            self._results_dropped += found.count
        elif isinstance(found, CodeStarted):
            self._started = found
        elif isinstance(found, CodeException):
            self._error = found
        elif isinstance(found, CodeEnd):
            self._end = found

    def execution(self) -> Execution:
        """All of it."""
        if self._started is None or self._end is None:
            raise ProtocolError("the stream has no end")
        out, err, end = self._outputs["stdout"], self._outputs["stderr"], self._end
        return Execution(
            status=end.status,
            context_id=self._started.context_id,
            language=self._started.language,
            results=tuple(self._results),
            stdout=out.text(),
            stderr=err.text(),
            error=self._error,
            execution_count=end.execution_count,
            duration_ms=end.duration_ms,
            state_lost=end.state_lost,
            detail=end.detail,
            stdout_dropped_bytes=out.dropped,
            stderr_dropped_bytes=err.dropped,
            results_dropped=self._results_dropped,
        )


def body(code: str, **fields: Any) -> dict[str, Any]:
    """The body of a run."""
    if not isinstance(code, str):
        raise TypeError(f"code is text, not {type(code).__name__}")
    return {"code": code, "stream": True, **{name: value for name, value in fields.items() if value is not None}}
