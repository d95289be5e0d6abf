"""The routes of files over HTTP, with the real agent behind them: states, parts, archives, watches, signed links."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from cloche_server.api.app import build_app
from cloche_server.api.scopes import NEEDS
from cloche_server.app.entry import Traffic
from cloche_server.app.filelinks import FileLinks
from cloche_server.app.files import Files
from cloche_server.app.filetools import FileTools
from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError
from cloche_server.core.filelinks import FileLink, mint
from cloche_server.guest.client import GuestClient
from cloche_server.settings import Settings
from kit.tokens import BEARER, AnyToken

ID = "a" * 20
KEY = b"k" * 32
FS = f"/v1/sandboxes/{ID}/fs"


class Clock:
    at = 1_000_000.0

    def now(self) -> float:
        return self.at


class OneSandbox:
    """Stands for `Access`: one sandbox, whose guest is the agent."""

    def __init__(self, guest: GuestClient) -> None:
        record = SimpleNamespace(id=ID, workspace="w", defaults=SimpleNamespace(user=None))
        self.entry = SimpleNamespace(record=record, traffic=Traffic())
        self.guest = guest

    async def find(self, _workspace: str, sandbox_id: str) -> Any:
        if sandbox_id != ID:
            raise ClocheError("sandbox.not_found", "there is no such sandbox")
        return self.entry

    async def serving(self, workspace: str, sandbox_id: str) -> tuple[Any, GuestClient]:
        return await self.find(workspace, sandbox_id), self.guest

    def busy(self, _entry: Any) -> Any:
        return nullcontext()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def http(agent_client: GuestClient, clock: Clock) -> AsyncIterator[httpx.AsyncClient]:
    access: Any = OneSandbox(agent_client)
    stub = SimpleNamespace(
        settings=Settings(),
        tokens=AnyToken(),
        clock=clock,
        audit=None,
        stopping=asyncio.Event(),
        files=Files(access),
        file_tools=FileTools(access),
        file_links=FileLinks(access, cast("Any", clock), KEY),
    )
    app = build_app(cast("Services", stub))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers=BEARER) as client:
        yield client


async def test_parts_and_states(http: httpx.AsyncClient, tmp_path: Path) -> None:
    query = {"path": f"{tmp_path}/f"}
    made = await http.put(FS, params=query, content=b"0123456789", headers={"If-None-Match": "*"})
    tag = made.headers["etag"]
    assert made.json()["etag"] == tag
    for asked, status, content, where in (
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=8-", 206, b"89", "bytes 8-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=0-99", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=4-2", 200, b"0123456789", None),
        ("bytes=0-1,4-5", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
    ):
        got = await http.get(FS, params=query, headers={"Range": asked})
        assert (got.status_code, got.content, got.headers.get("content-range")) == (status, content, where), asked
    got = await http.get(FS, params=query, headers={"Range": "bytes=10-20"})
    assert (got.status_code, got.headers["content-range"]) == (416, "bytes */10")
    for was, status in ((tag, 206), ('"other"', 200), (f"W/{tag}", 200), ("Wed, 21 Oct 2015 07:28:00 GMT", 200)):
        got = await http.get(FS, params=query, headers={"Range": "bytes=0-0", "If-Range": was})
        assert got.status_code == status, was
    for known, status in ((tag, 304), (f'"x", W/{tag}', 304), ("*", 304), ('"x"', 200)):
        got = await http.get(FS, params=query, headers={"If-None-Match": known})
        assert (got.status_code, got.headers["etag"]) == (status, tag), known
    got = await http.head(FS, params=query)
    assert (got.status_code, got.headers["content-length"], got.content) == (200, "10", b"")


async def test_conditions_of_writes(http: httpx.AsyncClient, tmp_path: Path) -> None:
    query = {"path": f"{tmp_path}/f"}
    tag = (await http.put(FS, params=query, content=b"one")).headers["etag"]
    for name, value, status in (
        ("If-None-Match", "*", 412),
        ("If-None-Match", '"x"', 400),
        ("If-Match", "nonsense", 400),
        ("If-Match", '"x"', 412),
        ("If-Match", f"W/{tag}", 412),
        ("If-Match", f'"x", {tag}', 200),
        ("If-Match", tag, 412),
        ("If-Match", "*", 200),
    ):
        got = await http.put(FS, params=query, content=b"two", headers={name: value})
        assert got.status_code == status, (name, value, got.text)
    got = await http.put(FS, params={"path": f"{tmp_path}/none"}, content=b"x", headers={"If-Match": "*"})
    assert (got.status_code, got.json()["code"]) == (412, "file.changed")


async def test_archives_and_what_is_told_of_half_ones(http: httpx.AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/f").write_text("x" * 100_000)
    down = await http.get(f"{FS}/archive", params={"path": f"{tmp_path}/in"})
    assert (down.headers["content-type"], down.headers["x-archive-entries"]) == ("application/gzip", "1")
    up = await http.put(f"{FS}/archive", params={"path": f"{tmp_path}/out"}, content=down.content)
    assert up.json()["bytes"] == 100_000
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("good", "/abs"):
            tar.addfile(tarfile.TarInfo(name))
    query = {"path": f"{tmp_path}/bad", "format": "tar"}
    up = await http.put(f"{FS}/archive", params=query, content=made.getvalue())
    assert (up.status_code, up.json()["code"], up.json()["details"]["done"]["files"]) == (400, "file.unsafe_archive", 1)
    query = {"path": f"{tmp_path}/big", "format": "tar", "max_entries": "1"}
    up = await http.put(f"{FS}/archive", params=query, content=made.getvalue())
    assert (up.status_code, up.json()["code"]) == (413, "file.archive_too_large")


async def test_signed_links(http: httpx.AsyncClient, tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "ä b").write_text("content")
    answer = await http.post(f"{FS}/url", json={"path": f"{tmp_path}/ä b", "expires_seconds": 60})
    url = answer.json()["url"]
    plain = {"headers": {"Authorization": ""}}
    got = await http.get(url, **plain)
    assert (got.status_code, got.text) == (200, "content")
    assert got.headers["content-disposition"] == "attachment; filename*=UTF-8''%C3%A4%20b"
    assert (await http.head(url, **plain)).status_code == 200
    assert (await http.get(url, headers={"Range": "bytes=0-2"})).text == "con"
    for bad in (url[:-2] + "AA", url + "A", url.replace("/v1/f/", "/v1/f/A"), url.rsplit(".", 1)[0]):
        got = await http.get(bad, **plain)
        assert (got.status_code, got.json()["code"]) == (403, "file.link_invalid"), bad
    assert (await http.put(url, content=b"x", **plain)).status_code == 403
    preflight = await http.options(url, headers={"Origin": "https://a.example", "Access-Control-Request-Method": "GET"})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, "*")
    clock.at += 61
    assert (await http.get(url, **plain)).status_code == 403
    body = {"path": f"{tmp_path}/up", "method": "PUT", "max_bytes": 3}
    url = (await http.post(f"{FS}/url", json=body)).json()["url"]
    assert (await http.put(url, content=b"1234", **plain)).status_code == 413

    async def pieces() -> AsyncIterator[bytes]:
        yield b"12"
        yield b"34"

    assert (await http.put(url, content=pieces(), **plain)).status_code == 413
    assert not (tmp_path / "up").exists()
    assert (await http.put(url, content=b"123", **plain)).json()["created"] is True
    gone = mint(KEY, FileLink("b" * 20, "w", "GET", b"/etc/hostname", int(clock.at) + 60))
    assert (await http.get(f"/v1/f/{gone}", **plain)).status_code == 404
    for seconds in (0, 7 * 86400 + 1):
        refused = await http.post(f"{FS}/url", json={"path": "/x", "expires_seconds": seconds})
        assert refused.status_code == 400


async def test_bad_requests_say_what_is_wrong(http: httpx.AsyncClient, tmp_path: Path) -> None:
    for verb, body, code in (
        ("grep", {"path": str(tmp_path), "pattern": "("}, "request.invalid"),
        ("grep", {"path": "/proc", "pattern": "x"}, "request.invalid"),
        ("glob", {"path": f"{tmp_path}/no", "pattern": "*"}, "file.not_found"),
        ("glob", {"path": str(tmp_path), "pattern": "/x"}, "request.invalid"),
        ("attributes", {"path": str(tmp_path)}, "request.invalid"),
        ("attributes", {"path": str(tmp_path), "owner": "nobody-here"}, "request.invalid"),
        ("copy", {"from": str(tmp_path), "to": f"{tmp_path}/in"}, "request.invalid"),
        ("link", {"path": f"{tmp_path}/l", "target": "relative", "hard": True}, "request.invalid"),
    ):
        got = await http.post(f"{FS}/{verb}", json=body)
        assert got.json()["code"] == code, (verb, body, got.text)


async def test_a_watch_over_http(http: httpx.AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()

    async def change() -> None:
        await asyncio.sleep(0.3)
        (tmp_path / "d/f").write_text("x")
        await asyncio.sleep(0.1)
        (tmp_path / "d/f").unlink()
        (tmp_path / "d").rmdir()

    changing = asyncio.ensure_future(change())
    got = await http.get(f"{FS}/watch", params={"path": f"{tmp_path}/d", "recursive": "1"})
    await changing
    names = [line for line in got.text.split("\n") if line.startswith("event: ")]
    assert names[0] == "event: ready"
    assert "event: created" in names
    assert names[-1] == "event: end"


def test_a_head_needs_what_a_read_needs() -> None:
    assert NEEDS["files_head"] == NEEDS["files_read"]
