"""A blocking answer that keeps impatient clients: after a while it begins, with JSON white space.

The status is then committed as 200, so a failure that comes later is told in the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche_server.api.errors import error_body, error_response, result_fields
from cloche_server.api.respond import big_json_response, dump, killed, wait_gone, waited
from cloche_server.core.errors import ClocheError

#: These clients give up after 30 s without a byte, and can't be told to wait; white space keeps them.
KEEPALIVE_AGENTS = ("pandastack-py/",)
FIRST_SECONDS = 15.0
#: For clients that have not asked: as late as their own limit of 30 s allows, since it costs the status.
LATE_SECONDS = 25.0
THEN_SECONDS = 10.0
#: What a shell says of a command that `timeout(1)` has ended.
TIMEOUT_EXIT_CODE = 124


class KeepaliveResponse(Response):
    """`asked`: the client knows what it gets; else it is one that would give up by itself. `show` makes the body of
    what comes of `work`."""

    def __init__(
        self,
        request: Request,
        work: Coroutine[Any, Any, Any],
        headers: Mapping[str, str],
        *,
        asked: bool,
        show: Callable[[Any], Mapping[str, Any]] = result_fields,
    ) -> None:
        super().__init__(status_code=200)
        self._first = FIRST_SECONDS if asked else LATE_SECONDS
        self._request = request
        self._work = work
        self._show = show
        self._extra_headers = headers
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._work)
        gone = asyncio.ensure_future(wait_gone(self._request))
        try:
            await asyncio.wait(waited(task, gone), timeout=self._first, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await self._answer(task, scope, receive, send)
            elif not gone.done():
                await self._drip(task, gone, send)
        except asyncio.CancelledError:
            if self._begun or not self._request.app.state.services.stopping.is_set():
                raise
            task.cancel()
            await asyncio.wait({task})
            await error_response(killed(), self._request.scope["cloche.request_id"])(scope, receive, send)
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not task.cancelled():
                task.exception()

    async def _answer(self, task: asyncio.Future[Any], scope: Scope, receive: Receive, send: Send) -> None:
        self._begun = True
        try:
            response = await big_json_response(self._show(task.result()), 200, self._extra_headers)
        except ClocheError as error:
            response = error_response(error, self._request.scope["cloche.request_id"])
        await response(scope, receive, send)

    async def _drip(self, task: asyncio.Future[Any], gone: asyncio.Future[None], send: Send) -> None:
        headers = {"content-type": "application/json", **self._extra_headers}
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        while not task.done() and not gone.done():
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.wait(waited(task, gone), timeout=THEN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return
        try:
            body = self._show(task.result())
        except ClocheError as error:
            body = self._failure(error)
        await send({"type": "http.response.body", "body": await asyncio.to_thread(dump, body), "more_body": False})

    def _failure(self, error: ClocheError) -> dict[str, Any]:
        told = error_body(error, self._request.scope["cloche.request_id"])
        details = told["details"]
        return {
            "stdout": "",
            "stderr": "",
            **details,
            **told,
            "exit_code": TIMEOUT_EXIT_CODE if error.code == "exec.timeout" else details.get("exit_code", 1),
        }
