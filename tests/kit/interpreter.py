"""The code interpreter of a sandbox over HTTP, as a test asks it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kit import sse
from kit.client import Box

TEMPLATE = "code-interpreter"
CHART = "application/vnd.cloche.chart+json"


def run(box: Box, code: str, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = box.api.call("POST", f"{box.path}/code", json={"code": code, **fields}, timeout=200)
    return answer


def value(box: Box, code: str, **fields: Any) -> str:
    ran = run(box, code, **fields)
    assert ran["status"] == "ok", ran
    return str(ran["results"][-1]["data"]["text/plain"])


@contextlib.contextmanager
def stream(box: Box, code: str, **fields: Any) -> Iterator[Iterator[sse.Event]]:
    """The events of a run. Leaving the block early hangs up."""
    body = {"code": code, "stream": True, **fields}
    with box.api.http.stream("POST", f"{box.path}/code", json=body, timeout=200) as answer:
        assert answer.status_code == 200
        yield (event for event in sse.parse(answer.iter_raw()) if event.name)


def context(box: Box, language: str = "python") -> str:
    return str(box.api.call("POST", f"{box.path}/code/contexts", json={"language": language})["id"])
