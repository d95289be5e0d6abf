"""Events of real sandboxes: each move is told once, over the end of the server, and sent to a webhook."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kit import sse
from kit.client import Api, Box
from kit.server import Server
from kit.until import until

LIFE = ["created", "running", "paused", "resumed", "hibernated", "woken", "failed", "deleted"]


@pytest.fixture
def own(baked: Path) -> Iterator[Server]:
    """A server that may be killed, and whose webhooks may go to this host."""
    server = Server.make(baked, pool_warm=0, pool_launched=0, webhook_private="true")
    server.start()
    try:
        yield server
    finally:
        server.close()


class Receiver:
    """`got` is what came: headers and body. It refuses the first `refusals` requests."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.refusals = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                refused = receiver.refusals > 0
                receiver.refusals -= refused
                if not refused:
                    receiver.got.append(({k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(500 if refused else 204)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def types(self) -> list[str]:
        return [json.loads(body)["type"].removeprefix("sandbox.") for _, body in self.got]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def signed(secret: str, headers: dict[str, str], body: bytes) -> bool:
    text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(base64.b64decode(secret.removeprefix("whsec_")), text, hashlib.sha256).digest()
    return headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()


def follow(api: Api, path: str, last: str, count: int) -> list[sse.Event]:
    """The next `count` events after `last`; hangs up then."""
    found: list[sse.Event] = []
    parser = sse.Parser()
    headers = {"Last-Event-ID": last}
    with api.http.stream("GET", path, params={"follow": "1"}, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        for chunk in response.iter_raw():
            found += [event for event in parser.feed(chunk) if event.name]
            if len(found) >= count:
                return found[:count]
    return found


def live(box: Box, server: Server) -> None:
    """Everything that is told, the death of its machine included."""
    assert box.sh("echo x") == "x\n"
    for verb in ("pause", "resume", "hibernate", "wake"):
        assert box.verb(verb)[0] in {200, 204}
    os.kill(server.qemu(box.id).pid, signal.SIGKILL)
    until(lambda: box.status() == "failed")


def test_a_life_is_told_and_sent_over_the_end_of_the_server(own: Server, receiver: Receiver) -> None:
    hook = own.api.call("POST", "/v1/webhooks", json={"url": receiver.url, "types": ["sandbox.*"]})
    receiver.refusals = 1
    box = own.api.create()
    path = f"/v1/sandboxes/{box.id}/events"
    first = follow(own.api, path, "0", 2)
    own.kill()
    own.start()
    box = own.api.attach(box.id)
    live(box, own)
    box.delete()
    rest = follow(own.api, path, str(first[-1].id), len(LIFE))
    assert rest[-1].name == "end", "nothing more will be told of it"
    told = [*first, *rest[:-1]]
    assert [event.data["type"].removeprefix("sandbox.") for event in told] == LIFE
    ids = [int(str(event.id)) for event in told]
    assert ids == sorted(set(ids)), "each once"
    listed = own.api.call("GET", path)["events"]
    assert [event["id"] for event in listed] == [event.id for event in told]
    assert listed[6]["payload"]["reason"] == "vmm_died"
    assert own.api.call("GET", "/v1/events", params={"sandbox_id": box.id})["events"] == listed

    until(lambda: receiver.types[-1:] == ["deleted"], 60)
    seen = [int(json.loads(body)["id"]) for _, body in receiver.got]
    assert seen == sorted(seen), "in order, and some perhaps twice"
    assert sorted(set(seen)) == ids, "none is left out"
    assert all(signed(hook["secret"], *one) for one in receiver.got)
    state = own.api.call("GET", f"/v1/webhooks/{hook['id']}")["state"]
    assert (state["lag"], state["failures"]) == (0, 0)
    tested = own.api.call("POST", f"/v1/webhooks/{hook['id']}/test")
    assert (tested["delivered"], tested["status"]) == (True, 204)


def test_a_machine_that_dies_while_no_server_runs(own: Server) -> None:
    box = own.api.create()
    qemu = own.qemu(box.id).pid
    own.kill()
    os.kill(qemu, signal.SIGKILL)
    own.start()
    found = own.api.call("GET", f"/v1/sandboxes/{box.id}/events")["events"]
    assert [one["type"] for one in found] == ["sandbox.created", "sandbox.running", "sandbox.failed"]
    assert found[-1]["payload"]["reason"] == "vmm_died"
