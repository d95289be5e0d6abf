"""The first request after a start waits for nothing that the later ones do not wait for."""

from __future__ import annotations

from typing import Any, NoReturn

import httpx
import pytest

from cloche_server.api.app import bare_app


async def test_no_route_is_built_while_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = bare_app()

    def late(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a route is built only now")

    monkeypatch.setattr("fastapi.routing._EffectiveRouteContext.from_api_route", late)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/nothing/of/the/kind")).status_code == 404
