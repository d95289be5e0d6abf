"""Options of the unit tests, and what they share: the routes of the API are worked out once, not for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI

from cloche_server.api import app as api_app


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files; review the difference")


@pytest.fixture(scope="session", autouse=True)
def _routes_once() -> Iterator[None]:
    """An application works out its routes when it is made, which takes some 0.6 s of CPU time.

    What it has worked out hangs on the entries of the list of routes. So each application of a test is a new one,
    with a list of its own, whose entries are those of the first.
    """
    real = api_app.bare_app
    first = real()

    def bare_app() -> FastAPI:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(api_app, "_build_routes", lambda _: None)
            app = real()
        app.router.routes[:] = first.router.routes
        return app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_app, "bare_app", bare_app)
        yield
