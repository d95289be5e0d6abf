"""Who may come in, and what of it the server in the guest gets to see."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_site import BOX, OTHER, OWNER, STRANGER, Site, mirror, site

from cloche_server.app.ports import PortWish
from cloche_server.core.previews import PortAccess


@pytest.fixture
async def closed(tmp_path: Path) -> AsyncIterator[Site]:
    """Ports ask for a token unless something else was said."""
    async with site(tmp_path, usual=PortAccess.TOKEN) as made:
        async with await made.serve(mirror), await made.serve(mirror, 4000):
            yield made


async def test_without_a_token_it_is_401_for_programs_and_for_browsers(closed: Site) -> None:
    reply = await closed.ask("GET / HTTP/1.1")
    assert (reply.status, reply.get("www-authenticate")) == (401, "Bearer")
    assert json.loads(reply.body)["code"] == "preview.unauthorized"
    page = await closed.ask("GET / HTTP/1.1\nAccept: text/html")
    assert (page.status, page.get("location")) == (401, None)
    assert page.get("content-type") == "text/html; charset=utf-8"
    assert closed.world.dialed == []


async def test_a_link_becomes_a_cookie_and_a_clean_address(closed: Site) -> None:
    token, _ = await closed.ports.token("w", BOX, 3000, 600, [])
    head = f"GET //evil.example/a%20b?x=1&preview_token={token}&y=%2F HTTP/1.1\nAccept: text/html"
    reply = await closed.ask(head)
    assert reply.status == 302
    assert reply.get("location") == f"http://{closed.host}//evil.example/a%20b?x=1&y=%2F"
    cookie = reply.get("set-cookie") or ""
    assert cookie.startswith(f"cloche_preview={token}; Path=/; Max-Age=")
    assert "; HttpOnly; SameSite=Lax" in cookie
    assert "Domain" not in cookie
    reply = await closed.ask(f"GET / HTTP/1.1\nCookie: a=b; cloche_preview={token};c=d")
    assert b"\r\nCookie: a=b;c=d\r\n" in reply.body
    # A program that reads what it gets has no use for a redirect.
    reply = await closed.ask(f"GET /data?preview_token={token} HTTP/1.1\nAccept: application/json")
    assert reply.body.startswith(b"GET /data HTTP/1.1\r\n")


async def test_a_token_opens_what_it_is_for_and_nothing_else(closed: Site) -> None:
    token, _ = await closed.ports.token("w", BOX, 3000, None, ["/api", "/static/"])
    ask = f"HTTP/1.1\nX-Preview-Token: {token}"
    for path, status in {
        "/api": 200, "/api/x": 200, "/api?q": 200, "/static/a": 200, "/apix": 403, "/": 403, "/static": 403,
        "/api/../secret": 403, "/api/%2e%2e/secret": 403, "/api/..%2fsecret": 403, "/api/%252e%252e/x": 403,
        "/api/\\..\\x": 403, "/api//x": 403,
    }.items():  # fmt: skip
        assert (await closed.ask(f"GET {path} {ask}")).status == status, path
    assert (await closed.ask(f"GET /api {ask}", host=f"4000-{BOX}.localhost")).status == 401
    assert (await closed.ask(f"GET /api {ask}", host=f"3000-{OTHER}.localhost")).status == 401
    assert (await closed.ask(f"GET /v1/p/{token}/api HTTP/1.1", host="localhost")).status == 200
    assert (await closed.ask(f"GET /v1/p/{token}/x HTTP/1.1", host="localhost")).status == 403
    for wrong in (token[:-2] + ("AA" if token[-2:] != "AA" else "BB"), token + ".x", "x.y", "", "." * 100):
        assert (await closed.ask(f"GET /api HTTP/1.1\nX-Preview-Token: {wrong}")).status == 401


async def test_tokens_never_reach_the_guest_even_where_none_is_needed(front: Site) -> None:
    token, _ = await front.ports.token("w", BOX, 3000, None, [])
    async with await front.serve(mirror):
        reply = await front.ask(
            f"GET /?preview%5Ftoken={token}&a HTTP/1.1\nX-Preview-Token: {token}\nCookie: cloche_preview={token}\n"
            f"Authorization: Bearer {OWNER}"
        )
        assert reply.body.startswith(b"GET /?a HTTP/1.1\r\n")
        assert token.encode() not in reply.body
        assert OWNER.encode() not in reply.body
        assert b"cookie" not in reply.body.lower()
        theirs = await front.ask("GET / HTTP/1.1\nAuthorization: Bearer of-the-app\nCookie: session=1")
    assert b"\r\nAuthorization: Bearer of-the-app\r\n" in theirs.body
    assert b"\r\nCookie: session=1\r\n" in theirs.body


async def test_basic(closed: Site) -> None:
    wish = PortWish(3000, access=PortAccess.BASIC, username="ann", password="correct horse")
    await closed.ports.declare("w", BOX, wish)

    def credentials(text: str) -> str:
        return f"GET / HTTP/1.1\nAuthorization: Basic {base64.b64encode(text.encode()).decode()}"

    reply = await closed.ask("GET / HTTP/1.1")
    assert (reply.status, (reply.get("www-authenticate") or "").startswith("Basic realm=")) == (401, True)
    for _ in range(2):
        reply = await closed.ask(credentials("ann:correct horse"))
        assert reply.status == 200
        assert b"authorization" not in reply.body.lower()
    for wrong in ("ann:correct", "bob:correct horse", "ann", ":", "ann:correct horse "):
        assert (await closed.ask(credentials(wrong))).status == 401
    assert (await closed.ask("GET / HTTP/1.1\nAuthorization: Basic !!!")).status == 401
    token, _ = await closed.ports.token("w", BOX, 3000, None, [])
    assert (await closed.ask(f"GET / HTTP/1.1\nX-Preview-Token: {token}")).status == 200


async def test_the_api_form_asks_for_a_token_of_the_owner(front: Site) -> None:
    path = f"GET /v1/sandboxes/{BOX}/proxy/3000/ HTTP/1.1"
    async with await front.serve(mirror):
        assert (await front.ask(path, host="localhost")).status == 401
        assert (await front.ask(f"{path}\nAuthorization: Bearer nonsense", host="localhost")).status == 401
        assert (await front.ask(f"{path}\nAuthorization: Bearer {STRANGER}", host="localhost")).status == 404
        assert (await front.ask(f"{path}\nAuthorization: Bearer {OWNER}", host="localhost")).status == 200


async def test_a_domain_of_ones_own(front: Site) -> None:
    view = await front.ports.declare("w", BOX, PortWish(3000, domain="App.Example.org."))
    assert view.url == f"http://app.example.org:{front.port}"
    async with await front.serve(mirror):
        reply = await front.ask("GET / HTTP/1.1", host="APP.example.org:1234")
        assert reply.status == 200
        assert b"\r\nHost: APP.example.org:1234\r\n" in reply.body
        await front.ports.remove("w", BOX, 3000)
        assert (await front.ask("GET / HTTP/1.1", host="app.example.org")).status == 404
