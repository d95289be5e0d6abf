"""Which cgroup version holds the controllers on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WANTED = ("cpu", "memory", "pids")


@dataclass(frozen=True, slots=True)
class CgroupFacts:
    """`version` 2, 1, or 0 when neither has the wanted controllers; `missing` are those that nobody has."""

    version: int
    controllers: tuple[str, ...]
    missing: tuple[str, ...]


def probe() -> CgroupFacts:
    root = Path("/sys/fs/cgroup")
    try:
        unified = tuple((root / "cgroup.controllers").read_text("ascii").split())
    except OSError:
        unified = ()
    if all(name in unified for name in WANTED):
        return CgroupFacts(2, unified, ())
    legacy = tuple(name for name in WANTED if (root / name / "tasks").exists())
    missing = tuple(name for name in WANTED if name not in legacy)
    return CgroupFacts(1 if legacy else 0, legacy, missing)
