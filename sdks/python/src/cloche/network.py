"""What is known of the network of a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class NetworkPolicy:
    """What a sandbox may reach. `mode`: `none`, `allow-list` or `open`; `rules` as in the API, the first counts."""

    mode: str
    rules: Sequence[Mapping[str, Any]] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    learn: bool = False
    #: After a change: connections that were open and are not allowed any more.
    cut: int = 0


@dataclass(frozen=True)
class Decision:
    """One entry of the decision log. A connection has a second one, with `end` and its bytes."""

    seq: int
    at: datetime
    kind: str
    allowed: bool
    rule: str
    reason: str
    name: str
    address: str
    port: int
    end: bool
    bytes_sent: int
    bytes_received: int
    raw: Mapping[str, Any] = field(repr=False, default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """Whether the policy allows a destination, by which rule, and why in a sentence."""

    allowed: bool
    rule: str
    reason: str


@dataclass(frozen=True)
class Secret:
    """A secret of the workspace. Its value is told by nobody."""

    name: str
    version: int
    description: str | None
    raw: Mapping[str, Any] = field(repr=False, default_factory=dict)
