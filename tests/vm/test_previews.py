"""Previews of real servers in a real machine: every address they may listen on, and all that HTTP can do."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kit.client import Api, Box
from kit.server import Server

#: Port: where it listens.
BOUND = {3001: "127.0.0.1", 3002: "::1", 3003: "0.0.0.0", 3004: "192.168.127.2", 80: "::", 65535: "127.0.0.1"}
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
SERVER = """
import base64, hashlib, http.server, json, socket, sys, threading, time

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
SWITCH = "HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Accept: "

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def say(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def echo(self):
        accept = base64.b64encode(hashlib.sha1((self.headers["Sec-WebSocket-Key"] + GUID).encode()).digest())
        self.wfile.write(SWITCH.encode() + accept + b"\\r\\n\\r\\n")
        while data := self.connection.recv(65536):
            self.connection.sendall(data)
        self.close_connection = True
    def do_GET(self):
        if self.headers.get("Upgrade"):
            self.echo()
        elif self.path == "/sse":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for n in range(3):
                self.wfile.write(b"data: %d\\n\\n" % n)
                time.sleep(0.2)
            self.close_connection = True
        elif self.path.startswith("/big"):
            self.say(bytes(int(self.path[4:])))
        else:
            seen = {"path": self.path, "headers": dict(self.headers), "port": self.server.server_port}
            seen["peer"] = self.client_address[0]
            self.say(json.dumps(seen).encode())
    def do_POST(self):
        left, digest = int(self.headers["Content-Length"]), hashlib.sha256()
        while left:
            data = self.rfile.read(min(left, 1 << 20))
            digest.update(data)
            left -= len(data)
        self.say(digest.hexdigest().encode())
    def log_message(self, *args): pass

class Server(http.server.ThreadingHTTPServer):
    def __init__(self, host, port):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

for port, host in json.loads(sys.argv[1]).items():
    threading.Thread(target=Server(host, int(port)).serve_forever).start()
print("ready", flush=True)
"""


class Preview:
    """A port of a sandbox by its host name; the name is not looked up."""

    def __init__(self, api: Api, box: Box, port: int) -> None:
        info = api.call("GET", f"{box.path}/ports/{port}")
        self.parts = urlsplit(info["proxy_url"])
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.parts.port}",
            headers={"Host": self.parts.netloc},
            timeout=120,
            trust_env=False,
        )

    def upgrade(self, path: str = "/ws") -> socket.socket:
        assert self.parts.port is not None
        sock = socket.create_connection(("127.0.0.1", self.parts.port), 60)
        head = f"GET {path} HTTP/1.1\r\nHost: {self.parts.netloc}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        sock.sendall(f"{head}Sec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            data = sock.recv(1)
            assert data, answer
            answer += data
        accept = base64.b64encode(hashlib.sha1(KEY.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert accept in answer
        return sock


@pytest.fixture(scope="module")
def served(shared: Box) -> Iterator[Box]:
    """A sandbox with a server on all of them."""
    shared.put("/root/server.py", SERVER.encode())
    shared.put("/root/log", b"")
    exec_id = shared.start(f"exec python3 /root/server.py '{json.dumps(BOUND)}' > /root/log 2>&1")
    deadline = time.monotonic() + 120
    while b"ready" not in shared.get("/root/log"):
        assert time.monotonic() < deadline, shared.get("/root/log")
        time.sleep(0.2)
    yield shared
    shared.kill(exec_id)


@pytest.mark.parametrize("port", BOUND)
def test_wherever_it_listens(api: Api, served: Box, port: int) -> None:
    preview = Preview(api, served, port)
    seen = preview.http.get("/a%2Fb//c?x=%20").json()
    assert (seen["port"], seen["path"]) == (port, "/a%2Fb//c?x=%20")
    assert seen["headers"]["Host"] == preview.parts.netloc
    assert seen["headers"]["X-Forwarded-Proto"] == "http"


def test_which_way_leads_where(api: Api, served: Box) -> None:
    """Through the card to what listens on all addresses, by the agent to loopback."""
    peers = {3001: "127.0.0.1", 3002: "::1", 3003: "192.168.127.1", 3004: "192.168.127.1", 80: "::ffff:192.168.127.1"}
    for port, peer in peers.items():
        assert Preview(api, served, port).http.get("/").json()["peer"] == peer, port


def test_what_is_open_through_the_card_ends_with_the_state(api: Api, served: Box) -> None:
    for verb in ("pause", "hibernate"):
        with Preview(api, served, 3003).upgrade() as sock:
            sock.settimeout(60)
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            api.call("POST", f"{served.path}/{verb}")
            with pytest.raises(ConnectionResetError):
                assert sock.recv(1) != b""
        if verb == "pause":
            api.call("POST", f"{served.path}/resume")
    api.call("POST", f"{served.path}/wake")


def test_what_listens_is_listed(api: Api, served: Box) -> None:
    found = {one["port"]: one for one in api.call("GET", f"{served.path}/ports")}
    assert found.keys() == BOUND.keys()
    for port, address in BOUND.items():
        assert found[port]["addresses"] == [address]
        assert (found[port]["listening"], found[port]["source"], found[port]["process"]) == (
            True,
            "detected",
            "python3",
        )
        assert found[port]["pid"] > 1


def test_uploads_and_downloads(api: Api, served: Box) -> None:
    http = Preview(api, served, 3001).http
    data = bytes(range(256)) * 40_000
    assert http.post("/", content=data).text == hashlib.sha256(data).hexdigest()
    assert len(http.get("/big5000000").content) == 5_000_000


def test_websockets_and_raw_bytes(api: Api, served: Box) -> None:
    sock = Preview(api, served, 3002).upgrade()
    data = bytes(range(256)) * 4096
    sock.settimeout(60)
    sock.sendall(data[: len(data) // 2])
    got = b""
    while len(got) < len(data) // 2:
        got += sock.recv(65536)
    assert got == data[: len(data) // 2]
    assert api.get(served.id)["status"] == "running"
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b""
    sock.close()


def test_events(api: Api, served: Box) -> None:
    with Preview(api, served, 3003).http.stream("GET", "/sse") as response:
        assert response.headers["content-type"] == "text/event-stream"
        assert b"".join(response.iter_raw()) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_by_path_with_a_token(api: Api, served: Box) -> None:
    seen = api.request("GET", f"{served.path}/proxy/3001/p?q").json()
    assert seen["path"] == "/p?q"
    assert seen["headers"]["X-Forwarded-Prefix"] == f"{served.path}/proxy/3001"
    assert "Authorization" not in seen["headers"]
    token = api.call("POST", f"{served.path}/preview-token", json={"port": 3001, "paths": ["/ok"]})
    assert (token["sandbox_id"], token["port"], token["paths"]) == (served.id, 3001, ["/ok"])
    gateway = urlsplit(token["url"])
    for base in (api.url, f"http://127.0.0.1:{gateway.port}"):
        for path, status in (("ok/x", 200), ("other", 403)):
            response = httpx.get(f"{base}{gateway.path}{path}", timeout=60, trust_env=False)
            assert response.status_code == status, response.text
    # The connection that was handed over does not disturb those of the API.
    assert api.get(served.id)["id"] == served.id


def test_nothing_listens_and_then_something_does(api: Api, served: Box) -> None:
    preview = Preview(api, served, 4444)
    page = preview.http.get("/", headers={"Accept": "text/html"})
    assert (page.status_code, "0.0.0.0 or 127.0.0.1" in page.text) == (502, True)
    exec_id = served.start("exec python3 -m http.server 4444 --bind 127.0.0.1 --directory /etc")
    deadline = time.monotonic() + 120
    while (answer := preview.http.get("/hostname")).status_code == 502:
        assert answer.json()["code"] == "port.closed"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert answer.status_code == 200
    served.kill(exec_id)


@pytest.mark.parametrize("port", [0, 70000])
def test_ports_that_are_none(api: Api, served: Box, port: int) -> None:
    known = Preview(api, served, 3001)
    host = known.parts.netloc.replace("3001-", f"{port}-", 1)
    assert known.http.get("/", headers={"Host": host}).status_code == 404
    assert api.request("GET", f"{served.path}/proxy/{port}/").status_code == 400


def test_who_may_come_in(api: Api, served: Box) -> None:
    preview = Preview(api, served, 3001)
    api.call("POST", f"{served.path}/ports", json={"port": 3001, "access": "token"})
    try:
        assert preview.http.get("/").status_code == 401
        token = api.call("POST", f"{served.path}/preview-token", json={"port": 3001})["token"]
        seen = preview.http.get("/", headers={"X-Preview-Token": token}).json()
        assert token not in json.dumps(seen)
        open_one = preview.upgrade(f"/?preview_token={token}")
    finally:
        api.call("DELETE", f"{served.path}/ports/3001")
    with pytest.raises(ConnectionResetError):
        assert open_one.recv(1) != b""
    assert preview.http.get("/").status_code == 200


def test_a_request_wakes_and_an_open_connection_is_activity(api: Api, server: Server, served: Box) -> None:
    preview = Preview(api, served, 3003)
    api.call("POST", f"{served.path}/hibernate")
    assert api.get(served.id)["status"] == "hibernated"
    listed = api.call("GET", f"{served.path}/ports")
    assert listed == []
    seen: dict[str, Any] = preview.http.get("/woken").json()
    assert seen["path"] == "/woken"
    assert api.get(served.id)["status"] == "running"
    with preview.upgrade() as sock:
        time.sleep(1.5)  # longer than the unit of what is told
        assert api.call("GET", f"{served.path}/lifecycle")["idle_seconds"] == 0
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
    api.call("POST", f"{served.path}/pause")
    paused = preview.http.get("/")
    assert (paused.status_code, paused.json()["code"]) == (503, "sandbox.invalid_state")
    api.call("POST", f"{served.path}/resume")
    assert preview.http.get("/").status_code == 200
