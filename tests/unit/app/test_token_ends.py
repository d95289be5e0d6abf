"""Tokens that are revoked or expire while requests run by them, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from access_site import AccessSite, TalkingGuest, build, served
from app_host import Crew, Host, settings
from archive_site import Site
from events_server import Stream

from cloche_server.api import middleware
from cloche_server.api.middleware import RequestMiddleware
from cloche_server.app import machines as machines_module
from cloche_server.app import tokens as tokens_module
from kit.fake_engine import settle

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("quick_disk")]


@dataclass
class Front:
    site: AccessSite
    url: str

    @contextlib.asynccontextmanager
    async def client(self, **fields: Any) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
        """Of a token of its own; and the prefix of that."""
        text, info = await self.site.token("w", **fields)
        headers = {"Authorization": f"Bearer {text}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20, trust_env=False) as client:
            yield client, info.prefix

    async def running(self, count: int) -> None:
        calls = self.site.services.tokens.calls
        await settle(lambda: sum(len(one) for one in calls._open.values()) == count)


@pytest.fixture
async def front(host: Host, crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    monkeypatch.setattr(machines_module, "GuestClient", TalkingGuest)
    monkeypatch.setattr(TalkingGuest, "endless", True)
    monkeypatch.setattr(tokens_module, "WATCH_SECONDS", 0.02)
    templates = Site(tmp_path / "t", host.world)
    async with build(host, crew, templates, settings(tmp_path)) as site, served(site) as url:
        crew.create_task(site.services.tokens.watch())
        async with asyncio.timeout(60):
            yield Front(site, url)
        assert TalkingGuest.running == set(), "a command runs for nobody"


def _revoke_elsewhere(data: Path, prefix: str) -> None:
    """As the command line does it: another process writes to the database."""
    with contextlib.closing(sqlite3.connect(data / "c.db", timeout=10)) as connection:
        connection.execute("UPDATE tokens SET revoked_at = 1.0 WHERE prefix = ?", (prefix,))
        connection.commit()


async def _last(response: httpx.Response) -> dict[str, Any]:
    """The data of the last event of a stream, which has to come to its end."""
    stream, data = Stream(response), None
    while (message := await stream.next()) is not None:
        data, name = message.data, message.event
    assert data is not None
    assert name == "error"
    return dict(data)


@pytest.mark.parametrize("how", ["elsewhere", "over the API", "expiry"])
async def test_streams_end_with_their_token(front: Front, tmp_path: Path, how: str) -> None:
    box = front.site.own.ids["sandboxes"]
    clock = front.site.host.clock
    ends = clock.now() + 60 if how == "expiry" else None
    async with front.client(expires_at=ends) as (client, prefix), front.client() as (untouched, _):
        async with (
            client.stream("GET", "/v1/events", params={"follow": "1"}) as events,
            client.stream("POST", f"/v1/sandboxes/{box}/exec/stream", json={"cmd": "x"}) as command,
            client.stream("GET", f"/v1/sandboxes/{box}/logs", params={"follow": "1"}) as logs,
            untouched.stream("GET", "/v1/events", params={"follow": "1"}) as others,
        ):
            waiting = asyncio.ensure_future(client.post(f"/v1/sandboxes/{box}/exec", json={"cmd": "x"}))
            await front.running(5)
            await settle(lambda: len(TalkingGuest.running) == 2)
            if how == "elsewhere":
                _revoke_elsewhere(tmp_path, prefix)
            elif how == "expiry":
                clock.time += 61
            else:
                assert (await front.site.own.client.delete(f"/v1/tokens/{prefix}")).status_code == 204
            code = "auth.token_expired" if how == "expiry" else "auth.invalid_token"
            for response in (events, command, logs):
                assert (await _last(response))["code"] == code
            refused = await waiting
            assert (refused.status_code, refused.json()["code"]) == (401, code)
            assert refused.headers["www-authenticate"] == "Bearer"
            await front.running(1)
            assert not others.is_closed
        clock.time += 2  # what was looked up is kept for a second
        again = await client.get("/v1/me")
        assert (again.status_code, again.json()["code"]) == (401, code)
        assert (await untouched.get("/v1/me")).status_code == 200


async def test_an_upload_ends_with_its_token(front: Front, tmp_path: Path) -> None:
    text, info = await front.site.token("w")
    host, _, port = front.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/snapshots/import HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {text}\r\n"
    writer.write(f"{head}Content-Length: 1000\r\n\r\n".encode())
    await front.running(1)
    _revoke_elsewhere(tmp_path, info.prefix)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_a_create_that_is_cut_off_leaves_nothing(front: Front, tmp_path: Path) -> None:
    before = len(front.site.host.access.list("w"))
    front.site.host.world.block["Machine.restore"] = begun = asyncio.Event()
    async with front.client() as (client, prefix):
        making = asyncio.ensure_future(client.post("/v1/sandboxes", json={}))
        await begun.wait()
        _revoke_elsewhere(tmp_path, prefix)
        assert (await making).status_code == 401
    del front.site.host.world.block["Machine.restore"]
    await settle(lambda: len(front.site.host.world.alive) == 2)
    assert len(front.site.host.access.list("w")) == before


async def test_a_stream_that_nobody_reads_is_cut(front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the buffers of the connection hold is waiting for a reader that has stopped."""
    finished: list[int] = []
    finish = RequestMiddleware._finish
    monkeypatch.setattr(middleware, "_LAST_WORD_SECONDS", 0.05)
    monkeypatch.setattr(RequestMiddleware, "_finish", lambda *args: (finish(*args), finished.append(1)))
    async with front.client() as (client, prefix):
        async with client.stream("GET", "/v1/events", params={"follow": "1", "tail": "0"}) as response:
            await front.running(1)
            for _ in range(100):
                await front.site.host.supervisor.journal.tell(
                    "snapshot.created", "w", "abcdefgh12", {"snapshot_id": "y" * 100000}
                )
            _revoke_elsewhere(tmp_path, prefix)
            finished.clear()
            await settle(lambda: bool(finished))
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in response.aiter_raw():
                    pass


async def test_who_revokes_itself_is_told_so(front: Front) -> None:
    async with front.client() as (client, prefix):
        assert (await client.delete(f"/v1/tokens/{prefix}")).status_code == 204
        assert (await client.get("/v1/me")).status_code == 401


async def test_a_request_that_began_after_the_look_is_looked_at(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token was found in what is kept, after a look that has seen the revocation already."""
    tokens = front.site.services.tokens
    monkeypatch.setattr(tokens_module, "WATCH_SECONDS", 3600)
    async with front.client() as (client, prefix), front.client() as (other, _):
        async with other.stream("GET", "/v1/events", params={"follow": "1"}):
            assert (await client.get("/v1/me")).status_code == 200
            kept = dict(tokens._cache)
            _revoke_elsewhere(tmp_path, prefix)
            for _ in range(5):  # one that is on its way already may come first
                await tokens.look()
                await asyncio.sleep(0.02)
            tokens._cache.update(kept)
            async with client.stream("GET", "/v1/events", params={"follow": "1"}) as response:
                assert response.status_code == 200
                await tokens.look()
                assert (await _last(response))["code"] == "auth.invalid_token"
