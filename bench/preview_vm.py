#!/usr/bin/env python3
"""What a preview of a real machine costs, by both ways, in one run. As root, with a baked test directory:

    CLOCHE_TEST_DATA=DIR .cloche/venv/bin/python bench/preview_vm.py [--requests N] [--megabytes N]

The guest runs one server twice: on all addresses, which is reached through the slot, and on 127.0.0.1, which only the
agent reaches. `bare` is the first of them from inside the slot, without the gateway; each request has a connection of
its own everywhere, as in the guest.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from common import Report

from cloche_server.core.network import GUEST_IP4, TAP
from cloche_server.host import netns
from kit.client import Box
from kit.server import Server

PIECE = bytes(256 * 1024)
WAYS = {"slot": ("0.0.0.0", 3000), "agent": ("127.0.0.1", 3001)}
SERVE = """
import socket, threading
def answer(c):
    try:
        f = c.makefile("rb")
        method, path, _ = f.readline().split()
        length = 0
        while (line := f.readline()) != b"\\r\\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        while length:
            length -= len(f.read1(min(length, 1 << 18)))
        size = int(path[1:])
        c.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % size)
        piece = bytes(1 << 18)
        while size:
            size -= c.send(piece[:size])
    except OSError:
        pass
    f.close()
    c.close()
def serve(host, port):
    s = socket.create_server((host, port), backlog=64)
    while True:
        threading.Thread(target=answer, args=(s.accept()[0],)).start()
for host, port in (("0.0.0.0", 3000), ("127.0.0.1", 3001)):
    threading.Thread(target=serve, args=(host, port)).start()
"""

Connect = Callable[[], socket.socket]


def ask(connect: Connect, host: str, size: int, upload: int = 0) -> float:
    """Seconds for one request and its answer."""
    began = time.perf_counter()
    with connect() as sock:
        sock.settimeout(120)
        method = "POST" if upload else "GET"
        sock.sendall(f"{method} /{size} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {upload}\r\n\r\n".encode())
        while upload:
            sock.sendall(PIECE[:upload])
            upload -= min(upload, len(PIECE))
        head = b""
        while b"\r\n\r\n" not in head:
            data = sock.recv(65536)
            if not data:
                raise SystemExit(f"the answer broke off: {head!r}")
            head += data
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"it answers {head!r}")
        left = size - len(head.partition(b"\r\n\r\n")[2])
        while left:
            left -= len(sock.recv(min(left, len(PIECE))))
    return time.perf_counter() - began


def inside(server: Server, box: Box) -> Connect:
    def connect() -> socket.socket:
        sock = netns.inside(server.data / "net" / box.id, lambda: netns.outgoing(TAP))
        sock.setblocking(True)
        sock.connect((GUEST_IP4, WAYS["slot"][1]))
        return sock

    return connect


def through(server: Server, box: Box, port: int) -> tuple[Connect, str]:
    parts = urlsplit(server.api.call("GET", f"{box.path}/ports/{port}")["proxy_url"])
    at = ("127.0.0.1", int(parts.port or 0))
    return (lambda: socket.create_connection(at)), parts.netloc


def measure(server: Server, box: Box, report: Report, requests: int, megabytes: int) -> None:
    ways = {"bare": (inside(server, box), "x")}
    ways |= {name: through(server, box, port) for name, (_, port) in WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(requests):  # turn by turn: what disturbs one disturbs all
        for name, (connect, host) in ways.items():
            times[name].append(ask(connect, host, 100) * 1000)
    for name, values in times.items():
        report.add(f"request, {name}", values)
    for name in WAYS:
        added = [one - bare for one, bare in zip(times[name], times["bare"], strict=True)]
        report.add(f"added, {name}", added, target=3.0)
    size = megabytes * 1_000_000
    for what, down, up in (("download", size, 0), ("upload", 0, size)):
        for name, (connect, host) in ways.items():
            rates = [megabytes / ask(connect, host, down, up) for _ in range(3)]
            report.add(f"{what}, {name}", rates, "MB/s", target=60.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=100)
    options = parser.parse_args()
    server = Server.make()
    try:
        server.start()
        box = server.api.create()
        box.put("/root/serve.py", SERVE.encode())
        box.start("exec python3 /root/serve.py")
        deadline = time.monotonic() + 60
        while len(server.api.call("GET", f"{box.path}/ports")) < len(WAYS):
            if time.monotonic() > deadline:
                raise SystemExit("the server in the guest did not start")
            time.sleep(0.2)
        report = Report("preview-vm", {"isolation": box.info["isolation"]["accel"]})
        measure(server, box, report, options.requests, options.megabytes)
        report.finish()
    finally:
        server.close()


if __name__ == "__main__":
    main()
