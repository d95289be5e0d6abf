"""What nobody has foreseen is answered in JSON like everything else, and its text stays in the log."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from cloche_server.api.app import build_app
from cloche_server.api.respond import ClientGone
from cloche_server.app.services import Services
from cloche_server.settings import Settings
from kit.tokens import BEARER, AnyToken


class _Failing:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def _services(error: BaseException) -> Services:
    stub = SimpleNamespace(
        settings=Settings(), tokens=AnyToken(), access=_Failing(error), stopping=asyncio.Event(), audit=None
    )
    return cast("Services", stub)


@pytest.mark.parametrize(("error", "status"), [(ZeroDivisionError("the secret text"), 500), (ClientGone(), 499)])
async def test_an_unforeseen_error(error: BaseException, status: int) -> None:
    app = build_app(_services(error))
    headers = {**BEARER, "X-Request-Id": "r1"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers=headers) as client:
        response = await client.get("/v1/sandboxes")
    assert response.status_code == status
    assert response.headers["x-request-id"] == "r1"
    assert "secret" not in response.text
    if status == 500:
        assert response.json()["code"] == "internal"
        assert response.json()["request_id"] == "r1"
