"""Answering: JSON, reading JSON bodies, and work that ends when its client is gone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from cloche_server.core.errors import ClocheError

_T = TypeVar("_T")
_M = TypeVar("_M", bound=BaseModel)
_SURROGATE = re.compile("[\ud800-\udfff]")

_ENCODER = json.JSONEncoder(separators=(",", ":"))

#: Above this many characters JSON is made on a thread, so that other requests go on meanwhile.
_BIG = 256 * 1024


class ClientGone(Exception):
    """The client has hung up; there is nobody to answer."""


def dump(value: object) -> bytes:
    """JSON in ASCII: no character that some client takes for the end of a line."""
    return _ENCODER.encode(value).encode("ascii")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(value), status, dict(headers or {}), "application/json")


async def big_json_response(
    value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """For answers that may hold megabytes of output."""
    size = sum(len(part) for part in value.values() if isinstance(part, str))
    body = await asyncio.to_thread(dump, value) if size > _BIG else dump(value)
    return Response(body, status, dict(headers or {}), "application/json")


async def read_body(request: Request, limit: int | None = None) -> bytes:
    """The whole body, of any content type. Without `limit` (bytes) that of the settings counts.

    Raises `request.too_large`, `request.timeout`, ClientGone.
    """
    settings = request.app.state.services.settings
    try:
        async with asyncio.timeout(settings.body_timeout):
            return await _read(request, settings.max_json_kb * 1024 if limit is None else limit)
    except TimeoutError:
        raise ClocheError(
            "request.timeout",
            f"the request body was not whole after {settings.body_timeout:g} s",
            details={"limit_seconds": settings.body_timeout},
        ) from None


async def _read(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise ClocheError(
                "request.too_large",
                f"the request body is larger than {limit} bytes",
                details={"limit_bytes": limit},
            )
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def read_model(request: Request, model: type[_M], limit: int | None = None) -> _M:
    """A JSON body as `model`. Raises `request.invalid`, `request.too_large`, `request.timeout`, ClientGone."""
    return parse_model(await read_body(request, limit), model)


def parse_model(raw: bytes, model: type[_M]) -> _M:
    """`raw` as `model`; nothing, white space and `{}` are the same, and so are an absent field and null.

    Raises `request.invalid`.
    """
    try:
        return model.model_validate(_json_object(raw))
    except ValidationError as error:
        raise invalid_fields(error.errors(include_url=False, include_context=False)) from None


def _json_object(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        return {}
    try:
        # Strict, and UTF-8 only: `json` by itself would take half characters and UTF-16.
        data = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ClocheError("request.invalid", "the request body is not JSON in UTF-8") from None
    if not isinstance(data, dict):
        raise ClocheError("request.invalid", "the request body is not a JSON object")
    if b"\\u" in raw:
        _refuse_surrogates(data)
    return {name: _number(value) for name, value in data.items() if value is not None}


def _number(value: Any) -> Any:
    """JSON has no integers: 60.0 is as good as 60."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse_surrogates(value: object) -> None:
    """Half a character is no text: it can be neither stored nor passed to a program."""
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise ClocheError("request.invalid", "the request body holds half of a surrogate pair, which is not text")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key)
            _refuse_surrogates(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_surrogates(item)


def invalid_fields(errors: Any, places: frozenset[str] = frozenset()) -> ClocheError:
    """One sentence about the first bad field, and all of them in the details.

    `places`: names that may stand before the name of a field, and are not part of it.
    """
    problems = []
    for error in errors:
        where = [str(part) for part in error["loc"]]
        if where and where[0] in places:
            where = where[1:]
        problem = str(error["msg"]).removeprefix("Value error, ")
        problems.append({"field": ".".join(where), "problem": problem[:1].lower() + problem[1:]})
    first = problems[0]
    what = f"{first['field']}: {first['problem']}" if first["field"] else first["problem"]
    return ClocheError("request.invalid", f"the request is not valid: {what}", details={"fields": problems[:20]})


async def wait_gone(request: Request) -> None:
    """Returns when the client has hung up. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def undone() -> ClocheError:
    """Work that leaves nothing when it is cancelled was cancelled because the server ends."""
    return ClocheError("server.shutting_down", "the server is shutting down; try again", retry_after=2)


def killed() -> ClocheError:
    """A command was killed because the server ends. It may have done anything, so this is not retryable."""
    return ClocheError("exec.cancelled", "the server is shutting down and has ended the command")


def waited(*futures: asyncio.Future[Any]) -> set[asyncio.Future[Any]]:
    """Futures of different results, to wait for together."""
    return set(futures)


async def while_connected(
    request: Request, work: Coroutine[Any, Any, _T], ended: Callable[[], ClocheError] = undone
) -> _T:
    """The result of `work`; when the client hangs up first, `work` is cancelled and `ClientGone` raised.

    When the server ends first, `work` is cancelled too, and the error that `ended` makes is raised.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_gone(request))
    try:
        await asyncio.wait(waited(task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            return task.result()
        raise ClientGone
    except asyncio.CancelledError:
        if task.cancelled() or not request.app.state.services.stopping.is_set():
            raise
        task.cancel()
        await asyncio.wait({task})
        raise ended() from None
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved: an error after the client has gone is of no use to anybody
