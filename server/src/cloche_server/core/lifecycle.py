"""The lifecycle of a sandbox as data.

Every move a sandbox can make is a row of `TRANSITIONS`; nothing outside this file decides whether a
move is legal. Half-way states have a deadline and a rule for a server that starts and finds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Status(StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    FAILED = "failed"
    DELETING = "deleting"
    DELETED = "deleted"


class Event(StrEnum):
    BOOTED = "booted"  # the agent has answered and is personalised
    ABORTED = "aborted"  # a create did not come to its end
    CRASHED = "crashed"  # the VMM process is gone, and nobody here ended it
    EXPIRED = "expired"  # the TTL has passed
    DELETE = "delete"  # somebody asked
    RELEASED = "released"  # process, files and sockets are gone


TRANSITIONS: Final[Mapping[Status, Mapping[Event, Status]]] = {
    Status.CREATING: {
        Event.BOOTED: Status.RUNNING,
        Event.ABORTED: Status.DELETING,
        Event.CRASHED: Status.DELETING,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.RUNNING: {
        Event.CRASHED: Status.FAILED,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.FAILED: {
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.DELETING: {
        Event.DELETE: Status.DELETING,
        Event.RELEASED: Status.DELETED,
    },
    Status.DELETED: {},
}

#: Seconds a sandbox may stay in a half-way state, and what happens to it then.
DEADLINES: Final[Mapping[Status, tuple[float, Event]]] = {
    Status.CREATING: (120.0, Event.ABORTED),
    Status.DELETING: (30.0, Event.DELETE),
}

#: What a starting server does with a record it finds in this state. RUNNING is adopted when its
#: process is alive, and CRASHED when it is not.
ON_RESTART: Final[Mapping[Status, Event]] = {
    Status.CREATING: Event.ABORTED,
    Status.DELETING: Event.DELETE,
}

#: States in which guest calls (exec, files) are served.
SERVING: Final = frozenset({Status.RUNNING})
#: States that hold resources of the host and count against its capacity.
HOLDING: Final = frozenset({Status.CREATING, Status.RUNNING, Status.FAILED, Status.DELETING})
#: States that a list shows.
LISTED: Final = HOLDING - {Status.DELETING}


def step(state: Status, event: Event) -> Status | None:
    """The state after `event`, or None when the move is illegal (and nothing changes)."""
    return TRANSITIONS[state].get(event)


def allowed(state: Status) -> list[str]:
    """The events a sandbox in `state` accepts, for error messages."""
    return [event.value for event in TRANSITIONS[state]]
