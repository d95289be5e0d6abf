"""Services of sandboxes: named commands that the agent keeps running. Pure; what they do is docs/services.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from cloche_server.core.errors import ClocheError

#: Of all services of a sandbox.
SERVICES_MAX: Final = 32
SERVICE_NAME: Final = "^[a-z0-9][a-z0-9-]{0,47}$"
DAY: Final = 86_400
GRACE_MAX: Final = 60
#: How long a create may wait for services (seconds).
CREATE_WAIT_MAX: Final = 600
#: Bytes of a definition, its environment included.
DEFINITION_MAX: Final = 128 * 1024

Restart: TypeAlias = Literal["no", "on-failure", "always"]
State: TypeAlias = Literal["starting", "healthy", "unhealthy", "backoff", "stopped", "failed"]
RESTARTS: Final[tuple[Restart, ...]] = ("no", "on-failure", "always")
STATES: Final[tuple[State, ...]] = ("starting", "healthy", "unhealthy", "backoff", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class HttpCheck:
    """A page that has to answer. `status` None: any from 200 to 399."""

    port: int
    path: str = "/"
    status: int | None = None


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One of a port, a page and a command (`shell` or `argv`). Times in seconds; failures in the first `start_period`
    do not count."""

    tcp_port: int | None = None
    http: HttpCheck | None = None
    shell: str | None = None
    argv: Sequence[str] | None = None
    interval: float = 10.0
    timeout: float = 5.0
    retries: int = 3
    start_period: float = 30.0
    restarts: bool = True


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A definition. Times in seconds; `max_restarts` 0: no limit."""

    shell: str | None = None
    argv: Sequence[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    rlimits: Mapping[str, int] = field(default_factory=dict)
    buffer_kb: int = 1024
    autostart: bool = True
    restart: Restart = "on-failure"
    backoff: float = 1.0
    max_backoff: float = 30.0
    max_restarts: int = 5
    window: float = 300.0
    stop_signal: str = "TERM"
    stop_grace: float = 10.0
    depends_on: Sequence[str] = ()
    health: HealthCheck | None = None


def in_order(services: Sequence[tuple[str, ServiceSpec]]) -> tuple[tuple[str, ServiceSpec], ...]:
    """Each behind those of the others that it depends on. Raises `request.invalid`: a name twice, or a circle."""
    left: dict[str, ServiceSpec] = {}
    for name, spec in services:
        if name in left:
            raise ClocheError(
                "request.invalid",
                f"services has two of the name {name}; each needs a name of its own",
                details={"field": "services"},
            )
        left[name] = spec
    found: list[tuple[str, ServiceSpec]] = []
    while left:
        free = [name for name, spec in left.items() if not any(one in left for one in spec.depends_on)]
        if not free:
            raise ClocheError(
                "request.invalid",
                f"services depend on each other in a circle: {' -> '.join(_circle(left))}; one has to start first",
                details={"field": "services"},
            )
        found += [(name, left.pop(name)) for name in free]
    return tuple(found)


def _circle(left: Mapping[str, ServiceSpec]) -> list[str]:
    """One of those that are there; each of `left` depends on another of them."""
    path = [next(iter(left))]
    while (following := next(one for one in left[path[-1]].depends_on if one in left)) not in path:
        path.append(following)
    return [*path[path.index(following) :], following]
