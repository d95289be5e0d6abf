"""Who may ask at all: names of hosts, pages of other origins, rates, and the headers of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.api import middleware
from cloche_server.api.app import build_app
from cloche_server.api.guards import bearer, host_name, is_loopback
from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError
from cloche_server.settings import Settings, SettingsError, load
from kit.tokens import BEARER, AnyToken

Front = Callable[..., httpx.AsyncClient]
PAGE = "https://app.example.com"


class _Tokens(AnyToken):
    """Of which only one is good."""

    async def find(self, token: str) -> Any:
        return self.info if token == "pds_" + "0" * 32 else None


@pytest.fixture
def front() -> Front:
    def make(name: str = "127.0.0.1", **changes: Any) -> httpx.AsyncClient:
        isolation = SimpleNamespace(accel="tcg")
        stub = SimpleNamespace(
            settings=Settings(**changes), tokens=_Tokens(), stopping=asyncio.Event(), audit=None, isolation=isolation
        )
        transport = httpx.ASGITransport(build_app(cast("Services", stub)), client=("203.0.113.7", 1))
        return httpx.AsyncClient(transport=transport, base_url=f"http://{name}", headers=BEARER)

    return make


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("a:80", "a"),
        ("A.Example.", "a.example"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("", ""),
        ("127.1.2.3", "127.1.2.3"),
    ],
)
def test_names_of_hosts(sent: str, name: str) -> None:
    assert host_name(sent) == name


@given(st.text(max_size=60))
def test_any_host_header_is_a_name(text: str) -> None:
    name = host_name(text)
    assert is_loopback(name) in {True, False}
    assert ":" not in name or text.strip().startswith("[")


@pytest.mark.parametrize("name", ["localhost", "x.localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback(name: str) -> None:
    assert is_loopback(name)


@pytest.mark.parametrize(
    "name", ["", "localhost.evil.test", "evil.test", "127.0.0.1.evil.test", "0x7f000001", "10.0.0.1", "::"]
)
def test_no_loopback(name: str) -> None:
    assert not is_loopback(name)


async def _statuses(client: httpx.AsyncClient, *paths: str, **headers: str) -> list[int]:
    async with client:
        return [(await client.get(path, headers=headers)).status_code for path in paths]


async def test_a_page_whose_name_means_this_machine_learns_nothing(front: Front) -> None:
    async with front("evil.test") as client:
        for path in ("/version", "/metrics", "/openapi.json", "/nope"):
            refused = await client.get(path, headers={"Authorization": ""})
            assert (refused.status_code, refused.json()["code"]) == (421, "request.host_refused")
        told = await client.get("/v1/me", headers={"Authorization": "Bearer pds_" + "1" * 32})
        assert told.json()["code"] == "auth.invalid_token"


async def test_a_proxy_in_front_may_keep_the_name(front: Front) -> None:
    """Without a setting: what has a token works under any name, and so do probes."""
    assert await _statuses(front("api.example.com"), "/v1/me", "/healthz") == [200, 200]
    assert await _statuses(front("[::1]:8600"), "/version", "/v1/me") == [200, 200]
    assert await _statuses(front("api.example.com", host="0.0.0.0"), "/version") == [200]


async def test_with_a_list_only_its_names_work(front: Front) -> None:
    listed = {"allowed_hosts": "api.example.com, *.sub.example.com", "host": "0.0.0.0"}
    for good in ("api.example.com", "API.EXAMPLE.COM:443", "x.sub.example.com", "localhost:8600"):
        assert await _statuses(front(good, **listed), "/version", "/v1/me") == [200, 200], good
    for bad in ("example.com", "sub.example.com", "xapi.example.com", "10.0.0.1"):
        assert await _statuses(front(bad, **listed), "/version", "/v1/me", "/healthz") == [421, 421, 200], bad


# ------------------------------------------------------------------ pages


async def test_pages_are_refused_unless_listed(front: Front) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "GET"}
    for client in (front(), front(cors_origins="https://other.example.com")):
        async with client:
            preflight = await client.options("/v1/me", headers=asked)
            assert preflight.status_code == 405
            plain = await client.get("/v1/me", headers={"Origin": PAGE})
            for answer in (preflight, plain):
                assert "access-control-allow-origin" not in answer.headers


async def test_a_page_that_is_listed_may_call(front: Front) -> None:
    async with front(cors_origins=f"{PAGE}, http://localhost:3000") as client:
        preflight = await client.options("/v1/me", headers={"Origin": PAGE, "Authorization": ""})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, PAGE)
        assert "Authorization" in preflight.headers["access-control-allow-headers"]
        plain = await client.get("/v1/me", headers={"Origin": "http://localhost:3000"})
        assert plain.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert "access-control-allow-credentials" not in plain.headers
        assert plain.headers["vary"] == "Origin"
        for other in ("https://app.example.com.evil.test", "https://APP.example.com", "null", "*"):
            answer = await client.get("/v1/me", headers={"Origin": other})
            assert "access-control-allow-origin" not in answer.headers, other
            assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-origin" not in (await client.get("/metrics", headers={"Origin": PAGE})).headers


@pytest.mark.parametrize("origins", ["*", "https://a/", "a.example.com", "https://A.example", "https://a,*"])
def test_origins_are_exact(origins: str) -> None:
    with pytest.raises(SettingsError, match="is not an origin"):
        load({"cors_origins": origins}, {})


# ------------------------------------------------------------------ rates


async def test_a_token_that_is_too_fast(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(middleware.time, "monotonic", lambda: now[0])
    async with front(rate_limit_per_minute=60, rate_limit_burst=2) as client:
        left = [(await client.get("/v1/me")).headers["x-ratelimit-remaining"] for _ in range(2)]
        assert left == ["1", "0"]
        refused = await client.get("/v1/me")
        assert (refused.status_code, refused.json()["code"]) == (429, "request.rate_limited")
        assert refused.json()["retryable"] is True
        assert refused.headers["retry-after"] == "1"
        assert [refused.headers[f"x-ratelimit-{name}"] for name in ("limit", "remaining", "reset")] == ["2", "0", "2"]
        assert (await client.get("/version")).status_code == 200, "what needs no token has no limit"
        now[0] += 1
        assert (await client.get("/v1/me")).status_code == 200
    async with front(rate_limit_per_minute=0) as client:
        assert "x-ratelimit-limit" not in (await client.get("/v1/me")).headers


async def test_failed_authentications_of_an_address(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware.time, "monotonic", lambda: 1000.0)
    async with front(auth_failures_per_minute=3) as client:
        wrong = {"Authorization": "Bearer pds_" + "1" * 32}
        found = [(await client.get("/v1/me", headers=wrong)).status_code for _ in range(5)]
        assert found == [401, 401, 401, 429, 429]
        assert (await client.get("/v1/me", headers=wrong)).headers["retry-after"] == "20"
        assert (await client.get("/v1/me")).status_code == 200, "nobody is locked out by a neighbour behind one proxy"


# ------------------------------------------------------------------ tokens and headers


def test_a_token_in_the_url_is_none() -> None:
    scope = {"headers": [], "query_string": b"access_token=pds_" + b"0" * 32}
    with pytest.raises(ClocheError, match="in the URL is not accepted") as told:
        bearer(scope)
    assert told.value.code == "auth.missing_token"
    assert "pds_" not in str(told.value)


async def test_headers_of_every_answer(front: Front) -> None:
    async with front() as client:
        for path in ("/v1/me", "/v1/nope", "/healthz", "/nope", "/v1/sandboxes"):
            found = (await client.get(path)).headers
            assert found["x-content-type-options"] == "nosniff"
            assert found["referrer-policy"] == "no-referrer"
            assert found["x-frame-options"] == "DENY"
            assert found["cache-control"] == "no-store"
            assert "strict-transport-security" not in found
        assert "strict-transport-security" in (await client.get("https://127.0.0.1/healthz")).headers
