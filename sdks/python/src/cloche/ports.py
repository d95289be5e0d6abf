"""Ports of sandboxes and previews: frozen records, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

__all__ = ["Port", "PreviewToken"]


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a sandbox. `raw` holds the whole answer.

    `url` is where it is reached. `declared`: something was said about it. `addresses`, `pid` and `process` are those of
    what listens there now.
    """

    port: int
    url: str
    listening: bool = False
    declared: bool = False
    label: str | None = None
    access: str = "public"
    domain: str | None = None
    addresses: Sequence[str] = ()
    pid: int | None = None
    process: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class PreviewToken:
    """A right to use a port until it expires. `url` and `host_url` are links that hold the token, as does `token`."""

    token: str = field(repr=False)
    url: str = field(repr=False)
    host_url: str | None = field(repr=False)
    sandbox_id: str
    port: int
    paths: Sequence[str]
    expires_at: datetime
