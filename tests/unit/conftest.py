"""Options of the unit tests, and a guard: nothing may block the event loop of the code under test."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files; review the difference")
