"""All that a run has shown, for callers that wait for its end; bounded, whatever the code does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

from cloche_server.app.code import CodeStream
from cloche_server.core.code import (
    CodeEnd,
    CodeError,
    CodeGap,
    CodeResult,
    CodeStarted,
    CodeText,
    nonsense,
)
from cloche_server.core.output import OutputCollector

#: Bytes of each stream, results, and characters of all results together that are kept.
MAX_OUTPUT: Final = 1024 * 1024
MAX_RESULTS: Final = 256
MAX_RESULT_SIZE: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CodeOutcome:
    started: CodeStarted
    end: CodeEnd
    stdout: str
    stderr: str
    stdout_dropped: int
    stderr_dropped: int
    results: list[CodeResult] = field(default_factory=list)
    results_dropped: int = 0
    error: CodeError | None = None


async def collect(stream: CodeStream) -> CodeOutcome:
    """Goes through a run to its end, and closes it."""
    outputs = {"stdout": OutputCollector(MAX_OUTPUT), "stderr": OutputCollector(MAX_OUTPUT)}
    results: list[CodeResult] = []
    size = dropped = 0
    started: CodeStarted | None = None
    error: CodeError | None = None
    end: CodeEnd | None = None
    try:
        async for event in stream:
            if isinstance(event, CodeText):
                outputs[event.stream].add(event.text.encode())
            elif isinstance(event, CodeGap):
                if event.stream == "result":
                    dropped += event.count
                else:
                    outputs[event.stream].gap(event.count)
            elif isinstance(event, CodeResult):
                weight = _weight(event)
                if len(results) >= MAX_RESULTS or size + weight > MAX_RESULT_SIZE:
                    dropped += 1
                else:
                    results.append(event)
                    size += weight
            elif isinstance(event, CodeStarted):
                started = event
            elif isinstance(event, CodeError):
                error = event
            elif isinstance(event, CodeEnd):
                end = event
    finally:
        await stream.aclose()
    if started is None or end is None:
        raise nonsense("a run without an end")
    out, err = outputs["stdout"].collect("utf-8"), outputs["stderr"].collect("utf-8")
    return CodeOutcome(started, end, out.text, err.text, out.dropped, err.dropped, results, dropped, error)


def _weight(result: CodeResult) -> int:
    return sum(len(value) if isinstance(value, str) else len(json.dumps(value)) for value in result.data.values())
