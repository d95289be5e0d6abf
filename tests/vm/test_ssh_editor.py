"""What the remote modes of editors do over SSH, in a real machine: one connection that carries a shell which is told on
its input what to do, a server in the sandbox that outlives it, ports, Unix sockets and files."""

from __future__ import annotations

import hashlib
import http.server
import os
import re
import socket
import struct
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit.client import Api, Box
from kit.free_ports import free_port
from kit.openssh import OpenSsh
from kit.server import Server
from kit.until import until

BIG = 8_000_000
#: As those of editors: told on the input, says between two marks where its server listens, and leaves it there.
SCRIPT = (
    b"""
set -e
mkdir -p ~/.editor && cd ~/.editor
cat > server.py <<'END'
import hashlib, http.server, os, socketserver, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def address_string(self): return "local"
    def do_GET(self):
        body = bytes(%d)
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        body = hashlib.sha256(self.rfile.read(int(self.headers["Content-Length"]))).hexdigest().encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
class Unix(socketserver.ThreadingMixIn, socketserver.UnixStreamServer): pass
kind, where = sys.argv[1:]
made = Unix(where, Handler) if kind == "unix" else http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(made.server_address[1] if kind == "tcp" else where, flush=True)
made.serve_forever()
END
for kind in tcp unix; do
  setsid nohup python3 server.py $kind $HOME/.editor/sock > $kind.log 2>&1 < /dev/null &
  while ! grep -q . $kind.log; do sleep 0.1; done
  echo "listeningOn($kind)==$(cat $kind.log)=="
done
echo done
"""
    % BIG
)


@dataclass(frozen=True)
class Desk:
    """An editor's connection: a master, its dynamic port, and where it found the two servers of the sandbox."""

    client: OpenSsh
    folder: Path
    socks: int
    port: int
    path: str
    api: Api
    box: Box

    @property
    def shared(self) -> list[str]:
        return ["-o", f"ControlPath={self.folder / 'm'}"]

    def control(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return self.client.run(flags=[*self.shared, "-O", *words])


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    server = Server.make(ssh_port=free_port())
    try:
        server.start()
        with Api(server.url, server.token) as api, tempfile.TemporaryDirectory(prefix="ed-") as folder:
            box = api.create(name="box", ttl_seconds=600)
            client = OpenSsh.make(api, int(str(server.settings["ssh_port"])), tmp_path_factory.mktemp("ssh"))
            socks = free_port()
            master = [
                "-T",
                "-D",
                f"127.0.0.1:{socks}",
                "-o",
                f"ControlPath={folder}/m",
                "-M",
                "-o",
                "ControlPersist=60",
            ]
            done = client.run("bash", given=SCRIPT, flags=master)
            assert (done.returncode, done.stdout.split()[-1]) == (0, b"done"), done.stderr
            told = dict(re.findall(r"listeningOn\((\w+)\)==(\S+)==", done.stdout.decode()))
            yield Desk(client, Path(folder), socks, int(told["tcp"]), told["unix"], api, box)
            client.run(flags=["-o", f"ControlPath={folder}/m", "-O", "exit"])
    finally:
        server.close()


def _socks(desk: Desk, host: str, port: int) -> socket.socket:
    """A connection by way of the dynamic port. OpenSSH says yes before it knows, or nothing: what is refused
    ends at once."""
    made = socket.create_connection(("127.0.0.1", desk.socks), 60)
    made.sendall(b"\x05\x01\x00")
    assert made.recv(2) == b"\x05\x00"
    made.sendall(b"\x05\x01\x00\x03" + bytes([len(host)]) + host.encode() + struct.pack(">H", port))
    assert made.recv(10)[1:2] in {b"\x00", b""}
    return made


def _ends_at_once(made: socket.socket) -> bool:
    with made:
        try:
            return made.recv(1) == b""
        except ConnectionError:
            return True


def _ask(made: socket.socket, body: bytes) -> bytes:
    """Two requests over one connection: a long answer, and a long question."""
    with made, made.makefile("rb") as answers:
        made.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert _body(answers) == bytes(BIG)
        made.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return _body(answers)


def _body(answers: object) -> bytes:
    length = 0
    while (line := answers.readline()) not in (b"\r\n", b""):  # type: ignore[attr-defined]
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    found: bytes = answers.read(length)  # type: ignore[attr-defined]
    return found


def test_a_server_of_the_sandbox_by_the_dynamic_port(desk: Desk) -> None:
    body = os.urandom(3_000_000)
    want = hashlib.sha256(body).hexdigest().encode()

    def one(_: int) -> bytes:
        return _ask(_socks(desk, "localhost", desk.port), body)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(one, range(4))) == {want}


def test_nothing_but_the_sandbox_is_reached(desk: Desk) -> None:
    host_port = int(desk.api.url.rsplit(":", 1)[1])
    for host, port in (
        ("localhost", host_port),  # of the host, not of the sandbox
        ("127.0.0.1", int(str(desk.client.port))),
        ("169.254.169.254", 80), ("10.0.0.1", 80), ("example.com", 80), ("0.0.0.0", desk.port),
    ):  # fmt: skip
        assert _ends_at_once(_socks(desk, host, port)), (host, port)


def test_a_unix_socket_of_the_sandbox(desk: Desk) -> None:
    local = desk.folder / "l"
    done = desk.control("forward", "-L", f"{local}:{desk.path}")
    assert done.returncode == 0, done.stderr
    body = os.urandom(1_000_000)
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(local))
    assert _ask(made, body) == hashlib.sha256(body).hexdigest().encode()


def test_commands_and_files_share_the_connection(desk: Desk, tmp_path: Path) -> None:
    data = os.urandom(4_000_000)
    (tmp_path / "file").write_bytes(data)
    with ThreadPoolExecutor(9) as pool:
        files = pool.submit(
            desk.client.sftp, f"put {tmp_path / 'file'} /tmp/f\nget /tmp/f {tmp_path / 'back'}\n", desk.shared
        )
        done = list(pool.map(lambda n: desk.client.run(f"echo {n}; exit {n}", flags=desk.shared), range(8)))
        files.result()
    assert [(one.returncode, one.stdout) for one in done] == [(n, f"{n}\n".encode()) for n in range(8)]
    assert (tmp_path / "back").read_bytes() == data


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"of the client")

    def log_message(self, *_: object) -> None:
        return


def test_a_port_and_a_socket_of_the_client_in_the_sandbox(desk: Desk) -> None:
    own = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=own.serve_forever, daemon=True).start()
    try:
        where = f"127.0.0.1:{own.server_address[1]}"
        port = int(desk.control("forward", "-R", f"0:{where}").stdout)
        assert desk.box.sh(f"curl -sS http://localhost:{port}/") == "of the client"
        assert desk.control("forward", "-R", f"/tmp/r.sock:{where}").returncode == 0
        assert desk.box.sh("curl -sS --unix-socket /tmp/r.sock http://x/") == "of the client"
        # Loopback only: whoever comes over the network finds nothing.
        own_address = desk.box.sh("ip -4 -o addr show scope global | awk '{print $4}' | cut -d/ -f1").strip()
        assert own_address
        assert desk.box.exec(f"curl -sS -m 5 http://{own_address}:{port}/").code == 7
        taken = desk.control("forward", "-R", f"{desk.port}:{where}")
        assert taken.returncode != 0
        refused = desk.box.exec(f"curl -sS http://localhost:{port}/", user="nobody")
        assert refused.stdout == "of the client", "a port is for all users of the sandbox"
        assert desk.box.exec("curl -sS --unix-socket /tmp/r.sock http://x/", user="nobody").code != 0
    finally:
        own.shutdown()
        own.server_close()


def test_what_ends_with_the_connection_and_what_stays(desk: Desk) -> None:
    """The last one: it ends the connection."""
    port = int(desk.control("forward", "-R", "0:127.0.0.1:1").stdout)
    assert str(port) in desk.box.sh("ss -ltn")
    assert desk.control("exit").returncode == 0
    until(lambda: str(port) not in desk.box.sh("ss -ltn"))
    until(lambda: desk.box.exec("test -e /tmp/r.sock").code == 1)
    assert desk.box.exec("pgrep -f 'server.py tc[p]'").code == 0, "the server of the editor stays"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        local = probe.getsockname()[1]
    again = subprocess.Popen(desk.client.command([], ["-N", "-L", f"{local}:localhost:{desk.port}"]))
    try:

        def reached() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{local}/", timeout=60) as answer:
                    return len(answer.read()) == BIG
            except OSError:
                return False

        until(reached)
    finally:
        again.kill()
        again.wait()
