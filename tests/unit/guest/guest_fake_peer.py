"""A stand-in for the agent: the server side of h2 behind the sync handshake, with scripted answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from cloche_server.guest.h2link import Link

_SYNC = re.compile(rb"\nCLOCHE-SYNC ([0-9a-f]{32}) ([0-9]+)\n")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


class Call:
    """One request as the peer sees it."""

    def __init__(self, session: Session, number: int, headers: dict[str, str]) -> None:
        self.session, self.id, self.headers = session, number, headers
        self.body = bytearray()
        self.received = 0
        self.ended = asyncio.Event()
        self.reset: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.more = asyncio.Event()
        self.keep = True
        self.credit = True

    @property
    def path(self) -> str:
        return self.headers[":path"]

    def head(self, status: int = 200, *, end: bool = False, extra: list[tuple[str, str]] | None = None) -> None:
        self.session.h2.send_headers(self.id, [(":status", str(status)), *(extra or [])], end_stream=end)
        self.session.flush()

    async def send(self, data: bytes, *, end: bool = False) -> None:
        conn = self.session.h2
        view = memoryview(data)
        while view:
            room = min(conn.local_flow_control_window(self.id), conn.max_outbound_frame_size, len(view))
            if room <= 0 or self.session.paused:
                self.session.flush()
                self.session.window.clear()
                await self.session.window.wait()
                continue
            conn.send_data(self.id, bytes(view[:room]), end_stream=end and room == len(view))
            view = view[room:]
            self.session.flush()
        if end and not data:
            conn.end_stream(self.id)
            self.session.flush()

    async def answer(self, body: bytes = b"{}", status: int = 200, extra: list[tuple[str, str]] | None = None) -> None:
        self.head(status, extra=extra)
        await self.send(body, end=True)


class Session(asyncio.Protocol):
    def __init__(self, peer: FakePeer) -> None:
        self.peer = peer
        self.paused = False
        self.window = asyncio.Event()
        self.calls: dict[int, Call] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.in_h2 = False
        self.buf = b""
        self.lines: list[tuple[str, int]] = []
        self.raw = 0
        self.pings = 0
        self.goaway: int | None = None
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.peer.sessions.append(self)
        if self.peer.greeting:
            transport.write(self.peer.greeting)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        for task in self.tasks:
            task.cancel()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.window.set()

    def data_received(self, data: bytes) -> None:
        self.raw += len(data)
        if self.in_h2:
            self._feed(data)
            return
        self.buf += data
        if self.peer.mute:
            return
        for match in _SYNC.finditer(self.buf):
            self.lines.append((match[1].decode(), int(match[2])))
            self.peer.on_line(self, match[1].decode(), int(match[2]))
        at = self.buf.find(_PREFACE)
        if at >= 0:
            self._begin(self.buf[at:])
            self.buf = b""
        else:
            ends = [m.end() for m in _SYNC.finditer(self.buf)]
            self.buf = self.buf[ends[-1] - 1 :] if ends else self.buf

    def _begin(self, data: bytes) -> None:
        code = h2.settings.SettingCodes
        self.in_h2 = True
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                code.MAX_CONCURRENT_STREAMS: self.peer.max_streams,
                code.INITIAL_WINDOW_SIZE: self.peer.stream_window,
                code.MAX_FRAME_SIZE: 65536,
            },
        )
        self.h2.max_inbound_frame_size = 65536
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(4 << 20)
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self._event(event)
        self.window.set()
        self.flush()

    def _event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            call = self.calls[event.stream_id] = Call(
                self, event.stream_id, {_text(k): _text(v) for k, v in event.headers}
            )
            self.peer.calls.append(call)
            task = asyncio.ensure_future(self._run(call))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        elif isinstance(event, h2.events.DataReceived):
            call = self.calls[event.stream_id]
            call.received += len(event.data)
            if call.keep:
                call.body += event.data
            if call.credit:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            call.more.set()
        elif isinstance(event, h2.events.StreamEnded):
            self.calls[event.stream_id].ended.set()
        elif isinstance(event, h2.events.StreamReset):
            self.calls[event.stream_id].reset.set_result(int(event.error_code))
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.goaway = int(event.error_code or 0)

    async def _run(self, call: Call) -> None:
        with contextlib.suppress(h2.exceptions.StreamClosedError):  # reset by the client
            await self.peer.handler(call)

    def flush(self) -> None:
        if not self.transport.is_closing() and (data := self.h2.data_to_send()):
            self.transport.write(data)


async def _plain(call: Call) -> None:
    await call.answer()


class FakePeer:
    """Listens on `path`; `handler` answers every call."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.handler: Callable[[Call], Awaitable[None]] = _plain
        self.sessions: list[Session] = []
        self.calls: list[Call] = []
        self.greeting = b""
        self.mute = False
        self.max_streams = 512
        self.stream_window = 1 << 20
        self.generation = 1

    def on_line(self, session: Session, nonce: str, number: int) -> None:
        session.transport.write(f"\nCLOCHE-SYNC-OK {nonce} {number} {self.generation}\n".encode())

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: Session(self), self.path)

    async def stop(self) -> None:
        self._server.close()
        for session in self.sessions:
            session.transport.abort()
        for task in [t for s in self.sessions for t in s.tasks]:
            task.cancel()
            await asyncio.wait([task])
        await self._server.wait_closed()


CANCEL = int(h2.errors.ErrorCodes.CANCEL)


async def get(link: Link, path: str = "/v1/info") -> bytes:
    """A small call, read to its end."""
    return await (await link.request("GET", path)).read(10_000)


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait for something that comes true by itself."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


def answers(peer: FakePeer, body: object, status: int = 200) -> None:
    async def handler(call: Call) -> None:
        await call.ended.wait()
        await call.answer(b"" if body is None else json.dumps(body).encode(), status)

    peer.handler = handler


def query(call: Call) -> dict[str, str]:
    return {k: v[0] for k, v in parse_qs(urlsplit(call.path).query, strict_parsing=True).items()}
