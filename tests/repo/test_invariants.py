"""The list of invariants names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_each_names_a_test_that_exists() -> None:
    rows = [line for line in (ROOT / "docs/invariants.md").read_text("utf-8").splitlines() if re.match(r"\| \d", line)]
    assert rows, "the table is empty"
    missing = []
    for row in rows:
        found = NAMED.findall(row)
        if not found:
            missing.append(row)
        for path, name in found:
            file = ROOT / path
            if not file.is_file() or not re.search(rf"def {name}\(", file.read_text("utf-8")):
                missing.append(f"{path}::{name}")
    assert missing == []
