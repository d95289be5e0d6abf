"""A stage for each test, on the loop that netd has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest_asyncio
import uvloop
from http_kit import Stage, stage


def pytest_asyncio_loop_factories() -> Mapping[str, Any]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage(tmp_path) as made:
        yield made
