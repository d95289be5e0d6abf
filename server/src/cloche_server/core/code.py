"""What the code interpreter of a guest says, read strictly: every byte of it may be a lie. Pure.

The bridge in the guest sends frames, each a length of 4 bytes and an object in JSON. What has another form is
`guest.protocol`; what is only odd, such as a picture that is not base64, is left out, and that is told.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

from cloche_server.core.errors import ClocheError

#: Where the bridge listens, on the loopback of the guest, and the program that starts it.
CODE_PORT: Final = 1011
BRIDGE: Final = "/usr/local/lib/cloche/code-bridge"
TEMPLATE: Final = "code-interpreter"
LANGUAGES: Final = ("python", "javascript", "typescript", "bash", "r")
ALIASES: Final = {
    "py": "python",
    "python3": "python",
    "js": "javascript",
    "node": "javascript",
    "ts": "typescript",
    "sh": "bash",
}
#: Bytes of one frame: a result may hold 8 Mi characters.
MAX_FRAME: Final = 16 * 1024 * 1024 + 64 * 1024
MAX_CONTEXTS: Final = 24
_MAX_TEXT: Final = 256 * 1024
_MAX_NAME: Final = 1024
_MAX_ERROR: Final = 1024 * 1024
_MAX_TYPES: Final = 32
_MIME: Final = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,100}/[a-z0-9][a-z0-9!#$&^_.+-]{0,100}")
_CONTEXT: Final = re.compile(r"[a-z0-9-]{1,64}")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/]*={0,2}")
#: These are pictures and documents in base64; other images are text.
_BINARY: Final = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp", "application/pdf"})

CodeStatus: TypeAlias = Literal["ok", "error", "timeout", "interrupted", "killed", "oom"]
Stream: TypeAlias = Literal["stdout", "stderr", "result"]
_STATUSES: Final[tuple[CodeStatus, ...]] = get_args(CodeStatus)
_STREAMS: Final[tuple[Stream, ...]] = get_args(Stream)


@dataclass(frozen=True, slots=True)
class CodeStarted:
    context_id: str
    language: str


@dataclass(frozen=True, slots=True)
class CodeText:
    stream: Stream
    text: str


@dataclass(frozen=True, slots=True)
class CodeGap:
    """What is missing here: bytes of a stream, or so many results."""

    stream: Stream
    count: int


@dataclass(frozen=True, slots=True)
class CodeResult:
    """One thing in several forms, by MIME type: text, base64 for pictures, and for JSON the value itself. `main`: it is
    the value of the last expression. `dropped`: sizes of forms that were too large or no such form."""

    data: Mapping[str, Any]
    main: bool
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CodeError:
    name: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class CodeInput:
    prompt: str
    password: bool


@dataclass(frozen=True, slots=True)
class CodeAlive:
    """The bridge is there, and has nothing to say."""


@dataclass(frozen=True, slots=True)
class CodeEnd:
    """`state_lost`: the kernel has ended, and a new one was started. `exit_code` or `signal` say how it has ended,
    `cause` whether somebody wanted it."""

    status: CodeStatus
    execution_count: int
    duration_ms: float
    state_lost: bool = False
    exit_code: int | None = None
    signal: str | None = None
    cause: str = ""

    @property
    def detail(self) -> str | None:
        """A sentence about an end that was not that of the code."""
        lost = "its state is lost, and a new kernel was started"
        if self.status == "oom":
            return f"the sandbox had no memory left and the kernel was killed; {lost}"
        if self.status == "timeout" and self.state_lost:
            return f"the code ran into its timeout and the kernel had to be killed; {lost}"
        if self.status == "timeout":
            return "the code ran into its timeout and was interrupted; the state of the context is kept"
        if self.cause in {"restarted", "deleted"}:
            return f"the context was {self.cause} while the code ran"
        if not self.state_lost:
            return None
        if self.signal is not None:
            return f"the kernel died by {self.signal}; {lost}"
        return f"the kernel died with exit code {self.exit_code}; {lost}" if self.exit_code is not None else lost


@dataclass(frozen=True, slots=True)
class CodeRefused:
    """Nothing was run. `reason` is one of `REASONS`."""

    reason: str
    limit: int | None = None


CodeEvent: TypeAlias = (
    CodeStarted | CodeText | CodeGap | CodeResult | CodeError | CodeInput | CodeAlive | CodeEnd | CodeRefused
)


@dataclass(frozen=True, slots=True)
class CodeContext:
    """A context as the guest describes it. `created_at`: Unix seconds by the guest's clock."""

    id: str
    language: str
    state: str
    created_at: float
    cells: int
    execution_count: int
    cwd: str | None = None


REASONS: Final = frozenset(
    {"no_context", "no_language", "too_many", "busy", "start_failed", "not_waiting", "no_user", "no_directory", "bad"}
)
_STATES: Final = frozenset({"idle", "busy", "not_started"})


class FrameReader:
    """Cuts bytes into the objects of frames. Raises `guest.protocol`."""

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def waiting(self) -> bool:
        """Half of a frame has come."""
        return bool(self._pending)

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        self._pending += data
        found = []
        while len(self._pending) >= 4:
            size = int.from_bytes(self._pending[:4], "big")
            if size > MAX_FRAME:
                raise nonsense("a frame that is too long")
            if len(self._pending) < 4 + size:
                break
            found.append(_object(bytes(self._pending[4 : 4 + size])))
            del self._pending[: 4 + size]
        return found


def frame(request: Mapping[str, Any]) -> bytes:
    """A request as it goes to the bridge."""
    body = json.dumps(request, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


def nonsense(what: str) -> ClocheError:
    return ClocheError("guest.protocol", f"the code interpreter in the sandbox answered with {what}")


def event(data: Mapping[str, Any]) -> CodeEvent:
    """One event of a run. Raises `guest.protocol`."""
    kind = data.get("type")
    if kind in {"stdout", "stderr"}:
        return CodeText(kind, _text(data, "text", _MAX_TEXT))
    if kind == "result":
        return _result(data)
    if kind == "started":
        return CodeStarted(context_id(data.get("context")), _language(data.get("language")))
    if kind == "gap":
        stream = data.get("stream")
        for known in _STREAMS:
            if stream == known:
                return CodeGap(known, _whole(data.get("count")))
        raise nonsense("a gap in no stream")
    if kind == "error":
        return CodeError(
            _text(data, "name", _MAX_NAME), _text(data, "message", _MAX_ERROR), _text(data, "traceback", _MAX_ERROR)
        )
    if kind == "input":
        return CodeInput(_text(data, "prompt", _MAX_TEXT), data.get("password") is True)
    if kind == "alive":
        return CodeAlive()
    if kind == "end":
        return _end(data)
    if kind == "refused":
        return refused(data)
    raise nonsense("an event that is not known")


def refused(data: Mapping[str, Any]) -> CodeRefused:
    """Raises `guest.protocol`."""
    reason = data.get("reason")
    if not isinstance(reason, str) or reason not in REASONS:
        raise nonsense("a refusal without a reason")
    return CodeRefused(reason, _whole(data["limit"]) if "limit" in data else None)


def context(data: object) -> CodeContext:
    """Raises `guest.protocol`."""
    if not isinstance(data, dict):
        raise nonsense("a context that is no object")
    state, cwd = data.get("state"), data.get("cwd")
    return CodeContext(
        context_id(data.get("id")),
        _language(data.get("language")),
        state if isinstance(state, str) and state in _STATES else "idle",
        min(_number(data.get("created_at")), 253_402_300_799.0),
        _whole(data.get("cells")),
        _whole(data.get("execution_count")),
        clean(cwd[:4096]) if isinstance(cwd, str) else None,
    )


def contexts(data: object) -> list[CodeContext]:
    """Raises `guest.protocol`."""
    if not isinstance(data, list) or len(data) > MAX_CONTEXTS:
        raise nonsense("a list of contexts that is none")
    return [context(item) for item in data]


def context_id(value: object) -> str:
    """Raises `guest.protocol`."""
    if not isinstance(value, str) or not _CONTEXT.fullmatch(value):
        raise nonsense("a context without an id")
    return value


def is_context_id(value: str) -> bool:
    return _CONTEXT.fullmatch(value) is not None


def language_of(name: str) -> str | None:
    """The language behind a name or alias; None for one that there is no kernel for."""
    folded = name.lower()
    found = ALIASES.get(folded, folded)
    return found if found in LANGUAGES else None


def clean(text: str) -> str:
    """Without halves of characters, which no encoding could carry on."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _object(raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        raise nonsense("what is not JSON") from None
    if not isinstance(data, dict):
        raise nonsense("what is no object")
    return data


def _language(value: object) -> str:
    if not isinstance(value, str) or value not in LANGUAGES:
        raise nonsense("a language that is not known")
    return value


def _text(data: Mapping[str, Any], key: str, most: int) -> str:
    value = data.get(key)
    if not isinstance(value, str) or len(value) > most:
        raise nonsense(f"a {key} that is none")
    return clean(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise nonsense("a number that is none")
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise nonsense("a number that is none")
    return value


def _result(data: Mapping[str, Any]) -> CodeResult:
    forms, told = data.get("data"), data.get("dropped", {})
    if not isinstance(forms, dict) or not isinstance(told, dict) or len(forms) + len(told) > 2 * _MAX_TYPES:
        raise nonsense("a result that is none")
    found: dict[str, Any] = {}
    dropped = {mime: _whole(size) for mime, size in told.items() if _MIME.fullmatch(mime)}
    for mime, text in forms.items():
        if not isinstance(text, str):
            raise nonsense("a result that is no text")
        if not _MIME.fullmatch(mime):
            continue
        value = _form(mime, text)
        if value is None:
            dropped[mime] = len(text)
        else:
            found[mime] = value[0]
    return CodeResult(found, data.get("main") is True, dropped)


def _form(mime: str, text: str) -> tuple[Any] | None:
    """What a MIME type stands for; None when it is not that."""
    if mime in _BINARY:
        flat = text.replace("\n", "")
        return (flat,) if len(flat) % 4 == 0 and _BASE64.fullmatch(flat) else None
    if mime == "application/json" or mime.endswith("+json"):
        try:
            return (_finite(json.loads(text)),)
        except (ValueError, RecursionError):
            return None
    return (clean(text),)


def _finite(value: Any, depth: int = 0) -> Any:
    """JSON as the standard has it: no NaN, no halves of characters, not too deep."""
    if depth > 100:
        raise ValueError("too deep")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_finite(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {clean(key): _finite(item, depth + 1) for key, item in value.items()}
    return value


def _status(value: object) -> CodeStatus:
    for known in _STATUSES:
        if value == known:
            return known
    raise nonsense("an end without a status")


def _end(data: Mapping[str, Any]) -> CodeEnd:
    code, name, cause = (data.get(key) for key in ("exit_code", "signal", "cause"))
    if name is not None and not (isinstance(name, str) and re.fullmatch(r"[A-Z0-9+_]{1,20}", name)):
        raise nonsense("a signal that is none")
    return CodeEnd(
        _status(data.get("status")),
        _whole(data.get("execution_count")),
        _number(data.get("duration_ms")),
        data.get("state_lost") is True,
        None if code is None else _whole(code),
        name,
        cause if cause in {"restarted", "deleted", "interrupted"} else "",
    )
