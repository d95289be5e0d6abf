"""Code in sandboxes over HTTP, with a bridge that says what it is told to: events, ends, contexts, sessions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from access_site import AccessSite, build, served
from app_host import Crew, Host, settings
from archive_site import Site

from cloche_server.core import code
from cloche_server.core.errors import ClocheError
from kit.fake_engine import FakeGuest

pytestmark = pytest.mark.thorough

STARTED = {"type": "started", "context": "python", "language": "python"}
END = {"type": "end", "status": "ok", "execution_count": 1, "duration_ms": 2.5, "state_lost": False}
CONTEXT = {
    "id": "c1", "language": "python", "cwd": None, "created_at": 1.5, "state": "idle", "cells": 2, "execution_count": 1,
}  # fmt: skip


class Bridge:
    """Answers every connection with what `script` holds at that time; a number in it is a silence of so many seconds,
    `None` one until it is closed."""

    def __init__(self) -> None:
        self.script: list[dict[str, Any] | float | None] = []
        self.asked: list[dict[str, Any]] = []
        self.installed = True
        self.running = True
        #: It has gone, and its end of every connection with it.
        self.ended = False
        self.dialed = 0
        self.open = 0
        self.closed = asyncio.Event()

    async def tunnel(self, port: int) -> Connection:
        assert port == code.CODE_PORT
        if not self.running:
            raise ClocheError("port.closed", "nothing listens")
        self.open += 1
        self.dialed += 1
        return Connection(self)


class Connection:
    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.left: list[dict[str, Any] | float | None] = []
        self.said = asyncio.Event()
        self.shut = False

    async def write(self, data: bytes) -> None:
        self.bridge.asked += code.FrameReader().feed(data)
        self.left = list(self.bridge.script)
        self.said.set()

    async def read(self) -> bytes:
        await self.said.wait()
        if not self.left:
            return b""
        event = self.left.pop(0)
        if isinstance(event, float):
            await asyncio.sleep(event)
            return await self.read()
        if event is None:
            await asyncio.Event().wait()
        return code.frame(event or {})

    @property
    def is_quiet(self) -> bool:
        return not (self.left or self.shut or self.bridge.ended)

    async def write_eof(self) -> None:
        raise AssertionError("a request has one frame and no end")

    def close(self) -> None:
        if not self.shut:
            self.shut = True
            self.bridge.open -= 1
            self.bridge.closed.set()


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Bridge:
    made = Bridge()

    async def tunnel(_guest: FakeGuest, port: int, *, timeout: float) -> Connection:
        return await made.tunnel(port)

    async def start(_guest: FakeGuest, argv: tuple[str, ...], _env: Any) -> None:
        assert argv == (code.BRIDGE,)
        if not made.installed:
            raise ClocheError("template.bake_failed", "there is no such program")
        made.running = True

    monkeypatch.setattr(FakeGuest, "tunnel", tunnel, raising=False)
    monkeypatch.setattr("cloche_server.app.code.start_service", start)
    return made


@pytest.fixture
async def site(host: Host, crew: Crew, tmp_path: Path) -> AsyncIterator[AccessSite]:
    async with build(host, crew, Site(tmp_path / "t", host.world), settings(tmp_path)) as made:
        yield made


def here(site: AccessSite, path: str = "code") -> str:
    return f"/v1/sandboxes/{site.own.ids['sandboxes']}/{path}"


async def post(site: AccessSite, path: str = "code", **body: Any) -> httpx.Response:
    return await site.own.client.post(here(site, path), json=body)


async def test_a_run_in_one_piece(site: AccessSite, bridge: Bridge) -> None:
    bridge.script = [
        {"type": "alive"}, STARTED, {"type": "stdout", "text": "a"}, {"type": "stderr", "text": "e"},
        {"type": "gap", "stream": "stdout", "count": 7}, {"type": "stdout", "text": "b"},
        {"type": "result", "main": True, "data": {"text/plain": "2"}, "dropped": {}},
        {"type": "error", "name": "E", "message": "m", "traceback": "t"}, {**END, "status": "error"},
    ]  # fmt: skip
    answer = await post(site, code="1+1", language="PY", env={"A": "b"}, cwd="/tmp", timeout_seconds=5)
    assert answer.status_code == 200
    told = answer.json()
    assert (told["status"], told["stdout_dropped_bytes"], told["stderr"]) == ("error", 7, "e")
    assert told["stdout"].startswith("a")
    assert told["results"] == [{"data": {"text/plain": "2"}, "main": True, "dropped": {}}]
    assert told["error"] == {"name": "E", "message": "m", "traceback": "t"}
    assert "detail" not in told
    asked = bridge.asked[-1]
    assert (asked["op"], asked["language"], asked["timeout_ms"], asked["env"]) == ("run", "python", 5000, {"A": "b"})
    assert (bridge.open, bridge.dialed) == (1, 1), "it is kept"
    assert (await post(site, code="2")).json()["status"] == "error"
    assert (bridge.open, bridge.dialed) == (1, 1)
    bridge.ended = True
    assert (await post(site, code="3")).json()["status"] == "error"
    assert bridge.dialed == 2, "nothing is sent to where nobody is any more"


async def test_a_run_as_events(site: AccessSite, bridge: Bridge) -> None:
    bridge.script = [
        STARTED, {"type": "stdout", "text": "é"}, {"type": "error", "name": "E", "message": "", "traceback": ""},
        {"type": "input", "prompt": "?", "password": False},
        {**END, "status": "killed", "state_lost": True, "exit_code": 3},
    ]  # fmt: skip
    answer = await post(site, code="x", stream=True)
    lines = answer.text.split("\n")
    names = [line[7:] for line in lines if line.startswith("event: ")]
    assert names == ["started", "stdout", "error", "input_requested", "end"]
    end = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
    assert (end["status"], end["state_lost"]) == ("killed", True)
    assert "exit code 3" in end["detail"]


@pytest.mark.parametrize("bad", [{"type": "stdout"}, {"type": "started"}, STARTED, {"type": "end", "status": "fine"}])
async def test_nonsense_ends_the_stream_with_a_failure(site: AccessSite, bridge: Bridge, bad: dict[str, Any]) -> None:
    bridge.script = [STARTED, bad]
    answer = await post(site, code="x", stream=True)
    assert answer.text.rstrip().split("\n")[-2] == "event: failed"
    assert "guest.protocol" in answer.text
    assert (await post(site, code="x")).json()["code"] == "guest.protocol"
    assert bridge.open == 0


async def test_a_connection_that_breaks_is_told(site: AccessSite, bridge: Bridge) -> None:
    bridge.script = [STARTED, {"type": "stdout", "text": "a"}]
    answer = await post(site, code="x")
    assert (answer.status_code, answer.json()["code"]) == (502, "code.lost")
    assert "event: failed" in (await post(site, code="x", stream=True)).text


@pytest.mark.parametrize(
    ("reason", "status", "name"),
    [
        ("no_context", 404, "code.context_not_found"),
        ("too_many", 429, "code.too_many_contexts"),
        ("busy", 503, "sandbox.busy"),
        ("start_failed", 500, "code.kernel_failed"),
        ("no_user", 400, "exec.user_not_found"),
        ("no_language", 400, "request.invalid"),
        ("not_waiting", 409, "code.not_waiting"),
    ],
)
async def test_refusals(site: AccessSite, bridge: Bridge, reason: str, status: int, name: str) -> None:
    bridge.script = [{"type": "refused", "reason": reason}]
    for answer in (await post(site, code="x"), await post(site, code="x", stream=True)):
        assert (answer.status_code, answer.json()["code"]) == (status, name)


async def test_bad_requests_reach_no_guest(site: AccessSite, bridge: Bridge) -> None:
    for body in (
        {}, {"code": ""}, {"code": 1}, {"code": "1", "language": "cobol"}, {"code": "1", "cwd": "here"},
        {"code": "1", "language": "python", "context": "c"}, {"code": "1", "timeout_seconds": 10**6},
        {"code": "1", "env": {"a=b": "c"}},
    ):  # fmt: skip
        assert (await post(site, **body)).json()["code"] == "request.invalid", body
    assert bridge.asked == []
    assert (await site.own.client.delete(here(site, "code/contexts/NO!"))).json()["code"] == "code.context_not_found"


async def test_a_bridge_is_started_where_there_is_one(site: AccessSite, bridge: Bridge) -> None:
    bridge.running = False
    bridge.script = [STARTED, END]
    answers = await asyncio.gather(*(post(site, code="1") for _ in range(3)))
    assert [answer.json()["status"] for answer in answers] == ["ok"] * 3
    bridge.running, bridge.installed, bridge.ended = False, False, True
    answer = await post(site, code="1")
    assert (answer.status_code, answer.json()["code"]) == (409, "code.not_available")
    assert answer.json()["details"] == {"template": "code-interpreter"}


async def test_many_at_once_have_connections_of_their_own_and_one_is_kept(site: AccessSite, bridge: Bridge) -> None:
    bridge.script = [STARTED, 0.05, END]
    answers = await asyncio.gather(*(post(site, code="1") for _ in range(4)))
    assert [answer.json()["status"] for answer in answers] == ["ok"] * 4
    assert (bridge.open, bridge.dialed) == (1, 4)
    bridge.script = [{"type": "refused", "reason": "busy"}]
    assert (await post(site, code="1")).status_code == 503
    bridge.script = [{"type": "reply", "contexts": []}]
    assert (await site.own.client.get(here(site, "code/contexts"))).status_code == 200
    assert (bridge.open, bridge.dialed) == (1, 4)
    bridge.script = [STARTED, {"type": "nonsense"}]
    assert (await post(site, code="1")).json()["code"] == "guest.protocol"
    assert (bridge.open, bridge.dialed) == (0, 4), "what is behind nonsense is not known"


async def test_who_hangs_up_closes_the_connection(site: AccessSite, bridge: Bridge) -> None:
    bridge.script = [STARTED, None]
    async with served(site) as url:
        headers = dict(site.own.client.headers)
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as client:
            for stream in (True, False):
                bridge.closed.clear()
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(here(site), json={"code": "1", "stream": stream}, timeout=0.5)
                async with asyncio.timeout(10):
                    await bridge.closed.wait()
        assert bridge.open == 0


async def test_contexts(site: AccessSite, bridge: Bridge) -> None:
    bridge.script = [{"type": "reply", "contexts": [CONTEXT], "context": CONTEXT, "interrupted": True}]
    made = await post(site, "code/contexts", language="js", cwd="/srv")
    assert made.status_code == 201
    assert bridge.asked[-1]["language"] == "javascript"
    assert made.json()["created_at"] == "1970-01-01T00:00:01.500Z"
    listed = (await site.own.client.get(here(site, "code/contexts"))).json()
    assert [one["id"] for one in listed["contexts"]] == ["c1"]
    assert (await post(site, "code/contexts/c1/interrupt")).json() == {"interrupted": True}
    assert (await post(site, "code/contexts/c1/restart")).status_code == 204
    assert (await post(site, "code/contexts/c1/input", text="hi")).status_code == 204
    assert bridge.asked[-1]["text"] == "hi"
    assert (await site.own.client.delete(here(site, "code/contexts/c1"))).status_code == 204


async def test_sessions_of_other_clients(site: AccessSite, bridge: Bridge) -> None:
    bridge.script = [{"type": "reply", "context": CONTEXT, "contexts": [CONTEXT]}]
    made = (await post(site, "repl/sessions", language="py")).json()
    assert made["id"] == made["session_id"] == "c1"
    assert (await site.own.client.get(here(site, "repl/sessions"))).json()[0]["cells"] == 2
    picture = {"image/png": "iVBORw==", "application/json": '{"a":1}'}
    bridge.script = [STARTED, {"type": "result", "main": False, "data": picture, "dropped": {}}, END]
    ran = (await post(site, "repl/sessions/c1/run", code="1")).json()
    assert (ran["exit"], ran["exit_code"], ran["error"]) == (0, 0, "")
    assert ran["results"] == [{"image/png": "iVBORw==", "application/json": '{"a": 1}'}]
    raised = {"type": "error", "name": "E", "message": "m", "traceback": "trace"}
    bridge.script = [STARTED, raised, {**END, "status": "error"}]
    ran = (await post(site, "repl/sessions/c1/run", code="1")).json()
    assert (ran["exit"], ran["error"]) == (1, "trace")
    bridge.script = [STARTED, {**END, "status": "timeout"}]
    answer = await post(site, "repl/sessions/c1/run", code="1", timeout_ms=1000)
    assert answer.status_code == 504
    assert "timeout" in answer.json()["error"]
    assert bridge.asked[-1]["timeout_ms"] == 1000
    assert "python" in (await site.own.client.get("/v1/repl/languages")).json()


async def test_a_client_without_patience_is_kept_while_its_cell_runs(
    site: AccessSite, bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloche_server.api.keepalive.LATE_SECONDS", 0.0)
    monkeypatch.setattr("cloche_server.api.keepalive.THEN_SECONDS", 0.01)
    headers = {"User-Agent": "pandastack-py/0.10.0"}
    path = here(site, "repl/sessions/c1/run")
    bridge.script = [STARTED, 0.1, {"type": "stdout", "text": "a"}, END]
    answer = await site.own.client.post(path, json={"code": "1"}, headers=headers)
    assert answer.text.startswith(" ")
    assert (answer.json()["stdout"], answer.json()["exit"]) == ("a", 0)
    bridge.script = [STARTED, 0.1, {**END, "status": "timeout"}]
    answer = await site.own.client.post(path, json={"code": "1"}, headers=headers)
    assert answer.status_code == 200, "the status is told before the end is known"
    assert answer.json()["error"].startswith("cell timeout after 30 s")
    assert answer.json()["exit_code"] == 124
    assert bridge.open == 1
