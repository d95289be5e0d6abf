"""The HTTP surface against a real server with real machines."""

from __future__ import annotations

import pytest
from conformance_raw import Wire

from kit.server import Server


@pytest.fixture(scope="session")
def wire(server: Server) -> Wire:
    """Requests byte by byte."""
    return Wire.to(server.url, server.token)


@pytest.fixture(scope="session")
def stranger(server: Server) -> str:
    """A token of another workspace."""
    return server.cli("token", "create", "--workspace", "other").strip()
