"""No capacity, and a server that goes away."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

from conformance_raw import Wire, check_error

from kit import sse
from kit.server import Server


def test_a_full_host_refuses_before_anything_exists(new_server: Any) -> None:
    server: Server = new_server(max_sandboxes=1, pool_warm=0, pool_launched=0)
    wire = Wire.to(server.url, server.token)
    box = server.api.create()
    before = (server.directories(), set(server.machines()))
    for body in ("{}", '{"metadata":{"a":"b"},"ttl_seconds":5}'):
        found = wire.send("POST", "/v1/sandboxes", body)
        told = found.error(503, "capacity.unavailable")
        assert found.header("retry-after") == "5"
        assert told["retryable"] is True
        assert told["details"]["resource"] == "sandboxes"
        assert told["details"]["limit"] == 1
    assert (server.directories(), set(server.machines())) == before
    assert [found["id"] for found in server.api.list()] == [box.id]
    box.delete()
    assert wire.send("POST", "/v1/sandboxes", "{}").status == 201


def test_memory_and_disk_are_refused_alike(new_server: Any) -> None:
    server: Server = new_server(pool_warm=0, pool_launched=0, memory_overcommit=0.1, disk_reserve_mb=1048576)
    wire = Wire.to(server.url, server.token)
    found = wire.send("POST", "/v1/sandboxes", "{}")
    told = found.error(503, "capacity.unavailable")
    assert told["details"]["resource"] in {"disk", "memory"}
    assert found.header("retry-after")
    assert server.api.list() == []
    assert server.directories() == set()


def test_a_key_that_was_refused_can_be_used_again(new_server: Any) -> None:
    server: Server = new_server(max_sandboxes=1, pool_warm=0, pool_launched=0)
    wire = Wire.to(server.url, server.token)
    box = server.api.create()
    key = "Idempotency-Key: k\r\n"
    wire.send("POST", "/v1/sandboxes", "{}", headers=key).error(503, "capacity.unavailable")
    box.delete()
    assert wire.send("POST", "/v1/sandboxes", "{}", headers=key).status == 201


def test_a_stop_ends_streams_with_a_terminal_event(new_server: Any) -> None:
    """A quiet command, one that never rests, and a followed log; an answer that is on its way still comes."""
    server: Server = new_server(pool_warm=0, pool_launched=0)
    wire = Wire.to(server.url, server.token)
    box = server.api.create()
    bodies = {
        "quiet": ("POST", "/exec/stream", b'{"cmd":"sleep 300"}'),
        "busy": ("POST", "/exec/stream", b'{"cmd":"while :; do echo x; done"}'),
        "logs": ("GET", "/logs?follow=1", b""),
    }
    seen: dict[str, list[sse.Event]] = {}
    begun = threading.Barrier(len(bodies) + 2, timeout=60)

    def read(name: str) -> None:
        method, route, body = bodies[name]
        with wire.connect(60) as connection:
            connection.send(wire.head(method, box.path + route, f"Content-Length: {len(body)}\r\n") + b"\r\n" + body)
            assert connection.answer_head()[0] == 200
            begun.wait()
            seen[name] = list(sse.parse(iter(connection.chunk, b"")))

    blocking: list[Any] = []

    def block() -> None:
        begun.wait()
        blocking.append(wire.send("POST", f"{box.path}/exec", '{"cmd":"sleep 1.5; echo finished"}'))

    threads = [threading.Thread(target=read, args=(name,)) for name in bodies] + [threading.Thread(target=block)]
    for thread in threads:
        thread.start()
    begun.wait()
    time.sleep(0.7)
    os.kill(server.pid, signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    for name in bodies:
        last = seen[name][-1]
        assert last.name == "error", (name, seen[name][-3:])
        check_error(last.data)
        assert last.data["code"] == "server.shutting_down"
        assert [event.name for event in seen[name]].count("error") == 1
    assert blocking[0].json()["stdout"] == "finished\n"
    server._reap()
    server.start()
    assert box.id in {found["id"] for found in server.api.list()}, "sandboxes outlive the server"


def test_a_command_that_outlasts_the_grace(new_server: Any) -> None:
    """It is killed, and its caller gets an answer in JSON that nobody takes for an invitation to try again."""
    server: Server = new_server(pool_warm=0, pool_launched=0, shutdown_grace=1)
    wire = Wire.to(server.url, server.token)
    box = server.api.create()
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(wire.send("POST", f"{box.path}/exec", '{"cmd":"sleep 300"}'))
    )
    thread.start()
    deadline = time.monotonic() + 30
    while not box.execs() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(server.pid, signal.SIGTERM)
    thread.join(60)
    told = answers[0].error(502, "exec.cancelled")
    assert told["retryable"] is False
    assert json.dumps(told).count("shutting down")
    server._reap()
