"""The bypass suite: every case of the register, on the real netd and real servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases_dns
import cases_groups
import cases_http
import cases_names
import cases_udp
import cases_ways
import pytest
from cases import CASES, Case, Try, table
from guest_kit import Guest

pytestmark = pytest.mark.thorough

TABLE = Path(__file__).resolve().parents[2] / "docs" / "security-cases.md"
MODULES = (cases_names, cases_dns, cases_ways, cases_http, cases_groups, cases_udp)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_bypass(case: Case, site: Any) -> None:
    if case.engine and not site.netd.call("hello")["http"]:
        pytest.skip("the HTTP engine is not wired")
    site.renew(**case.policy)
    case.work(Try(site, Guest(site.slot.guest, str(site.world.ca))))
    if not case.reaches:
        assert site.world.b.lines == []
        assert site.world.other.lines == []


def test_the_suite_is_as_large_as_promised() -> None:
    assert len(CASES) >= 60


def test_the_published_table_is_current() -> None:
    assert TABLE.read_text("utf-8") == table(), "run tests/security/table.py"
