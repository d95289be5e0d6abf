"""HTTP/1.1 over asyncio in a thread of its own: enough for the tests, with the ability to break off."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote


@dataclass
class Request:
    """A request; `body` reads all of it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    reader: asyncio.StreamReader = field(repr=False)
    raw_path: str = ""
    consumed: bool = False
    content: bytes = b""

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body piece by piece. A body that is cut short raises IncompleteReadError."""
        self.consumed = True
        if self.headers.get("transfer-encoding") == "chunked":
            while True:
                size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
                data = (await self.reader.readexactly(size + 2))[:-2]
                if not size:
                    return
                yield data
        left = int(self.headers.get("content-length", "0"))
        while left:
            data = await self.reader.read(min(left, 65536))
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(data)
            yield data

    async def body(self) -> bytes:
        """The whole body."""
        if not self.consumed:
            self.content = b"".join([chunk async for chunk in self.chunks()])
        return self.content

    async def json(self) -> Any:
        """The body as JSON; none is the same as an empty object."""
        return json.loads(await self.body() or b"{}")


class Abort(Exception):
    """Close the connection at once."""


class Reply:
    """The way back."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.begun = False

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        self.begun = True
        lines = [f"HTTP/1.1 {status} Status", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        self._writer.write("\r\n".join(lines).encode("latin-1"))
        await self._writer.drain()

    async def send(self, status: int, body: bytes = b"", kind: str = "application/json", **headers: str) -> None:
        """A whole answer."""
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        await self._head(status, {"Content-Length": str(len(body)), "Content-Type": kind, **fields})
        await self.raw(body)

    async def json(self, status: int, data: Any, **headers: str) -> None:
        """A JSON answer."""
        await self.send(status, json.dumps(data).encode(), **headers)

    async def error(self, status: int, code: str, text: str = "it failed", **more: Any) -> None:
        """An error as the API sends it."""
        retry_after = more.pop("retry_after", None)
        headers = {} if retry_after is None else {"Retry_After": str(retry_after)}
        body = {"error": text, "code": code, "retryable": False, "request_id": "req1", "details": {}, **more}
        await self.json(status, body, **headers)

    async def begin(self, status: int, kind: str, length: int | None = None, **headers: str) -> None:
        """The head of an answer whose body follows by `chunk` (or by `raw`, with a length)."""
        size = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
        await self._head(status, {"Content-Type": kind, **size, **headers})

    async def chunk(self, data: bytes) -> None:
        """A piece of a chunked body."""
        if data:
            await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        """The end of a chunked body."""
        await self.raw(b"0\r\n\r\n")

    async def raw(self, data: bytes) -> None:
        """Bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def event(self, name: str, data: Any, event_id: int | None = None) -> None:
        """A server-sent event."""
        prefix = "" if event_id is None else f"id: {event_id}\n"
        await self.chunk(f"{prefix}event: {name}\ndata: {json.dumps(data)}\n\n".encode())

    def gone(self) -> bool:
        """The client has hung up."""
        return self._writer.is_closing()


Handler = Callable[[Request, Reply], Awaitable[None]]


class Server:
    """Runs `handle` for each request, in a thread."""

    def __init__(self) -> None:
        self.address = ""
        self.open_connections = 0
        self.total_connections = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def handle(self, request: Request, reply: Reply) -> None:
        """Answer a request."""
        raise NotImplementedError

    def start(self) -> str:
        """Start and return the address."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread.start()
        self._ready.wait()
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        return self.address

    def stop(self) -> None:
        """Stop, and close every connection."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, sock=self._socket, limit=2**20)
        self._ready.set()
        await self._stop.wait()
        server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        self.total_connections += 1
        # asyncio does this only where the listening socket names its protocol.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while await self._exchange(reader, writer):
                pass
        except (Abort, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self.open_connections -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        path, _, query = target.partition("?")
        pairs = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        request = Request(method, unquote(path), pairs, headers, reader, target)
        await self.handle(request, Reply(writer))
        if not request.consumed:
            await request.body()
        return True
