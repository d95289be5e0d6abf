"""The published walk with curl, and readers of streams as other clients are written."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conformance_raw import Wire, check_error

from kit.client import Box
from kit.server import Server

STREAM = {"cmd": "printf 'a\\342\\200\\250Å'; echo b >&2; sleep 0.2; echo c; exit 3"}


class Curl:
    def __init__(self, server: Server) -> None:
        self._server = server

    def __call__(self, *words: str, token: str | None = None, data: bytes = b"") -> tuple[int, bytes]:
        """Status and body."""
        path, *more = words
        key = self._server.token if token is None else token
        command = ["curl", "-sS", "--max-time", "60", "-w", "\n%{http_code}", "-H", f"Authorization: Bearer {key}"]
        done = subprocess.run([*command, self._server.url + path, *more], input=data, capture_output=True, check=True)
        body, _, status = done.stdout.rpartition(b"\n")
        return int(status), body


def test_the_walk(server: Server) -> None:
    assert shutil.which("curl"), "curl is a tool of this test"
    curl = Curl(server)
    as_json = ("-H", "Content-Type: application/json")
    status, body = curl("/v1/sandboxes", *as_json, "-d", '{"template":"base","metadata":{}}')
    assert status == 201
    path = f"/v1/sandboxes/{json.loads(body)['id']}"
    status, body = curl(f"{path}/exec", *as_json, "-d", '{"cmd":"echo hello; uname -r"}')
    assert (status, json.loads(body)["exit_code"]) == (200, 0)
    assert json.loads(body)["stdout"].startswith("hello\n")
    status, body = curl(f"{path}/fs?path=/tmp/hello.txt", "-X", "PUT", "--data-binary", "@-", data=b"bytes \x00\xff\n")
    told = json.loads(body)
    assert told.pop("etag").startswith('"')
    assert (status, told) == (200, {"path": "/tmp/hello.txt", "bytes": 9, "created": True})
    assert curl(f"{path}/fs?path=/tmp/hello.txt") == (200, b"bytes \x00\xff\n")
    status, body = curl(f"{path}/exec/stream", "-N", *as_json, "-d", '{"cmd":"echo one; echo two"}')
    assert status == 200
    assert b'event: stdout\ndata: {"chunk":"one\\n' in body
    assert b"event: exit\ndata: " in body
    assert curl("/v1/sandboxes", "-X", "DELETE")[0] == 405
    status, body = curl(f"{path}/fork", *as_json, "-d", "{}")
    assert (status, json.loads(body)["status"]) == (201, "running")
    child = f"/v1/sandboxes/{json.loads(body)['id']}"
    assert curl(f"{child}/fs?path=/tmp/hello.txt") == (200, b"bytes \x00\xff\n")
    assert curl(f"{child}/pause", "-X", "POST") == (204, b"")
    assert curl(f"{child}/resume", "-X", "POST") == (204, b"")
    status, body = curl(f"{child}/hibernate", "-X", "POST")
    assert (status, json.loads(body)) == (200, {"status": "hibernated"})
    status, body = curl(f"{child}/snapshots", "-X", "POST")
    assert status == 201
    snapshot = f"/v1/snapshots/{json.loads(body)['id']}"
    assert curl(child, "-X", "DELETE") == (204, b"")
    assert curl(snapshot)[0] == 200
    assert curl(snapshot, "-X", "DELETE") == (204, b"")
    assert curl(snapshot)[0] == 404
    status, body = curl("/v1/templates/builds")
    assert (status, json.loads(body)["code"]) == (501, "not_implemented")
    status, body = curl("/v1/sandboxes", token="pds_broken")
    assert status == 401
    check_error(json.loads(body))
    assert curl(path, "-X", "DELETE") == (204, b"")
    assert curl(path, "-X", "DELETE")[0] == 404
    assert curl(path)[0] == 404


# ------------------------------------------------------------------ readers


def _post(server: Server, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection.getresponse()


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """As the Ruby and TypeScript readers do it: events end with LF LF, fields are told by their exact beginnings."""
    assert "\r" not in text
    assert text.endswith("\n\n")
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        if all(line.startswith(": ") for line in lines):
            continue
        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert len(names) == 1, block
        assert len(data) == 1, block
        assert lines.index(f"event: {names[0]}") < lines.index(f"data: {data[0]}")
        assert all(line.startswith(("event: ", "data: ", "id: ")) for line in lines), block
        yield names[0], data[0]


def test_a_reader_that_splits_on_empty_lines(server: Server, shared: Box) -> None:
    response = _post(server, f"{shared.path}/exec/stream", STREAM)
    assert response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    assert response.getheader("Transfer-Encoding") == "chunked"
    assert response.getheader("Cache-Control") == "no-cache"
    assert response.getheader("X-Accel-Buffering") == "no"
    assert response.getheader("Content-Encoding") is None
    raw = response.read()
    assert raw.isascii(), "a raw U+2028 or U+0085 ends a line for some readers"
    events = [(name, json.loads(data)) for name, data in _blocks(raw.decode("ascii"))]
    assert all(isinstance(data, dict) for _, data in events)
    assert "".join(data["chunk"] for name, data in events if name == "stdout") == "a\u2028Åc\n"
    assert "".join(data["chunk"] for name, data in events if name == "stderr") == "b\n"
    assert [name for name, _ in events].count("exit") == 1
    assert events[-1][0] == "exit"
    assert events[-1][1]["exit_code"] == 3


def test_a_reader_of_unicode_lines(server: Server, shared: Box) -> None:
    """`str.splitlines`, as in `requests`, sees the same events, whatever charset it assumes."""
    raw = _post(server, f"{shared.path}/exec/stream", STREAM).read()
    for charset in ("utf-8", "latin-1"):
        data = [line[6:] for line in raw.decode(charset).splitlines() if line.startswith("data: ")]
        assert all(isinstance(json.loads(item), dict) for item in data)


def test_a_character_is_never_cut(server: Server, shared: Box) -> None:
    cmd = "i=0; while [ $i -lt 40 ]; do printf '\\360\\237'; sleep 0.01; printf '\\230\\200'; i=$((i+1)); done"
    raw = _post(server, f"{shared.path}/exec/stream", {"cmd": cmd}).read().decode("ascii")
    chunks = [json.loads(data)["chunk"] for name, data in _blocks(raw) if name == "stdout"]
    assert "".join(chunks) == "😀" * 40
    assert all("\ufffd" not in chunk for chunk in chunks)


def test_a_timeout_is_the_terminal_event(server: Server, shared: Box) -> None:
    raw = _post(server, f"{shared.path}/exec/stream", {"cmd": "echo a; sleep 60", "timeout_seconds": 0.5}).read()
    events = [(name, json.loads(data)) for name, data in _blocks(raw.decode("ascii"))]
    assert [name for name, _ in events] == ["stdout", "error"]
    check_error(events[-1][1])
    assert events[-1][1]["code"] == "exec.timeout"
    assert "timeout" in events[-1][1]["error"]


def test_errors_before_the_stream_are_ordinary(server: Server, shared: Box) -> None:
    for path, body, status, code in (
        ("/v1/sandboxes/zzzzzzzzzzzzzzzz/exec/stream", {"cmd": "true"}, 404, "sandbox.not_found"),
        (f"{shared.path}/exec/stream", {"cmd": ""}, 400, "request.invalid"),
        (f"{shared.path}/exec/stream", {"cmd": "true", "user": "nope"}, 400, "exec.user_not_found"),
        (f"{shared.path}/exec/stream", {"cmd": "true", "cwd": "/nope"}, 400, "exec.invalid_cwd"),
    ):
        response = _post(server, path, body)
        told = json.loads(response.read())
        assert (response.status, told["code"]) == (status, code)
        check_error(told)


def test_a_quiet_stream_has_a_heartbeat(server: Server, shared: Box) -> None:
    response = _post(server, f"{shared.path}/exec/stream", {"cmd": "sleep 120"})
    began = time.monotonic()
    line = response.readline()
    assert line.startswith(b": "), line
    assert time.monotonic() - began < 15
    response.close()


def test_a_hang_up_kills_the_command(server: Server, wire: Wire, shared: Box) -> None:
    for route, extra in (("exec", {}), ("exec/stream", {}), ("exec", {"keepalive": True})):
        body = json.dumps({"cmd": "echo $$ > /tmp/pid; exec sleep 300", **extra}).encode()
        with wire.connect() as connection:
            head = wire.head("POST", f"{shared.path}/{route}", f"Content-Length: {len(body)}\r\n")
            connection.send(head + b"\r\n" + body)
            deadline = time.monotonic() + 30
            while shared.exec("test -s /tmp/pid").code and time.monotonic() < deadline:
                time.sleep(0.1)
        pid = shared.sh("cat /tmp/pid; rm /tmp/pid").strip()
        deadline = time.monotonic() + 15
        while shared.exec(f"kill -0 {pid}").code == 0:
            assert time.monotonic() < deadline, f"the command of {route} lives on"
            time.sleep(0.2)


def test_a_detached_command_outlives_a_hang_up(wire: Wire, shared: Box) -> None:
    body = b'{"cmd":"sleep 2; echo late","detach":true,"exec_id":"late"}'
    with wire.connect() as connection:
        head = wire.head("POST", f"{shared.path}/exec/stream", f"Content-Length: {len(body)}\r\n")
        connection.send(head + b"\r\n" + body)
        assert dict(connection.answer_head()[1])["x-exec-id"] == "late"
    assert shared.follow_all("late").stdout == b"late\n"


# ------------------------------------------------------------------ logs


@pytest.mark.parametrize(
    ("follow", "agent", "ends"), [("1", "curl/8", 1), ("true", "pandastack-py/0.5", 0), ("TRUE", "x", 1)]
)
def test_logs_in_events(wire: Wire, create: Any, follow: str, agent: str, ends: int) -> None:
    box = create()
    box.sh("echo first > /dev/console; echo '  second ü' > /dev/console")
    with wire.connect() as connection:
        named = f"User-Agent: {agent}\r\n"
        connection.send(wire.head("GET", f"{box.path}/logs?follow={follow}&stream=both", named) + b"\r\n")
        status, headers = connection.answer_head()
        assert status == 200
        assert dict(headers)["content-type"] == "text/event-stream; charset=utf-8"
        text = ""
        while "second" not in text:
            text += connection.chunk().decode("ascii")
        lines = [(name, json.loads(data)["line"]) for name, data in _blocks(text)]
        assert lines == [("line", "first"), ("line", "  second ü")], "no `open` event: clients would print it"
        box.delete()
        rest = b"".join(iter(connection.chunk, b"")).decode("ascii")
        told = [block for block in rest.split("\n\n") if block and not block.startswith(": ")]
        assert [("event: end" in block, '"next"' in block) for block in told] == [(True, True)] * ends


def test_logs_as_text(wire: Wire, create: Any) -> None:
    box = create()
    box.sh("for i in 1 2 3; do echo line $i > /dev/console; done; printf 'no end' > /dev/console")
    for query, expected in {
        "": "line 1\nline 2\nline 3\nno end",
        "?follow=0": "line 1\nline 2\nline 3\nno end",
        "?follow=false&tail=2": "line 3\nno end",
        "?tail=0": "",
        "?tail=100": "line 1\nline 2\nline 3\nno end",
    }.items():
        found = wire.send("GET", f"{box.path}/logs{query}")
        assert (found.status, found.header("content-type")) == (200, "text/plain; charset=utf-8")
        assert found.body.decode() == expected
    for query in ("follow=2", "follow=yes", "tail=-1", "tail=x"):
        wire.send("GET", f"{box.path}/logs?{query}").error(400, "request.invalid")
    with wire.connect() as connection:
        connection.send(wire.head("GET", f"{box.path}/logs?follow=1&tail=2") + b"\r\n")
        assert connection.answer_head()[0] == 200
        assert b'{"line":"line 3"}' in connection.chunk()
