"""What it costs that a request is read and gets a secret: against the same request straight to the same server.

Needs no server and no machine: a server on loopback, and the engine of netd in a process of its own, as netd is.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from common import Report, host_facts, milliseconds

from cloche_server.core.network import SecretGrant
from cloche_server.host.certificates import KeyPair, issue, make_authority, server_context
from cloche_server.host.clock import SystemClock
from cloche_server.netd.flow import Dialed, Target, Verdict
from cloche_server.netd.http import Engine

HOST = "api.example.test"
PLACEHOLDER = "cloche-secret-key-0123456789abcdef01234567"
BODY = b'{"ok": true}'
BIG = os.urandom(1 << 20)


@dataclass
class Authority:
    certificate: str
    key: str


class Carrier:
    """Dials one port."""

    sandbox = workspace = "bench"

    def __init__(self, port: int, grants: int) -> None:
        self._port = port
        self.grants = [SecretGrant("KEY", PLACEHOLDER, (HOST,))] + [
            SecretGrant(f"K{n}", f"cloche-secret-k{n}-0123456789abcdef", ("other.test",)) for n in range(grants - 1)
        ]

    def secret(self, name: str) -> str | None:
        return "sk-0123456789abcdef0123456789abcdef"

    def reads_http(self, name: str, port: int) -> bool:
        return True

    def decide_request(self, target: Target, host: str, method: str, path: str) -> Verdict:
        return Verdict(True, "default", "allowed")

    def note(self, *args: Any, **more: Any) -> None:
        return None

    async def addresses(self, target: Target, host: str) -> Sequence[str]:
        return ["127.0.0.1"]

    async def dial(self, target: Target, addresses: Sequence[str]) -> Dialed:
        dialed = socket.socket()
        dialed.setblocking(False)
        await asyncio.get_running_loop().sock_connect(dialed, ("127.0.0.1", self._port))
        return Dialed(dialed, "127.0.0.1")

    async def pace(self, sent: int, received: int) -> None:
        return None

    def count(self, target: Target, sent: int, received: int) -> None:
        return None


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    try:
        while True:
            asked = await reader.readuntil(b"\r\n\r\n")
            if asked.startswith(b"GET /big"):
                writer.write(head % (len(BIG) * 100))
                for _ in range(100):
                    writer.write(BIG)
                    await writer.drain()
            else:
                writer.write(head % len(BODY) + BODY)
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


def origin(listener: socket.socket, public: KeyPair) -> None:
    async def run() -> None:
        context = server_context(issue(public, HOST, time.time()))
        server = await asyncio.start_server(answer, sock=listener, ssl=context)
        await server.serve_forever()

    uvloop.run(run())


def netd(listener: socket.socket, own: KeyPair, port: int, extra: Path, grants: int) -> None:
    async def run() -> None:
        authority = Authority(own.certificate_pem.decode(), own.key_pem.decode())
        engine = Engine(lambda _: authority, now=SystemClock().now, extra_ca=extra)
        listener.setblocking(False)
        running = set()
        carrier = Carrier(port, grants)
        for number in range(1 << 30):
            guest, _ = await asyncio.get_running_loop().sock_accept(listener)
            target = Target("192.0.2.1", 443, HOST, True, number)
            task = asyncio.create_task(engine.serve(guest, target, carrier))
            running.add(task)
            task.add_done_callback(running.discard)

    uvloop.run(run())


def ask(stream: ssl.SSLSocket, token: str, path: str = "/", method: str = "GET") -> int:
    stream.sendall(f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    got = stream.recv(65536)
    while b"\r\n\r\n" not in got:
        got += stream.recv(65536)
    head, _, rest = got.partition(b"\r\n\r\n")
    left = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]) - len(rest)
    size = len(rest)
    buffer = memoryview(bytearray(1 << 18))
    while left > 0:
        count = stream.recv_into(buffer)
        left -= count
        size += count
    return size


def connect(port: int, trust: Path) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=trust)
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname=HOST)


def fresh(port: int, trust: Path, runs: int, method: str) -> list[float]:
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        with connect(port, trust) as stream:
            ask(stream, PLACEHOLDER, method=method)
        found.append(milliseconds(began))
    return found


def measure(port: int, trust: Path, runs: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Milliseconds of a request on a kept connection, of a GET and of a POST with a connection of its own; MB/s of a
    download."""
    kept, speed = [], []
    with connect(port, trust) as stream:
        for number in range(runs + 20):
            began = time.perf_counter()
            ask(stream, PLACEHOLDER)
            if number >= 20:
                kept.append(milliseconds(began))
    get, post = fresh(port, trust, runs, "GET"), fresh(port, trust, runs, "POST")
    for _ in range(3):
        with connect(port, trust) as stream:
            began = time.perf_counter()
            speed.append(ask(stream, PLACEHOLDER, "/big") / 1e6 / (time.perf_counter() - began))
    return kept, get, post, speed


def burn() -> None:
    while True:
        sum(range(10_000))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=200)
    options.add_argument("--grants", type=int, default=5)
    options.add_argument("--load", type=int, default=0, help="processes that take all the time they get, meanwhile")
    args = options.parse_args()
    public, own = make_authority("public", time.time()), make_authority("workspace", time.time())
    report = Report("secret_requests", {"grants": args.grants, "load": args.load, **host_facts()})
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=256) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    with tempfile.TemporaryDirectory() as folder:
        trust = [Path(folder) / name for name in ("public.pem", "own.pem")]
        for path, pair in zip(trust, (public, own), strict=True):
            path.write_bytes(pair.certificate_pem)
        processes = [
            multiprocessing.Process(target=origin, args=(listeners[0], public), daemon=True),
            multiprocessing.Process(
                target=netd, args=(listeners[1], own, ports[0], trust[0], args.grants), daemon=True
            ),
        ]
        processes += [multiprocessing.Process(target=burn, daemon=True) for _ in range(args.load)]
        for process in processes:
            process.start()
        try:
            direct = measure(ports[0], trust[0], args.runs)
            read = measure(ports[1], trust[1], args.runs)
        finally:
            for process in processes:
                process.terminate()
                process.join()
    for index, name in enumerate(("GET on a kept connection", "GET with its connection", "POST with its connection")):
        report.add(f"{name}: direct", direct[index])
        report.add(f"{name}: with a secret", read[index])
        base = sorted(direct[index])[len(direct[index]) // 2]
        report.add(f"{name}: more than direct", [value - base for value in read[index]], target=30.0)
    report.add("download of 100 MB: direct", direct[3], unit="MB/s")
    report.add("download of 100 MB: read, values looked for", read[3], unit="MB/s")
    report.finish()


if __name__ == "__main__":
    main()
