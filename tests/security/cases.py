"""The register of bypass cases: what a hostile guest tries, under which policy, and what must hold.

A case is a function that tries and asserts. Beside what it asserts itself, nothing may have reached host B or what is
private, unless the case says that it may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from guest_kit import Guest


@dataclass
class Try:
    """What a case works with. `site` is the fixture of `conftest.py`."""

    site: Any
    guest: Guest

    def denied(self, **match: Any) -> bool:
        """Whether the decision log has a refusal with these fields."""
        return any(
            entry["verdict"] == "deny" and all(entry[key] == value for key, value in match.items())
            for entry in self.site.log()
        )


@dataclass(frozen=True)
class Case:
    name: str
    group: str
    holds: str
    policy: Mapping[str, Any]
    work: Callable[[Try], None]
    engine: bool
    reaches: bool


CASES: list[Case] = []

NONE: Mapping[str, Any] = {"mode": "none"}
OPEN: Mapping[str, Any] = {"mode": "open"}
#: Only host A, by name.
ONLY_A: Mapping[str, Any] = {
    "mode": "allow-list",
    "rules": [
        {"id": "a", "action": "allow", "domain": "a.test"},
        {"id": "below-a", "action": "allow", "domain": "*.a.test"},
        {"id": "wild", "action": "allow", "domain": "*.wild.test"},
        {"id": "raw", "action": "allow", "domain": "a.test", "ports": [7000, 8443]},
    ],
}


def case(
    group: str, name: str, holds: str, policy: Mapping[str, Any], *, engine: bool = False, reaches: bool = False
) -> Callable[[Callable[[Try], None]], Callable[[Try], None]]:
    """Registers a case. `engine`: it needs HTTP to be read; `reaches`: B may be reached in it."""

    def register(work: Callable[[Try], None]) -> Callable[[Try], None]:
        assert all(one.name != name for one in CASES), name
        CASES.append(Case(name, group, holds, policy, work, engine, reaches))
        return work

    return register


def table() -> str:
    """All cases as Markdown."""
    lines = [
        "# Bypass cases",
        "",
        "What a hostile guest tries, and what must hold. Each is a test in `tests/security/`, with the real netd,",
        "nftables and servers in network namespaces; it runs in `./test`. Under every case the log of host B and of",
        "everything private stays empty, unless the case is about reaching it. Written by `tests/security/table.py`.",
        "",
        "| group | case | what must hold |",
        "| --- | --- | --- |",
    ]
    order = sorted(CASES, key=lambda one: (one.group, one.name))
    lines += [f"| {one.group} | {one.name}{' (HTTP)' if one.engine else ''} | {one.holds} |" for one in order]
    lines += ["", "Cases marked (HTTP) are about requests inside a connection and run where HTTP is read.", ""]
    return "\n".join(lines)
