"""Tokens over the API, and the audit log of what was changed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from access_site import AccessSite, build
from app_host import Crew, Host, settings
from archive_site import Site

from cloche_server.app import audit as audit_module
from cloche_server.app import tokens as tokens_module
from cloche_server.app.audit import Audit, AuditEntry
from cloche_server.core.scopes import Scope
from cloche_server.host.append import AppendLog

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("quick_disk")]


@pytest.fixture
async def front(host: Host, crew: Crew, tmp_path: Path) -> AsyncIterator[AccessSite]:
    templates = Site(tmp_path / "t", host.world)
    async with build(host, crew, templates, settings(tmp_path), tmp_path / "audit.log") as site:
        yield site


async def test_a_token_is_told_once_and_works_until_it_ends(front: AccessSite) -> None:
    admin = front.own.client
    made = await admin.post("/v1/tokens", json={"name": "ci", "scope": "exec", "expires_in_seconds": 60})
    assert made.status_code == 201
    told = made.json()
    assert (told["scope"], told["workspace"], told["name"]) == ("exec", "w", "ci")
    assert made.headers["location"] == f"/v1/tokens/{told['prefix']}"
    listed = {one["prefix"]: one for one in (await admin.get("/v1/tokens")).json()["tokens"]}
    assert listed[told["prefix"]] == {name: value for name, value in told.items() if name != "token"}
    async with front.client(told["token"]) as client:
        me = (await client.get("/v1/me")).json()
        assert (me["scope"], me["expires_at"], me["token_prefix"]) == ("exec", told["expires_at"], told["prefix"])
        front.host.clock.time += 61
        ended = await client.get("/v1/me")
        assert (ended.status_code, ended.json()["code"]) == (401, "auth.token_expired")
    assert told["prefix"] not in {one["prefix"] for one in (await admin.get("/v1/tokens")).json()["tokens"]}
    assert (await admin.delete(f"/v1/tokens/{told['prefix']}")).status_code == 404


async def test_no_token_can_make_more_than_it_is(front: AccessSite) -> None:
    box, now = front.own.ids["sandboxes"], front.host.clock.now()
    for fields, body in (
        ({"sandbox_id": box}, {"scope": "read"}),
        ({"sandbox_id": box}, {"scope": "read", "sandbox_id": "z" * 20}),
        ({"expires_at": now + 60}, {"scope": "read", "expires_in_seconds": 61}),
        ({"scope": Scope.EXEC}, {"scope": "read"}),
    ):
        text, _ = await front.token("w", **fields)
        async with front.client(text) as client:
            refused = await client.post("/v1/tokens", json=body)
            assert (refused.status_code, refused.json()["code"]) == (403, "auth.forbidden"), (fields, body)
    text, info = await front.token("w", sandbox_id=box, expires_at=now + 60)
    async with front.client(text) as client:
        made = (await client.post("/v1/tokens", json={"scope": "admin", "sandbox_id": box})).json()
        assert made["expires_at"] == (await client.get("/v1/me")).json()["expires_at"], "it cannot outlive its maker"
        seen = {one["prefix"] for one in (await client.get("/v1/tokens")).json()["tokens"]}
        assert {info.prefix, made["prefix"]} <= seen
        assert front.own.info.prefix not in seen
        assert (await client.delete(f"/v1/tokens/{front.own.info.prefix}")).status_code == 404
        assert (await client.delete(f"/v1/tokens/{made['prefix']}")).status_code == 204


@pytest.mark.parametrize(
    "body",
    [{}, {"scope": "root"}, {"scope": "read", "expires_in_seconds": 0}, {"scope": "read", "expires_in_seconds": 1e12},
     {"scope": "read", "expires_in_seconds": "60"}, {"scope": "read", "name": "n" * 129}],
)  # fmt: skip
async def test_what_is_no_token(front: AccessSite, body: dict[str, object]) -> None:
    assert (await front.own.client.post("/v1/tokens", json=body)).status_code == 400


async def test_there_is_an_end_of_tokens(front: AccessSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "MAX_TOKENS", 2)
    refused = await front.own.client.post("/v1/tokens", json={"scope": "read"})
    assert (refused.status_code, refused.json()["code"]) == (409, "token.too_many")


# ------------------------------------------------------------------ the audit log


async def test_what_was_changed_and_by_whom(front: AccessSite, tmp_path: Path) -> None:
    own, other = front.own, front.other
    made = await own.client.post("/v1/sandboxes", json={}, headers={"X-Request-Id": "r-1"})
    box = made.json()["id"]
    await own.client.get(f"/v1/sandboxes/{box}")
    await other.client.delete(f"/v1/sandboxes/{box}")
    text, reader = await front.token("w", scope=Scope.READ)
    async with front.client(text) as client:
        await client.post(f"/v1/sandboxes/{box}/exec?secret=hush", json={"cmd": "hush"})
    async with front.client("pds_" + "1" * 32) as client:
        await client.delete("/v1/sandboxes/hush")
    found = (await own.client.get("/v1/audit?limit=2")).json()
    refused, created = found["entries"]
    assert created == {
        "time": created["time"], "request_id": "r-1", "token": own.info.prefix, "workspace": "w", "method": "POST",
        "route": "/v1/sandboxes", "sandbox_id": box, "status": 201, "client": "127.0.0.1",
    }  # fmt: skip
    assert (refused["route"], refused["sandbox_id"], refused["status"], refused["code"], refused["token"]) == (
        "/v1/sandboxes/{sandbox_id}/exec", box, 403, "auth.forbidden", reader.prefix,
    )  # fmt: skip
    pages, following = [], None
    while True:
        query = "" if following is None else f"&before={following}"
        page = (await own.client.get(f"/v1/audit?limit=3{query}")).json()
        pages += page["entries"]
        if (following := page.get("next")) is None:
            break
    assert pages[:2] == found["entries"]
    assert {entry["workspace"] for entry in pages} == {"w"}
    assert len(pages) == len({entry["request_id"] for entry in pages})
    assert box in {e.get("sandbox_id") for e in (await other.client.get("/v1/audit")).json()["entries"]}, "its own try"
    raw = (tmp_path / "audit.log").read_text()
    assert "hush" not in raw
    assert text not in raw
    assert (tmp_path / "audit.log").stat().st_mode & 0o777 == 0o600
    strangers = [json.loads(line) for line in raw.splitlines() if '"workspace"' not in line]
    assert [(one["status"], one["code"]) for one in strangers] == [(401, "auth.invalid_token")]
    for cursor in ("x", "-1", "1" * 19):
        assert (await own.client.get(f"/v1/audit?before={cursor}")).status_code == 400


def _entry(number: int) -> AuditEntry:
    return AuditEntry(1.0, f"r{number}", "pds_1", "w", "POST", "/v1/x", None, 200, None, "c")


async def test_a_full_disk_loses_nothing_that_fits_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "MAX_WAITING", 3)
    audit = Audit(AppendLog(tmp_path / "a.log", 1 << 20, 2))
    await audit.open()
    with monkeypatch.context() as patched:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patched.setattr(os, "write", full)
        for number in range(5):
            audit.record(_entry(number))
        assert await audit.flush() is False
        assert await audit.flush() is False
    assert await audit.flush() is True
    entries, _ = await audit.read("w", 10, None)
    assert [one["request_id"] for one in entries] == ["r2", "r1", "r0"]
    assert '{"lost": 2}' in (tmp_path / "a.log").read_text()
    audit.record(_entry(6))
    await audit.close()
    again = Audit(AppendLog(tmp_path / "a.log", 1 << 20, 2))
    await again.open()
    again.record(_entry(7))
    entries, cursor = await again.read("w", 2, None)
    assert [one["request_id"] for one in entries] == ["r7", "r6"]
    assert cursor is not None
    older, cursor = await again.read("w", 2, cursor)
    assert [one["request_id"] for one in older] == ["r2", "r1"]
    await again.close()


async def test_what_is_recorded_is_written_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "GATHER_SECONDS", 0.0)
    audit = Audit(AppendLog(tmp_path / "a.log", 1 << 20, 2))
    running = asyncio.ensure_future(audit.run())
    audit.record(_entry(1))
    async with asyncio.timeout(20):
        while not (tmp_path / "a.log").exists() or not (tmp_path / "a.log").read_text().endswith("\n"):
            await asyncio.sleep(0.01)
    running.cancel()
    audit.record(_entry(2))
    await audit.close()
    assert (tmp_path / "a.log").read_text().count("\n") == 2
