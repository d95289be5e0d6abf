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
    PAUSED = "paused"  # vCPUs stopped, memory where it was
    HIBERNATING = "hibernating"
    HIBERNATED = "hibernated"  # memory and disk on disk, no VMM
    WAKING = "waking"
    STOPPING = "stopping"
    STOPPED = "stopped"  # its guest has shut down, the disk is kept
    STARTING = "starting"
    RESTORING = "restoring"  # goes back to a snapshot
    FAILED = "failed"
    DELETING = "deleting"
    DELETED = "deleted"


class Event(StrEnum):
    BOOTED = "booted"  # the agent has answered and is personalised
    PAUSE = "pause"
    RESUME = "resume"
    HIBERNATE = "hibernate"
    FORK = "fork"  # leaves the state as it is, as does the next
    SNAPSHOT = "snapshot"
    RESTORE = "restore"  # back to a snapshot, in place
    SAVED = "saved"  # memory is on disk, the VMM is gone
    WAKE = "wake"
    STOP = "stop"
    HALTED = "halted"  # the VMM has ended as it should
    START = "start"
    UNDONE = "undone"  # a half-way move came to nothing, and all is as before
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
        Event.PAUSE: Status.PAUSED,
        Event.HIBERNATE: Status.HIBERNATING,
        Event.FORK: Status.RUNNING,
        Event.SNAPSHOT: Status.RUNNING,
        Event.STOP: Status.STOPPING,
        Event.RESTORE: Status.RESTORING,
        Event.CRASHED: Status.FAILED,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.PAUSED: {
        Event.RESUME: Status.RUNNING,
        Event.HIBERNATE: Status.HIBERNATING,
        Event.FORK: Status.PAUSED,
        Event.SNAPSHOT: Status.PAUSED,
        Event.RESTORE: Status.RESTORING,
        Event.CRASHED: Status.FAILED,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.HIBERNATING: {
        Event.SAVED: Status.HIBERNATED,
        Event.UNDONE: Status.RUNNING,
        Event.CRASHED: Status.FAILED,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.HIBERNATED: {
        Event.WAKE: Status.WAKING,
        Event.RESTORE: Status.RESTORING,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.WAKING: {
        Event.BOOTED: Status.RUNNING,
        Event.UNDONE: Status.HIBERNATED,
        Event.CRASHED: Status.FAILED,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.STOPPING: {
        Event.HALTED: Status.STOPPED,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.STOPPED: {
        Event.START: Status.STARTING,
        Event.SNAPSHOT: Status.STOPPED,
        Event.RESTORE: Status.RESTORING,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.STARTING: {
        Event.BOOTED: Status.RUNNING,
        Event.UNDONE: Status.STOPPED,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.RESTORING: {
        Event.BOOTED: Status.RUNNING,
        Event.CRASHED: Status.FAILED,
        Event.EXPIRED: Status.DELETING,
        Event.DELETE: Status.DELETING,
    },
    Status.FAILED: {
        Event.START: Status.STARTING,
        Event.SNAPSHOT: Status.FAILED,
        Event.RESTORE: Status.RESTORING,
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
    Status.HIBERNATING: (120.0, Event.UNDONE),
    Status.WAKING: (120.0, Event.UNDONE),
    Status.STOPPING: (600.0, Event.HALTED),
    Status.STARTING: (300.0, Event.UNDONE),
    Status.RESTORING: (300.0, Event.CRASHED),
    Status.DELETING: (30.0, Event.DELETE),
}

#: What a starting server does with a record it finds in this state. RUNNING and PAUSED are adopted when their process
#: is alive, and CRASHED when it is not. HIBERNATING and WAKING are what their files and process say: saved memory is
#: there until a machine continues from it, so with it the sandbox is hibernated, and without it it runs or has crashed.
ON_RESTART: Final[Mapping[Status, Event]] = {
    Status.CREATING: Event.ABORTED,
    Status.HIBERNATING: Event.UNDONE,
    Status.WAKING: Event.UNDONE,
    Status.STOPPING: Event.HALTED,
    Status.STARTING: Event.UNDONE,
    Status.RESTORING: Event.CRASHED,
    Status.DELETING: Event.DELETE,
}

#: The events that callers ask for; all others happen.
VERBS: Final = frozenset(
    {
        Event.PAUSE,
        Event.RESUME,
        Event.HIBERNATE,
        Event.WAKE,
        Event.STOP,
        Event.START,
        Event.FORK,
        Event.SNAPSHOT,
        Event.RESTORE,
        Event.DELETE,
    }
)
#: States in which guest calls (exec, files) are served.
SERVING: Final = frozenset({Status.RUNNING})
#: States in which a guest call waits for the sandbox to wake up, or to be there again.
SLEEPING: Final = frozenset({Status.HIBERNATING, Status.HIBERNATED, Status.WAKING, Status.RESTORING})
#: States that hold resources of the host and count against its capacity.
HOLDING: Final = frozenset(Status) - {Status.DELETED}
#: States that a list shows.
LISTED: Final = HOLDING - {Status.DELETING}


def step(state: Status, event: Event) -> Status | None:
    """The state after `event`, or None when the move is illegal (and nothing changes)."""
    return TRANSITIONS[state].get(event)


def allowed(state: Status) -> list[str]:
    """The events a sandbox in `state` accepts."""
    return [event.value for event in TRANSITIONS[state]]


def verbs(state: Status) -> list[str]:
    """What a caller may ask of a sandbox in `state`, for error messages."""
    return [event.value for event in TRANSITIONS[state] if event in VERBS]
