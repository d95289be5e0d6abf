"""Sending a `Call`: the only place that talks to the HTTP library, and the only one that repeats a call.

What outlives a call here is an object with `aclose`, never a suspended generator: an event loop that ends,
or a garbage collector, closes generators in any order and would trip over nested ones.
"""

from __future__ import annotations

import json
import time
from types import TracebackType
from typing import Any, Self

import httpx

from .. import _aio, _call, _wire
from .._call import Call
from .._config import Settings
from ..errors import ClocheError, ProtocolError

MAX_ERROR_BODY = 64 * 1024 * 1024


class AsyncBody:
    """An answer whose body is read as it comes. The HTTP library's errors become ours on the way."""

    def __init__(self, call: Call, response: httpx.Response, chunk_size: int | None = None) -> None:
        self.response = response
        self._call = call
        self._chunks = response.aiter_raw(chunk_size)

    def header(self, name: str) -> str:
        """A header of the answer, empty if it is not there."""
        return str(self.response.headers.get(name, ""))

    async def next(self) -> bytes | None:
        """The next piece, or None at the end."""
        with _call.translated(self._call):
            return await anext(self._chunks, None)

    async def read(self) -> bytes:
        """All of it."""
        with _call.translated(self._call):
            return await self.response.aread()

    async def aclose(self) -> None:
        """Let go of the connection; it can be used again if the body was read to its end."""
        await self.response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncTransport:
    """Settings and connections."""

    def __init__(self, settings: Settings, pool: _aio.Pool) -> None:
        self.settings = settings
        self.pool = pool

    async def json(self, call: Call) -> Any:
        """Send a call and return the JSON it is answered with; None for an empty answer."""
        async with await self.open(call) as answer:
            body = await answer.read()
        if not body.strip():
            return None
        data = _wire.parse_json(body)
        if call.exec_id and isinstance(data, dict) and "error" in data:
            raise _call.told(call, data, answer.response.status_code, answer.header("x-request-id"))
        return data

    async def content(self, call: Call) -> bytes:
        """Send a call and return the body of the answer."""
        async with await self.open(call) as answer:
            return await answer.read()

    async def open(self, call: Call, chunk_size: int | None = None) -> AsyncBody:
        """Send a call and return the answer with its body unread; a refusal raises its typed error."""
        started = time.monotonic()
        attempt = 0
        while True:
            try:
                return AsyncBody(call, await self._send_once(call), chunk_size)
            except ClocheError as error:
                elapsed = time.monotonic() - started
                delay = _call.retry_delay(call, error, attempt, elapsed, self.settings.max_retry_seconds)
                if delay is None:
                    raise
            attempt += 1
            await _aio.sleep(delay)

    async def _send_once(self, call: Call) -> httpx.Response:
        http = await self.pool.client(self.settings.api_url)
        with _call.translated(call):
            response = await http.send(self._request(http, call), stream=True)
        if response.is_success:
            return response
        try:
            with _call.translated(call):
                body = await self._error_body(response)
        finally:
            await response.aclose()
        raise _call.refusal(call, response.status_code, response.headers, body)

    def _request(self, http: httpx.AsyncClient, call: Call) -> httpx.Request:
        headers = {"Authorization": f"Bearer {self.settings.api_key}", "Accept": call.accept, **call.headers}
        content: Any = call.content
        if call.json is not None:
            content = json.dumps(call.json, separators=(",", ":")).encode()
            headers["Content-Type"] = "application/json"
        elif content is not None:
            headers["Content-Type"] = "application/octet-stream"
        return http.build_request(
            call.method,
            call.url(self.settings.api_url),
            headers=headers,
            content=content,
            timeout=_call.timeout(call, self.settings.timeout),
        )

    async def _error_body(self, response: httpx.Response) -> bytes:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_ERROR_BODY:
                raise ProtocolError("the server's error answer is too large", status=response.status_code)
        return bytes(body)
