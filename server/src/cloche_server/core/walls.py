"""How long a sandbox has been in each state. It is kept in the record and written with every move, so that it is exact
whatever ends the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cloche_server.core.lifecycle import Status

#: A move from one of these to `running` is a start of a machine.
_FROM_REST: Final = frozenset({Status.CREATING, Status.WAKING, Status.STARTING, Status.RESTORING})


@dataclass(frozen=True, slots=True)
class Walls:
    """Seconds in the states before the present one, which it entered at `since` (Unix seconds)."""

    since: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    starts: int = 0
    first_start: float | None = None
    last_start: float | None = None


def until(walls: Walls, status: Status, now: float) -> dict[str, float]:
    """Seconds in each state so far, the present one included. A clock that was set back adds nothing until it has come
    to where it was."""
    seconds = dict(walls.seconds)
    if status is not Status.DELETED:
        seconds[status.value] = seconds.get(status.value, 0.0) + max(0.0, now - walls.since)
    return seconds


def moved(walls: Walls, before: Status, after: Status, now: float) -> Walls:
    """After a move from one state to another. All seconds together are the time from the first state to the last
    move."""
    at = max(walls.since, now)
    started = after is Status.RUNNING and before in _FROM_REST
    return Walls(
        since=at,
        seconds=until(walls, before, now),
        starts=walls.starts + started,
        first_start=at if started and walls.first_start is None else walls.first_start,
        last_start=at if started else walls.last_start,
    )
