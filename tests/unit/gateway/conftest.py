"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_site import Site, site


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        yield made
