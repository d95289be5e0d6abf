"""One request to the API as data, and the rules about it: its URL, its limits, what its failure means,
and whether it may be sent again. No I/O.

Rules for sending again, and there are no others:

* no connection came about: nothing was sent, so any call may be repeated, three times within seconds;
* a call was answered 429 with `Retry-After`: it was not carried out, so any call whose body is still there is repeated
  within the retry budget;
* create or fork was answered 503 with `Retry-After`: nothing was made, so it is repeated within the retry budget;
* the answer of create was lost: it is repeated once, under the same idempotency key, which makes no second one;
* a call that changes nothing, or nothing more the second time (`safe`), broke off or met a retryable refusal: it is
  repeated once.

A command is never run twice, and nothing is forked or captured twice.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode

import httpx

from . import _codes, _wire, errors
from ._version import __version__
from .models import ExecResult

Kind = Literal["safe", "create", "fork", "other"]
Body = bytes | Iterable[bytes] | AsyncIterable[bytes]

CONNECT_TIMEOUT: Final = 10.0
#: Streams and long answers carry a sign of life every 15 s; this much silence means that the peer is gone.
SILENCE: Final = 60.0
#: Work behind one answer that may take long: baking a size on its first use, deleting a tree, a big upload.
SLOW: Final = 300.0

CONNECT_DELAYS: Final = (0.2, 0.5, 1.0)
SAFE_DELAY: Final = 0.1

USER_AGENT: Final = f"cloche-python/{__version__}"


@dataclass(frozen=True, slots=True)
class Call:
    """A request. `silence` is how long the server may send nothing, not how long the call may take."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    json: Mapping[str, Any] | None = None
    content: Body | None = None
    kind: Kind = "other"
    silence: float = 0.0
    exec_id: str = ""
    encoding: _wire.Output = "utf-8"
    accept: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    def url(self, base: str) -> str:
        """The whole URL. Encoded here, once, so that no name of a file can be decoded twice."""
        query = "?" + urlencode(self.params, quote_via=quote, safe="/") if self.params else ""
        return base + self.path + query


def path(*parts: str) -> str:
    """`/v1/…` with each part encoded."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def params(**values: str | float | bool | None) -> dict[str, str]:
    """Query parameters; None is left out, booleans become 1 and 0."""
    return {
        name: str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if value is not None
    }


def timeout(call: Call, default: float) -> httpx.Timeout:
    """Limits for connecting and for silence; there is none on the whole, bytes may flow for hours."""
    wait = max(call.silence, default)
    return httpx.Timeout(wait, connect=min(CONNECT_TIMEOUT, default), pool=wait)


def retry_delay(call: Call, error: errors.ClocheError, attempt: int, elapsed: float, budget: float) -> float | None:
    """Seconds until `call` is sent again after `error`, or None if it is not. `attempt` counts from 0."""
    if isinstance(error, errors.ConnectFailed):
        delay = CONNECT_DELAYS[attempt] if attempt < len(CONNECT_DELAYS) and error.retryable else None
    elif error.retry_after is not None and _not_carried_out(call, error):
        spread = min(15.0, 2.0**attempt)
        delay = error.retry_after + random.uniform(0, min(spread, max(0.1, error.retry_after)))  # noqa: S311
    elif call.kind == "create" and attempt == 0 and _lost(error):
        delay = SAFE_DELAY
    elif call.kind == "safe" and attempt == 0 and (_lost(error) or _refused_for_now(error)):
        delay = max(SAFE_DELAY, error.retry_after or 0)
    else:
        delay = None
    return delay if delay is not None and elapsed + delay <= budget else None


def _not_carried_out(call: Call, error: errors.ClocheError) -> bool:
    if isinstance(error, errors.RateLimitError):
        return call.content is None or isinstance(call.content, bytes)
    return call.kind in ("create", "fork") and error.status == 503


def _lost(error: errors.ClocheError) -> bool:
    return isinstance(error, errors.ConnectionLost) and not isinstance(error, errors.RequestTimeout)


def _refused_for_now(error: errors.ClocheError) -> bool:
    return error.retryable or (error.status == 503 and error.retry_after is not None)


# --- failures of the connection

_NOTHING_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)


@contextmanager
def translated(call: Call) -> Iterator[None]:
    """Turn the HTTP library's exceptions into ours; the original stays as the cause."""
    try:
        yield
    except httpx.PoolTimeout as error:
        raise _named(
            errors.ConnectFailed("all connections are in use; raise max_connections of the client"), call
        ) from error
    except _NOTHING_SENT as error:
        failed = errors.ConnectFailed(f"cannot connect to the server: {_reason(error)}", retryable=True)
        raise _named(failed, call) from error
    except httpx.TimeoutException as error:
        silent = errors.RequestTimeout("the server was silent for too long; the connection was given up")
        raise _named(silent, call) from error
    except httpx.TransportError as error:
        lost = errors.ConnectionLost(f"the connection ended before the answer did: {_reason(error)}")
        raise _named(lost, call) from error
    except httpx.InvalidURL as error:
        raise errors.ConfigError(f"the server address is not a URL: {error}") from error


def _named(error: errors.TransportError, call: Call) -> errors.TransportError:
    error.exec_id = call.exec_id
    return error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


# --- failures told by the server


def refusal(call: Call, status: int, headers: Mapping[str, str], body: bytes) -> errors.ClocheError:
    """The typed error for an answer that is not a success."""
    try:
        data = _wire.record(_wire.parse_json(body))
    except errors.ProtocolError:
        data = {}
    if not isinstance(data.get("error"), str) or not isinstance(data.get("code", ""), str):
        data = {"error": f"the server answered with HTTP status {status}"}
    if 300 <= status < 400:
        return errors.ProtocolError(f"the server redirects (HTTP {status}); is the address right?", status=status)
    return told(call, data, status, headers.get("x-request-id", ""), _seconds(headers.get("retry-after")))


def told(
    call: Call, data: _wire.Json, status: int, request_id: str = "", retry_after: float | None = None
) -> errors.ClocheError:
    """The typed error for an error object, whether it came as an answer, inside one, or as an event."""
    code = str(data.get("code") or "")
    kind = _codes.class_for(code, status)
    details = data.get("details")
    fields = dict(details) if isinstance(details, Mapping) else {}
    if "timeout_seconds" in data:
        fields.setdefault("timeout_seconds", data["timeout_seconds"])
    detail = data.get("detail")
    error = kind(
        detail if data["error"] == "unauthorized" and isinstance(detail, str) and detail else str(data["error"]),
        code or f"http.{status}",
        status,
        bool(data.get("retryable", False)),
        str(data.get("request_id") or request_id),
        fields,
        retry_after=retry_after,
    )
    if isinstance(error, errors.CommandError):
        error.result = _partial(call, {**data, **fields})
    return error


def _partial(call: Call, data: _wire.Json) -> ExecResult[Any]:
    """What a command had yielded when it was ended. No field is required: this is part of an error."""
    fallback = {"exec_id": call.exec_id, "exit_code": 124}
    if str(data.get("code")) == "exec.timeout" and "termination" not in data:
        fallback["termination"] = {"reason": "timeout"}
    known = {name: value for name, value in data.items() if value is not None}
    return _wire.exec_result({**fallback, **known}, call.encoding)


def _seconds(value: str | None) -> float | None:
    """`Retry-After` in seconds; the server never sends the date form."""
    try:
        return max(0.0, float(value)) if value else None
    except ValueError:
        return None
