"""Services of sandboxes: frozen records, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

__all__ = ["HealthCheck", "LogPage", "ServiceDefinition", "ServiceInfo"]


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """How the sandbox finds out whether a service is well: one of `tcp` (a port), `http` (a port, asked for `path`; the
    answer has to be `status`, or any from 200 to 399) and `command`. Times in seconds; None: the server's default.

    `on_unhealthy`: `restart` or `report`.
    """

    tcp: int | None = None
    http: int | None = None
    path: str = "/"
    status: int | None = None
    command: str | Sequence[str] | None = None
    interval: float | None = None
    timeout: float | None = None
    retries: int | None = None
    start_period: float | None = None
    on_unhealthy: str | None = None


@dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """A service that a sandbox is created with; the fields are those of `sandbox.services.define`, and None is the
    server's default. `more`: further fields of the API, as they are."""

    name: str
    command: str | Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    restart: str | None = None
    backoff: float | None = None
    max_restarts: int | None = None
    window: float | None = None
    health: HealthCheck | None = None
    depends_on: Sequence[str] = ()
    autostart: bool | None = None
    stop_grace: float | None = None
    buffer_kb: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """A service, as the sandbox tells it. `raw` holds the whole answer.

    `state`: `starting`, `healthy`, `unhealthy`, `backoff`, `stopped` or `failed`; `detail` says why, where that is not
    clear. `waiting_for`: services that have to be healthy first. `process_id`: the process of the present run, or of
    the last one.
    """

    name: str
    state: str
    detail: str | None = None
    waiting_for: Sequence[str] = ()
    pid: int | None = None
    process_id: str | None = None
    started_at: datetime | None = None
    restarts: int = 0
    last_exit_code: int | None = None
    definition: Mapping[str, Any] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class LogPage:
    """Lines of a log. `next` is where to go on; `more`: there is more already. `gap_bytes` were not kept; `restarted`:
    the place that was asked for is in a log that is not there any more, and this one begins anew."""

    lines: Sequence[str]
    next: str
    more: bool
    gap_bytes: int
    restarted: bool
    final: bool
