"""A gateway on a loopback port, servers that stand for those in guests, and a client that says every byte itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloche_server.app.callers import Owner
from cloche_server.app.entry import Entry, not_found
from cloche_server.app.ports import Ports
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.previews import PortAccess, PreviewBase
from cloche_server.core.records import ExecDefaults, Isolation, Resources, Sandbox
from cloche_server.core.streams import ByteStream
from cloche_server.gateway import gateway as gateway_module
from cloche_server.gateway.admission import Gate
from cloche_server.gateway.brakes import Brakes
from cloche_server.gateway.gateway import Gateway, Limits
from cloche_server.guest.types import ListeningPort
from cloche_server.host.clock import SystemClock
from cloche_server.host.sockets import connect_tcp
from cloche_server.store.db import Database
from cloche_server.store.ports import PortStore

BOX = "abcdefgh12"
OTHER = "zzzzzzzz99"
OWNER = "pds_" + "0" * 32
STRANGER = "pds_" + "1" * 32


def record(sandbox_id: str, workspace: str) -> Sandbox:
    return Sandbox(
        id=sandbox_id, workspace=workspace, status=Status.RUNNING, template="base", template_name="base",
        template_id="t", resources=Resources(1, 256, 4096), isolation=Isolation(), defaults=ExecDefaults(),
        metadata={}, created_at=0.0,
    )  # fmt: skip


class Guest:
    """What listens in the sandbox."""

    def __init__(self) -> None:
        self.found: list[ListeningPort] = []
        self.fault: ClocheError | None = None

    async def ports(self, *, timeout: float) -> list[ListeningPort]:
        if self.fault is not None:
            raise self.fault
        return self.found


@dataclass
class World:
    """Sandboxes, and where their ports really are: a port of this machine, or the error that a dial ends in."""

    entries: dict[str, Entry] = field(default_factory=dict)
    ports: dict[int, int | ClocheError] = field(default_factory=dict)
    dialed: list[tuple[str | None, str, int]] = field(default_factory=list)
    open: int = 0
    #: Dials wait until it is set.
    awake: asyncio.Event = field(default_factory=asyncio.Event)

    async def find_entry(self, workspace: str, sandbox_id: str) -> Entry:
        self.find(workspace, sandbox_id)
        return self.entries[sandbox_id]

    def find(self, workspace: str | None, sandbox_id: str) -> Sandbox:
        entry = self.entries.get(sandbox_id)
        if entry is None or workspace not in (None, entry.record.workspace):
            raise not_found("with this id")
        return entry.record

    async def dial(self, workspace: str | None, sandbox_id: str, port: int) -> ByteStream:
        self.dialed.append((workspace, sandbox_id, port))
        await self.awake.wait()
        found = self.ports.get(port, ClocheError("port.closed", f"Nothing listens on port {port} of the sandbox."))
        if isinstance(found, ClocheError):
            raise found
        stream = await connect_tcp("127.0.0.1", found, 10)
        self.open += 1
        return _Dialed(stream, self)

    async def owner(self, token: str, sandbox_id: str) -> Owner | None:
        found = {OWNER: "w", STRANGER: "elsewhere"}.get(token)
        return None if found is None else Owner(found, f"prefix-{found}", contextlib.nullcontext)


class _Dialed:
    def __init__(self, stream: Any, world: World) -> None:
        self._stream = stream
        self._world = world
        self.read, self.write, self.write_eof = stream.read, stream.write, stream.write_eof

    def close(self) -> None:
        self._world.open -= 1
        self._stream.close()


class _Access:
    def __init__(self, world: World) -> None:
        self.find = world.find_entry


@dataclass
class Site:
    gateway: Gateway
    ports: Ports
    world: World
    guest: Guest
    port: int
    #: The API's port, whose connections begin somewhere else.
    address: str = ""

    @property
    def host(self) -> str:
        """The authority of port 3000."""
        return f"3000-{BOX}.localhost:{self.port}"

    async def serve(self, handler: Handler, port: int = 3000) -> asyncio.Server:
        """Has `handler` answer on a port of the sandbox."""
        server = await asyncio.start_server(_closing(handler), "127.0.0.1", 0, limit=2**20)
        self.world.ports[port] = server.sockets[0].getsockname()[1]
        return server

    async def connect(self) -> Wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**22)
        return Wire(reader, writer)

    async def ask(self, head: str, body: bytes = b"", *, host: str | None = None, close: bool = True) -> Reply:
        """One request on a connection of its own; `head` is the request line and headers without Host."""
        wire = await self.connect()
        try:
            lines = [*head.split("\n"), f"Host: {host or self.host}", *(["Connection: close"] if close else [])]
            await wire.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
            return await wire.reply(head.split(" ", 1)[0])
        finally:
            wire.close()


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    #: The stream ended as the framing says.
    whole: bool = True

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


class Wire:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Reply:
        async with asyncio.timeout(20):
            block = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = block.removesuffix("\r\n\r\n").split("\r\n")
        pairs = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return Reply(int(first.split(" ")[1]), pairs, b"")

    async def reply(self, method: str = "GET") -> Reply:
        """A final answer with its body."""
        async with asyncio.timeout(30):
            found = await self.head()
            while found.status < 200 and found.status != 101:
                found = await self.head()
            if method == "HEAD" or found.status in {101, 204, 304}:
                return found
            try:
                if found.get("transfer-encoding") == "chunked":
                    while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
                        found.body += (await self.reader.readexactly(size + 2))[:-2]
                    while await self.reader.readuntil(b"\r\n") != b"\r\n":
                        pass
                elif (length := found.get("content-length")) is not None:
                    found.body = await self.reader.readexactly(int(length))
                else:
                    found.body = await self.reader.read(-1)
            except (asyncio.IncompleteReadError, ConnectionError):
                found.whole = False
            return found

    async def ended(self) -> bool:
        """Whether the gateway closes the connection."""
        async with asyncio.timeout(20):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True

    def close(self) -> None:
        self.writer.close()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def _closing(handler: Handler) -> Handler:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await handler(reader, writer)
        finally:
            writer.close()

    return run


async def head_of(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def answering(answer: bytes) -> Handler:
    """Reads a head and says this."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(answer)
        await writer.drain()

    return handler


async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with the head it was sent, and so many bytes of body as were announced."""
    head = await head_of(reader)
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            head += await reader.readexactly(int(line.split(b":")[1]))
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(head) + head)
    await writer.drain()


def ok(body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def site(
    folder: Path,
    limits: Limits | None = None,
    usual: PortAccess = PortAccess.PUBLIC,
    tls: ssl.SSLContext | None = None,
    brakes: Brakes | None = None,
    domain: str = "localhost",
    plain: socket.socket | None = None,
) -> AsyncIterator[Site]:
    database = Database(folder / "gateway.db")
    await database.open()
    world, guest = World(), Guest()
    world.awake.set()
    for sandbox_id, workspace in ((BOX, "w"), (OTHER, "elsewhere")):
        world.entries[sandbox_id] = Entry(record(sandbox_id, workspace), guest=guest)  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    access: Any = _Access(world)
    base = PreviewBase("http" if tls is None else "https", domain, port)
    ports = Ports(access, PortStore(database), SystemClock(), b"k" * 32, usual, base)
    gate = Gate(ports, world, world, SystemClock(), brakes or Brakes(0, 0, 0))
    gateway = Gateway(world, gate, ports, SystemClock(), limits or Limits(), base)
    crashes: list[str] = []
    gateway_module._log = _Log(crashes)
    running = asyncio.ensure_future(gateway.run(listener, tls, 0.2, plain))
    try:
        yield Site(gateway, ports, world, guest, port)
    finally:
        gateway.stop()
        async with asyncio.timeout(10):
            await running
        await database.close()
    assert world.open == 0, "connections to the guest are left"
    assert not crashes, crashes[0]


class _Log:
    """Remembers what must not happen."""

    def __init__(self, crashes: list[str]) -> None:
        self._crashes = crashes

    def error(self, event: str, **fields: Any) -> None:
        self._crashes.append(f"{event} {fields.get('trace')}")

    def info(self, event: str, **fields: Any) -> None:
        assert not any(OWNER in str(value) for value in fields.values()), "a token is in the log"
