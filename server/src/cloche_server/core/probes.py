"""What a self-test of a sandbox has tried, and whether the wall held."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """One attempt. `held` False also when it could not be made; `detail` says what was seen, or why not."""

    name: str
    held: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """An attempt that this sandbox or host gives no occasion for: nothing was learnt, neither good nor bad."""

    name: str
    reason: str
