"""What the gateway adds to a request, and how much it moves: against a server of this machine, without a guest.

    python bench/preview.py [--requests N] [--megabytes N]

The dialer connects to a loopback server in place of an agent, so that only the gateway is measured. Client, gateway and
server have a process each, as they have in use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from typing import Any

import uvloop

from cloche_server.core.lifecycle import Status
from cloche_server.core.previews import PortAccess, PortRule, PreviewBase
from cloche_server.core.records import ExecDefaults, Isolation, Resources, Sandbox
from cloche_server.gateway.admission import Gate
from cloche_server.gateway.brakes import Brakes
from cloche_server.gateway.gateway import Gateway, Limits
from cloche_server.host.clock import SystemClock
from cloche_server.host.sockets import connect_tcp

BOX = "abcdefgh12"
PIECE = bytes(256 * 1024)
TARGETS = {"added_p50_ms": 3.0, "down_mb_s": 60.0, "up_mb_s": 60.0}


class Stub:
    """Stands for ports, records and the dialer: one sandbox whose port is a server of this machine."""

    on_change: Any = None

    def __init__(self, port: int) -> None:
        self._port = port
        self._record = Sandbox(
            id=BOX, workspace="w", status=Status.RUNNING, template="base", template_name="base", template_id="t",
            resources=Resources(1, 256, 4096), isolation=Isolation(), defaults=ExecDefaults(), metadata={},
            created_at=0.0,
        )  # fmt: skip

    def find(self, _workspace: str | None, _sandbox_id: str) -> Sandbox:
        return self._record

    def at_domain(self, _domain: str) -> None:
        return None

    def rule_of(self, _record: Sandbox, port: int) -> PortRule:
        return PortRule(BOX, "w", port, PortAccess.PUBLIC)

    async def dial(self, _workspace: str | None, _sandbox_id: str, _port: int) -> Any:
        return await connect_tcp("127.0.0.1", self._port, 10)


async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """GET /<bytes> answers so many; POST reads its body."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.split(b" ", 2)
            size = 0
            if method == b"GET":
                size = int(path[1:])
            else:
                left = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                while left:
                    left -= len(await reader.read(min(left, len(PIECE))))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            while size:
                piece = PIECE[:size]
                writer.write(piece)
                await writer.drain()
                size -= len(piece)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def run_upstream(listener: socket.socket) -> None:
    async def serve() -> None:
        server = await asyncio.start_server(upstream, sock=listener, limit=2**20)
        await server.serve_forever()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def run_gateway(listener: socket.socket, port: int) -> None:
    async def serve() -> None:
        stub: Any = Stub(port)
        base = PreviewBase("http", "localhost", listener.getsockname()[1])
        gate = Gate(stub, stub, stub, SystemClock(), Brakes(0, 0, 0))
        await Gateway(stub, gate, stub, SystemClock(), Limits(), base).run(listener, None, 0.1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class Client:
    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = f"3000-{BOX}.localhost:{port}"

    def ask(self, method: str, path: str, size: int = 0) -> int:
        """Bytes of the answer's body."""
        length = f"Content-Length: {size}\r\n" if method == "POST" else ""
        self._sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\n{length}\r\n".encode())
        while size:
            self._sock.sendall(PIECE[:size])
            size -= min(size, len(PIECE))
        head = b""
        while b"\r\n\r\n" not in head:
            head += self._sock.recv(65536)
        head, _, body = head.partition(b"\r\n\r\n")
        total = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        left = total - len(body)
        view = memoryview(bytearray(len(PIECE)))
        while left:
            left -= self._sock.recv_into(view[: min(left, len(view))])
        return total


def measure(port: int, requests: int, megabytes: int) -> dict[str, float]:
    client = Client(port)
    times = []
    for _ in range(requests):
        began = time.perf_counter()
        client.ask("GET", "/100")
        times.append((time.perf_counter() - began) * 1000)
    found = {"p50_ms": statistics.median(times), "p99_ms": sorted(times)[int(requests * 0.99) - 1]}
    for name, method in (("down_mb_s", "GET"), ("up_mb_s", "POST")):
        began = time.perf_counter()
        size = megabytes * 1_000_000
        client.ask(method, f"/{size}", size if method == "POST" else 0)
        found[name] = megabytes / (time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=500)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    server, front = (socket.create_server(("127.0.0.1", 0), backlog=256) for _ in range(2))
    direct, port = server.getsockname()[1], front.getsockname()[1]
    processes = [
        context.Process(target=run_upstream, args=(server,), daemon=True),
        context.Process(target=run_gateway, args=(front, direct), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        bare = measure(direct, options.requests, options.megabytes)
        through = measure(port, options.requests, options.megabytes)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    rounded = {
        name: {k: round(v, 3) for k, v in found.items()} for name, found in (("direct", bare), ("preview", through))
    }
    added = round(through["p50_ms"] - bare["p50_ms"], 3)
    print(json.dumps({**rounded, "added_p50_ms": added, "targets": TARGETS}, indent=2))


if __name__ == "__main__":
    main()
