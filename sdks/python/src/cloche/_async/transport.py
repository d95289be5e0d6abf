"""Sending a `Call`: the only place that talks to the HTTP library, and the only one that repeats a call."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from .. import _aio, _call, _wire
from .._call import Call
from .._config import Settings
from ..errors import ClocheError, ProtocolError

MAX_ERROR_BODY = 64 * 1024 * 1024


class AsyncTransport:
    """Settings and connections."""

    def __init__(self, settings: Settings, pool: _aio.Pool) -> None:
        self.settings = settings
        self.pool = pool

    async def json(self, call: Call) -> Any:
        """Send a call and return the JSON it is answered with; None for an empty answer."""
        async with self.open(call) as response:
            with _call.translated(call):
                body = await response.aread()
        if not body.strip():
            return None
        data = _wire.parse_json(body)
        if call.exec_id and isinstance(data, dict) and "error" in data:
            raise _call.told(call, data, response.status_code, response.headers.get("x-request-id", ""))
        return data

    async def content(self, call: Call) -> bytes:
        """Send a call and return the body of the answer."""
        async with self.open(call) as response:
            with _call.translated(call):
                return await response.aread()

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[httpx.Response]:
        """Send a call and give out the answer with its body unread; a refusal raises its typed error."""
        response = await self._send(call)
        try:
            yield response
        finally:
            await response.aclose()

    async def _send(self, call: Call) -> httpx.Response:
        started = time.monotonic()
        attempt = 0
        while True:
            try:
                return await self._send_once(call)
            except ClocheError as error:
                elapsed = time.monotonic() - started
                delay = _call.retry_delay(call, error, attempt, elapsed, self.settings.max_retry_seconds)
                if delay is None:
                    raise
            attempt += 1
            await _aio.sleep(delay)

    async def _send_once(self, call: Call) -> httpx.Response:
        http = await self.pool.client()
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
        headers = {"Authorization": f"Bearer {self.settings.api_key}", "Accept": call.accept}
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
