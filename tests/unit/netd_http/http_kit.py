"""Real sockets for the engine: servers with certificates of an authority of their own, a carrier, and a raw client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11

from cloche_server.core.network import SecretGrant, SecretPlace
from cloche_server.host.certificates import KeyPair, issue, make_authority, server_context
from cloche_server.netd.flow import Dialed, Refused, Target, Verdict
from cloche_server.netd.http import Engine

PLACEHOLDER = "cloche-secret-key-0123456789abcdef01234567"
VALUE = "s3cr3t/Value+of=the&workspace"
HOST = "api.example.test"


@functools.cache
def public_authority() -> KeyPair:
    """Who the servers are certified by."""
    return make_authority("the public", time.time())


@dataclass(frozen=True)
class Own:
    """As the engine gets it."""

    certificate: str = field(default_factory=lambda: own_authority().certificate_pem.decode())
    key: str = field(default_factory=lambda: own_authority().key_pem.decode(), repr=False)


@functools.cache
def own_authority() -> KeyPair:
    """The workspace's."""
    return make_authority("the workspace", time.time())


def grant(**changes: Any) -> SecretGrant:
    return SecretGrant(**({"secret": "KEY", "placeholder": PLACEHOLDER, "hosts": (HOST,)} | changes))


ALL_PLACES = (SecretPlace.HEADER, SecretPlace.QUERY, SecretPlace.BODY)


async def _open_gate(sent: int, received: int) -> None:
    return None


@dataclass
class Double:
    """A carrier that dials what the test says, and remembers what it was told."""

    routes: dict[str, int] = field(default_factory=dict)
    grants: Sequence[SecretGrant] = ()
    values: dict[str, str] = field(default_factory=lambda: {"KEY": VALUE})
    denied: Callable[[str, str, str], bool] = lambda host, method, path: False
    notes: list[tuple[str, Verdict, str, str, str]] = field(default_factory=list)
    violations: list[tuple[str, str, str]] = field(default_factory=list)
    #: What the addresses of all names begin with.
    network: str = "127.0"
    dials: list[str] = field(default_factory=list)
    sent: int = 0
    received: int = 0
    paced: tuple[int, int] = (0, 0)
    gate: Callable[[int, int], Awaitable[None]] = _open_gate
    sandbox: str = "sb1"
    workspace: str = "ws1"

    def secret(self, name: str) -> str | None:
        return self.values.get(name)

    def reads_http(self, name: str, port: int) -> bool:
        return True

    def decide_request(self, target: Target, host: str, method: str, path: str) -> Verdict:
        if self.denied(host, method, path):
            return Verdict(False, "r1", "the policy does not allow this request")
        return Verdict(True, "r0", "allowed")

    def note(self, target: Target, kind: str, verdict: Verdict, *, host: str, method: str = "", path: str = "") -> None:
        self.notes.append((kind, verdict, host, method, path))

    def violated(self, secret: str, host: str, method: str) -> None:
        self.violations.append((secret, host, method))

    async def addresses(self, target: Target, host: str) -> Sequence[str]:
        if host not in self.routes:
            raise Refused(Verdict(False, "not-resolved", "the name is not allowed"))
        return [f"{self.network}.0.1#{host}"]

    async def dial(self, target: Target, addresses: Sequence[str]) -> Dialed:
        host = addresses[0].partition("#")[2]
        self.dials.append(host)
        dialed = socket.socket()
        dialed.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(dialed, ("127.0.0.1", self.routes[host]))
        except BaseException:
            dialed.close()
            raise
        return Dialed(dialed, addresses[0])

    async def pace(self, sent: int, received: int) -> None:
        self.paced = (self.paced[0] + sent, self.paced[1] + received)
        await self.gate(sent, received)

    def count(self, target: Target, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received

    def denials(self) -> list[tuple[str, str]]:
        return [(kind, verdict.rule) for kind, verdict, *_ in self.notes if not verdict.allowed]


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Stage:
    """Servers and doors to the engine, for one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.carrier = Double()
        self.public = folder / "public.pem"
        self.own = folder / "own.pem"
        self.public.write_bytes(public_authority().certificate_pem)
        self.own.write_bytes(own_authority().certificate_pem)
        self.engine = Engine(lambda workspace: Own(), now=time.time, extra_ca=self.public)
        self._servers: list[asyncio.Server] = []
        self._doors: list[tuple[socket.socket, asyncio.Task[None]]] = []
        self.serving: set[asyncio.Task[None]] = set()

    async def server(self, handler: Handler, *names: str, tls: bool = True, authority: KeyPair | None = None) -> int:
        """A server for these names; its port."""

        async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
                await handler(reader, writer)
            writer.close()
            with contextlib.suppress(Exception):
                await writer.wait_closed()

        names = names or (HOST,)
        context = server_context(issue(authority or public_authority(), names[0], time.time())) if tls else None
        server = await asyncio.start_server(handled, "127.0.0.1", 0, ssl=context, limit=1 << 20)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        self.carrier.routes |= dict.fromkeys(names, port)
        return port

    async def door(self, name: str | None = HOST, *, tls: bool = True, port: int | None = None) -> int:
        """A port whose connections the engine serves as those to `name`. `port`: the one that the guest meant; 0: the
        same."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        listener.setblocking(False)
        number: int = listener.getsockname()[1]
        target = Target(
            "203.0.113.7", ((443 if tls else 80) if port is None else port or number), name, tls, len(self._doors)
        )
        self._doors.append((listener, asyncio.create_task(self._accept(listener, target))))
        return number

    async def _accept(self, listener: socket.socket, target: Target) -> None:
        while True:
            guest, _ = await asyncio.get_running_loop().sock_accept(listener)
            task = asyncio.create_task(self.engine.serve(guest, target, self.carrier))
            self.serving.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.result()
        self.serving.discard(task)

    def trusting(self, file: Path | None = None) -> ssl.SSLContext:
        """The TLS of a program in a guest."""
        context = ssl.create_default_context(cafile=file or self.own)
        context.set_alpn_protocols(["h2", "http/1.1"])
        return context

    async def connect(
        self, port: int, *, tls: bool = True, name: str = HOST, direct: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = self.trusting(self.public if direct else None) if tls else None
        return await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=name if tls else None, limit=1 << 20
        )

    async def ask(
        self, port: int, request: bytes, *, tls: bool = True, name: str = HOST, direct: bool = False
    ) -> Answer:
        """One request on a connection of its own; its answer."""
        reader, writer = await self.connect(port, tls=tls, name=name, direct=direct)
        try:
            writer.write(request)
            return await read_answer(reader, b"HEAD" if request.startswith(b"HEAD") else b"GET")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def aclose(self) -> None:
        for listener, task in self._doors:
            task.cancel()
            await asyncio.wait({task})
            listener.close()
        for serving in list(self.serving):
            serving.cancel()
        if self.serving:
            await asyncio.wait(self.serving)
        for server in self._servers:
            server.close()
        self.engine.close()


@contextlib.asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    made = Stage(folder)
    try:
        yield made
    finally:
        await made.aclose()


#: So that h11 takes a 101.
_ANY_SWITCH = [("Host", "x"), ("Connection", "upgrade"), ("Upgrade", "x")]


@dataclass
class Answer:
    status: int
    reason: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    trailers: list[tuple[bytes, bytes]]
    informed: list[int]
    whole: bool = True

    def __getitem__(self, name: str) -> str:
        return {k.lower().decode(): v.decode("latin-1") for k, v in self.headers}[name]


async def read_answer(reader: asyncio.StreamReader, method: bytes = b"GET") -> Answer:
    """The answer to a request of this method. Raises ConnectionError when there is none."""
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    http.send(h11.Request(method=method, target="/", headers=_ANY_SWITCH))
    http.send(h11.EndOfMessage())
    answer = Answer(0, b"", [], b"", [], [])
    parts: list[bytes] = []
    while True:
        try:
            event = http.next_event()
        except h11.RemoteProtocolError:
            if not answer.status:
                raise ConnectionError("no answer") from None
            answer.whole = False
            break
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(65536))
        elif isinstance(event, h11.InformationalResponse):
            answer.informed.append(event.status_code)
            if event.status_code == 101:
                answer.status = 101
                answer.headers = event.headers.raw_items()
                answer.body = http.trailing_data[0]
                return answer
        elif isinstance(event, h11.Response):
            answer.status, answer.reason, answer.headers = event.status_code, event.reason, event.headers.raw_items()
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            answer.trailers = event.headers.raw_items()
            break
        else:
            raise ConnectionError("no answer")
    answer.body = b"".join(parts)
    return answer


@dataclass
class Seen:
    """A request as a server got it."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    trailers: list[tuple[bytes, bytes]]

    def __getitem__(self, name: str) -> str:
        return {k.lower().decode(): v.decode("latin-1") for k, v in self.headers}[name]


class Recorder:
    """A server that keeps what it gets, and answers what `answer` makes of it: bytes, or parts of them."""

    def __init__(self, answer: Callable[[Seen], bytes] | bytes | None = None) -> None:
        self.seen: list[Seen] = []
        self.heads = 0
        self.connections = 0
        self._answer = answer if answer is not None else b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        while await self._one(http, reader, writer):
            http.start_next_cycle()

    async def respond(self, seen: Seen) -> bytes:
        return self._answer if isinstance(self._answer, bytes) else self._answer(seen)

    async def _one(self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        seen, parts = Seen(b"", b"", [], b"", []), []
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                if http.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                    writer.write(http.send(go_on) or b"")
                http.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                self.heads += 1
                seen = Seen(event.method, event.target, event.headers.raw_items(), b"", [])
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                seen.trailers = event.headers.raw_items()
                break
            else:
                return False
        seen.body = b"".join(parts)
        self.seen.append(seen)
        made = await self.respond(seen)
        writer.write(made)
        await writer.drain()
        http.send(h11.Response(status_code=204, headers=[]))
        http.send(h11.EndOfMessage())
        return http.our_state is h11.DONE and b"connection: close" not in made.lower() and b"\r\n\r\n" in made


def get(path: str = "/", *headers: str, host: str = HOST, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def answered(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
