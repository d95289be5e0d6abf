"""Named SQL: loads the `.sql` files of this package.

A query begins with a line `-- name --`, then comment lines that describe it, then one statement.
"""

from __future__ import annotations

import re
from importlib import resources

_HEADER = re.compile(r"^-- ([a-z_]+) --$")


def parse(text: str) -> dict[str, str]:
    """The statements of one file by name. Raises ValueError on a doubled name or a missing description."""
    queries: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name = header.group(1)
            if name in queries:
                raise ValueError(f"query {name} is declared twice")
            queries[name] = ""
        elif name:
            queries[name] += line + "\n"
    for query, body in queries.items():
        if not body.lstrip().startswith("--"):
            raise ValueError(f"query {query} has no description")
        queries[query] = "\n".join(part for part in body.splitlines() if not part.startswith("--")).strip()
    return queries


def load_queries() -> dict[str, str]:
    """All named statements."""
    queries: dict[str, str] = {}
    for entry in sorted(resources.files(__package__).joinpath("queries").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".sql"):
            found = parse(entry.read_text("utf-8"))
            if clash := queries.keys() & found.keys():
                raise ValueError(f"queries declared in two files: {sorted(clash)}")
            queries.update(found)
    return queries


def load_migrations() -> list[tuple[int, str]]:
    """`(number, script)` of every migration in order; numbers run 1, 2, 3 …"""
    found = []
    for entry in resources.files(__package__).joinpath("migrations").iterdir():
        if entry.name.endswith(".sql"):
            found.append((int(entry.name.split("_", 1)[0]), entry.read_text("utf-8")))
    found.sort()
    if [number for number, _ in found] != list(range(1, len(found) + 1)):
        raise ValueError("migrations are not numbered 1, 2, 3 …")
    return found
