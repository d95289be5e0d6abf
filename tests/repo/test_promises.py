"""What the documents promise about security names its proof, and the proof exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("docs/security.md", "docs/threat-model.md")
NAME = re.compile(r"`([^`]+)`")


def rows(document: str) -> list[list[str]]:
    """The lines of tables of promises, split into cells."""
    lines = (ROOT / document).read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [one for one in cells if one[0] != "promise" and not set(one[0]) <= set("- ")]


def names_of_tests() -> set[str]:
    """Test functions, test files with and without their ending, and classes of tests."""
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        found |= {path.name, path.stem}
        found |= set(re.findall(r"def (test_\w+)\(", path.read_text("utf-8")))
    return found


def probes_by_name() -> set[str]:
    parts = ("engine/qemu/probes.py", "app/selftest.py", "app/netprobes.py", "network/probes.py")
    text = "".join((ROOT / "server/src/cloche_server" / part).read_text("utf-8") for part in parts)
    return set(re.findall(r'"((?:vmm|guest|network)\.\w+)"', text))


def is_there(name: str, tests: set[str], probes: set[str]) -> bool:
    if name.startswith("tests/"):
        return (ROOT / name).exists()
    if name.startswith("test_"):
        return name.removesuffix(".py") in tests
    if name.endswith(".…"):
        return any(probe.startswith(name[:-1]) for probe in probes)
    return name in probes


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_promise_names_a_proof_that_exists(document: str) -> None:
    table = rows(document)
    assert len(table) >= 10
    tests, probes = names_of_tests(), probes_by_name()
    assert {"vmm.user", "guest.disks", "network.slot"} <= probes
    wrong = []
    for cells in table:
        assert len(cells) == 3, cells
        promise, _, proof = cells
        named = [
            name for name in NAME.findall(proof) if name.startswith(("test_", "tests/", "vmm.", "guest.", "network."))
        ]
        wrong += [f"{promise[:60]}: {name} does not exist" for name in named if not is_there(name, tests, probes)]
        if not named:
            wrong.append(f"{promise[:60]}: no test is named")
    assert wrong == []


def test_groups_of_security_cases_exist() -> None:
    text = (ROOT / "docs/security.md").read_text("utf-8")
    groups = set(re.findall(r'groups? "([^"]+)"', text)) | set(re.findall(r'" and "([^"]+)"', text))
    there = " ".join(path.read_text("utf-8") for path in (ROOT / "tests/security").glob("cases*.py"))
    assert groups
    assert [one for one in groups if f'"{one}"' not in there] == []
