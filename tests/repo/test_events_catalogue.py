"""Events: what the server writes, the catalogue and its table for programs say the same."""

from __future__ import annotations

import ast
import re
import tomllib

from sources import ROOT, SERVER, called, parsed, strings

from cloche_server.core.happenings import CATALOGUE, TELLS, patterns

TYPE = re.compile(r"[a-z]+(\.[a-z_]+)+")
#: Prefixes of the types; a string that looks like one of them is one.
FAMILIES = {kind.partition(".")[0] for kind in CATALOGUE}
TABLE = SERVER / "core" / "happenings.py"


def _outside_the_catalogue() -> set[str]:
    """Literals in the code, those of `core/happenings.py` below its catalogue included."""
    found = set()
    for source in parsed(SERVER):
        skipped: set[int] = set()
        if source.path == TABLE:
            for node in source.tree.body:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in {"CATALOGUE", "TELLS"}:
                    skipped = {id(inner) for inner in ast.walk(node)} | skipped
        found |= {str(node.value) for node in strings(source) if id(node) not in skipped}
    return found


def test_every_type_is_written_somewhere() -> None:
    unused = set(CATALOGUE) - _outside_the_catalogue()
    assert not unused, f"nobody tells of {unused}"


def test_every_type_that_is_told_is_in_the_catalogue() -> None:
    told = []
    for source in parsed(SERVER):
        for node in source.nodes:
            if isinstance(node, ast.Call) and called(node) in {"tell", "Happening"}:
                kinds = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                told += [f"{source.name}:{node.lineno} {kind}" for kind in kinds if kind not in CATALOGUE]
    assert not told, told
    assert set(TELLS) <= set(CATALOGUE)


def test_every_type_has_a_form_and_says_what_it_is() -> None:
    for kind, spec in CATALOGUE.items():
        assert TYPE.fullmatch(kind), kind
        assert spec.summary, kind
        assert all(spec.fields.values()), kind
    assert {pattern.removesuffix(".*") for pattern in patterns() if pattern.endswith(".*")} == FAMILIES


def test_the_contract_for_other_languages() -> None:
    table = tomllib.loads((ROOT / "contracts" / "events.toml").read_text("utf-8"))
    assert {k: row["summary"] for k, row in table.items()} == {k: spec.summary for k, spec in CATALOGUE.items()}
    assert {k: row.get("payload", {}) for k, row in table.items()} == {k: dict(s.fields) for k, s in CATALOGUE.items()}
