"""Code in kernels: what it has shown, how it ended, and the contexts that keep its state. Frozen records, no I/O."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

__all__ = [
    "CodeContext",
    "CodeEnd",
    "CodeEvent",
    "CodeException",
    "CodeGap",
    "CodeResult",
    "CodeStarted",
    "CodeStderr",
    "CodeStdout",
    "Execution",
    "InputRequested",
]

CHART = "application/vnd.cloche.chart+json"


@dataclass(frozen=True, slots=True)
class CodeStarted:
    """The code runs now, in this context."""

    context_id: str
    language: str


@dataclass(frozen=True, slots=True)
class CodeStdout:
    """Text of standard output."""

    text: str


@dataclass(frozen=True, slots=True)
class CodeStderr:
    """Text of standard error."""

    text: str


@dataclass(frozen=True, slots=True)
class CodeGap:
    """So many bytes of `stdout` or `stderr`, or so many results (`stream` is `result`), are missing here."""

    stream: str
    count: int


@dataclass(frozen=True, slots=True)
class CodeResult:
    """One thing that the code has shown, in all its forms by MIME type. `main`: it is the value of the last expression.

    `dropped`: sizes of forms that were too large, or broken.
    """

    data: Mapping[str, Any]
    main: bool = False
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str | None:
        """As plain text."""
        return self._text("text/plain")

    @property
    def html(self) -> str | None:
        """As HTML, of a table for example."""
        return self._text("text/html")

    @property
    def png(self) -> bytes | None:
        """As a picture, decoded."""
        return self._bytes("image/png")

    @property
    def jpeg(self) -> bytes | None:
        """As a photograph, decoded."""
        return self._bytes("image/jpeg")

    @property
    def svg(self) -> str | None:
        """As a drawing."""
        return self._text("image/svg+xml")

    @property
    def markdown(self) -> str | None:
        """As Markdown."""
        return self._text("text/markdown")

    @property
    def latex(self) -> str | None:
        """As LaTeX."""
        return self._text("text/latex")

    @property
    def json(self) -> Any:
        """The value of `application/json`."""
        return self.data.get("application/json")

    @property
    def chart(self) -> Mapping[str, Any] | None:
        """The data that a matplotlib figure is drawn from."""
        found = self.data.get(CHART)
        return found if isinstance(found, Mapping) else None

    def _text(self, mime: str) -> str | None:
        found = self.data.get(mime)
        return found if isinstance(found, str) else None

    def _bytes(self, mime: str) -> bytes | None:
        found = self._text(mime)
        return None if found is None else base64.b64decode(found)

    def __str__(self) -> str:
        return self.text if self.text is not None else json.dumps(sorted(self.data))


@dataclass(frozen=True, slots=True)
class CodeException:
    """An exception that the code has not caught."""

    name: str
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return self.traceback or f"{self.name}: {self.message}"


@dataclass(frozen=True, slots=True)
class InputRequested:
    """The code waits for a line; see `contexts.answer`."""

    prompt: str
    password: bool = False


@dataclass(frozen=True, slots=True)
class CodeEnd:
    """How it ended. `state_lost`: the kernel is a new one. `detail`: a sentence about another end than its own."""

    status: Literal["ok", "error", "timeout", "interrupted", "killed", "oom"]
    execution_count: int = 0
    duration_ms: float = 0.0
    state_lost: bool = False
    detail: str | None = None


CodeEvent: TypeAlias = (
    CodeStarted | CodeStdout | CodeStderr | CodeGap | CodeResult | CodeException | InputRequested | CodeEnd
)


@dataclass(frozen=True, slots=True)
class Execution:
    """A run of code that has ended, well or not."""

    status: str
    context_id: str
    language: str
    results: Sequence[CodeResult] = ()
    stdout: str = ""
    stderr: str = ""
    error: CodeException | None = None
    execution_count: int = 0
    duration_ms: float = 0.0
    state_lost: bool = False
    detail: str | None = None
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    results_dropped: int = 0

    @property
    def ok(self) -> bool:
        """It has run to its end without an exception."""
        return self.status == "ok"

    @property
    def result(self) -> CodeResult | None:
        """The value of the last expression."""
        return next((one for one in self.results if one.main), None)

    @property
    def text(self) -> str | None:
        """That value as plain text."""
        return None if self.result is None else self.result.text


@dataclass(frozen=True, slots=True)
class CodeContext:
    """A kernel with the state of what has run in it. `raw` holds the whole answer."""

    id: str
    language: str
    state: str = "idle"
    cwd: str | None = None
    cells: int = 0
    execution_count: int = 0
    created_at: datetime | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
