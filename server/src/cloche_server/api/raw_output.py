"""The output of a process as bytes and nothing else."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche_server.api.respond import ClientGone, wait_gone, waited
from cloche_server.app.process_output import Chunk, Item, Loss, ProcessStream
from cloche_server.core.errors import ClocheError


class OutputLost(Exception):
    """Bytes are missing in the middle of an answer: it is cut off, so that nobody takes it for the whole."""


class RawOutput(Response):
    """Bytes as they come, until the source ends."""

    def __init__(self, request: Request, source: ProcessStream, stopping: asyncio.Event) -> None:
        super().__init__(status_code=200)
        self._request = request
        self._source = source
        self._stopping = stopping
        self._begun = False
        self._send: Send | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        gone = asyncio.ensure_future(wait_gone(self._request))
        stop = asyncio.ensure_future(self._stopping.wait())
        work = asyncio.ensure_future(self._copy())
        try:
            await asyncio.wait(waited(gone, stop, work), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone
            if not work.done():
                raise ClocheError("server.shutting_down", "the server is shutting down; connect again later")
            work.result()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for task in (gone, stop, work):
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
            await self._source.aclose()

    async def _copy(self) -> None:
        at = self._source.offset
        async for item in self._source.items():
            if isinstance(item, Loss) and self._begun:
                raise OutputLost
            if isinstance(item, Loss):
                at = item.next
                continue
            await self._start(at)
            await self._pass(item)
        await self._start(at)

    async def _pass(self, item: Item) -> None:
        if isinstance(item, Chunk):
            assert self._send is not None
            await self._send({"type": "http.response.body", "body": item.data, "more_body": True})

    async def _start(self, at: int) -> None:
        if self._begun:
            return
        self._begun = True
        assert self._send is not None
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"cache-control", b"no-cache"),
            (b"x-output-from", str(at).encode()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
