"""Promotion, export and import over HTTP: what is answered, and what a client that hangs up leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from archive_site import SHAPE, Site

from cloche_server.api.app import build_app
from cloche_server.app.pools import Pools
from cloche_server.app.services import Services
from cloche_server.app.template_keeper import TemplateKeeper
from cloche_server.app.templates import Templates
from cloche_server.store.db import Database
from cloche_server.store.sandboxes import SandboxStore
from kit.tokens import BEARER, AnyToken

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def app(site: Site, database: Database) -> Any:
    capacity: Any = None
    pools = Pools(site.machines, capacity, launched=0, warm=0)
    keeper = TemplateKeeper(site.templates, site.snapshots, SandboxStore(database), pools)
    stub = SimpleNamespace(
        settings=site.settings,
        tokens=AnyToken(),
        clock=site.clock,
        audit=None,
        stopping=asyncio.Event(),
        snapshots=SimpleNamespace(disk_bytes=lambda one: site.layers.bytes_of(one.layer_id)),
        promoter=site.promoter,
        exporter=site.exporter,
        importer=site.importer,
        templates=Templates(site.templates, keeper),
    )
    return build_app(cast("Services", stub))


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers=BEARER)


async def call(app: Any, method: str, path: str, receive: Callable[[], Any]) -> list[dict[str, Any]]:
    """What the server sends to a client that acts as `receive` says."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    route, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": route,
        "raw_path": route.encode(), "query_string": query.encode(), "root_path": "", "scheme": "http",
        "headers": [(b"authorization", BEARER["Authorization"].encode())], "server": ("x", 80), "client": ("y", 1),
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


async def test_promote_list_get_and_delete(app: Any, site: Site) -> None:
    one = site.snapshot(site.bake())
    async with client(app) as http:
        made = await http.post(f"/v1/snapshots/{one.id}/promote", json={"name": "mine", "aliases": ["m"]})
        assert made.status_code == 201, made.text
        body = made.json()
        assert (body["name"], body["aliases"], body["is_global"], body["from_snapshot"]) == (
            "mine",
            ["m"],
            False,
            one.id,
        )
        assert [(s["cpus"], s["memory_mb"]) for s in body["shapes"]] == [(SHAPE.cpus, SHAPE.memory_mb)]
        listed = (await http.get("/v1/templates")).json()
        assert [(t["name"], t["is_global"]) for t in listed] == [("base", True), ("mine", False)]
        assert "from_snapshot" not in listed[0]
        assert (await http.get("/v1/templates/m")).json() == body
        assert (await http.delete("/v1/templates/base")).status_code == 400
        assert (await http.delete("/v1/templates/mine")).status_code == 204
        assert (await http.delete("/v1/templates/mine")).json()["code"] == "template.not_found"
        for wrong in ({}, {"name": "A"}, {"name": "a", "aliases": "b"}, {"name": "a", "aliases": ["a"] * 17}):
            assert (await http.post(f"/v1/snapshots/{one.id}/promote", json=wrong)).status_code == 400
        taken = await http.post(f"/v1/snapshots/{one.id}/promote", json={"name": "base"})
        assert (taken.status_code, taken.json()["code"]) == (409, "template.name_taken")


async def test_out_and_in(app: Any, site: Site) -> None:
    one = site.snapshot(site.bake())
    async with client(app) as http:
        whole = await http.get(f"/v1/snapshots/{one.id}/export")
        assert whole.status_code == 200
        assert whole.headers["content-type"] == "application/zstd"
        assert whole.headers["content-disposition"] == f'attachment; filename="n-me-of-it-{one.id}.tar.zst"'
        bare = await http.get(f"/v1/snapshots/{one.id}/export?template=false")
        assert len(bare.content) < len(whole.content) / 2
        for raw in (whole.content, bare.content):
            made = await http.post("/v1/snapshots/import?name=new", content=raw)
            assert made.status_code == 201, made.text
            assert made.json()["name"] == "new"
            assert "secret.k" not in made.json()["metadata"]
        assert (await http.get("/v1/snapshots/none/export")).status_code == 404
        for raw in (b"", b"{}", whole.content[:-200]):
            refused = await http.post("/v1/snapshots/import", content=raw)
            assert (refused.status_code, refused.json()["code"]) == (400, "request.invalid")
        large = await http.post("/v1/snapshots/import", content=b"x", headers={"Content-Length": str(1 << 50)})
        assert (large.status_code, large.json()["code"]) == (413, "request.too_large")


async def test_an_archive_that_breaks_off_is_cut_and_not_ended(app: Any, site: Site) -> None:
    one = site.snapshot(site.bake())
    path = site.snapshots.root / one.id / "dev"
    path.write_bytes(b"another one!")

    async def receive() -> dict[str, Any]:
        if not asked:
            asked.append(True)
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    asked: list[bool] = []
    sent = await call(app, "GET", f"/v1/snapshots/{one.id}/export", receive)
    assert sent[0]["status"] == 200
    assert all(message["more_body"] for message in sent[1:]), "no client may take it for whole"


async def test_a_reader_that_hangs_up_ends_the_work(app: Any, site: Site) -> None:
    one = site.snapshot(site.bake())
    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    sent = await call(app, "GET", f"/v1/snapshots/{one.id}/export", receive)
    assert not [message for message in sent[1:] if not message["more_body"]]
    site.snapshots.remove(one)
    site.layers.release(one.layer_id)
    assert not list(site.layers.root.iterdir()), "nobody holds its layers"


async def test_a_sender_that_hangs_up_leaves_nothing(app: Any, site: Site) -> None:
    raw = await site.archive(site.snapshot(site.bake()))
    before = site.files()
    for until in (0, 100, len(raw) // 2, len(raw)):
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": raw[:until], "more_body": True}]

        async def receive(messages: list[dict[str, Any]] = messages) -> dict[str, Any]:
            return messages.pop() if messages else {"type": "http.disconnect"}

        sent = await call(app, "POST", "/v1/snapshots/import", receive)
        assert sent[0]["status"] == 499
        assert site.files() == before
