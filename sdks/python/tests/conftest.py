"""Fixtures: a fresh fake server for each test, and the environment that points to it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]

from cloche_fake import KEY, FakeCloche  # noqa: E402


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FakeCloche]:
    """A server on the loopback interface; the client finds it by the environment."""
    server = FakeCloche()
    monkeypatch.setenv("CLOCHE_API_URL", server.start())
    monkeypatch.setenv("CLOCHE_API_KEY", KEY)
    yield server
    server.stop()


@pytest.fixture
def unused_address() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
