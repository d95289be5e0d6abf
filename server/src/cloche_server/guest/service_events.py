"""What the agent tells of its services by itself (docs/agent-protocol.md §3.7)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..core.services import SERVICE_NAME
from .caller import CALL_SECONDS, Caller
from .decode import printable
from .errors import CallContext, protocol_error
from .fields import MAX_INTEGER, Fields

#: Events in an answer.
EVENTS_MAX: Final = 64
PLACE: Final = re.compile(r"[0-9a-f]{1,32}\.[0-9]{1,19}", re.ASCII)
KINDS: Final = ("started", "exited", "healthy", "unhealthy", "gave_up")
_NAME: Final = re.compile(SERVICE_NAME[1:-1], re.ASCII)
_DETAIL_MAX: Final = 500
_DAYS_MS: Final = 10**9


@dataclass(frozen=True, slots=True)
class GuestServiceEvent:
    """`place` is where the agent has it; `retry` (seconds): until the next start, None when there is none. `exit_code`
    None: it did not run, or has not ended."""

    place: str
    kind: str
    name: str
    at_ns: int
    process_id: str | None
    exit_code: int | None
    signal: str | None
    detail: str
    restarts: int
    retry: float | None


@dataclass(frozen=True, slots=True)
class GuestServiceEvents:
    """`lost`: so many before the first are not kept any more. `services`: how many there are."""

    events: Sequence[GuestServiceEvent]
    lost: int
    next: str
    services: int


class ServiceEventCalls:
    """The method of `GuestClient` about what happens to services."""

    _caller: Caller

    async def service_events(self, after: str, seconds: float) -> GuestServiceEvents:
        """What came behind a place, once there is something or after so long; behind one that the agent does not know
        (or "") all since the machine has gone on from a memory that was saved, or has booted. Raises `not_implemented`
        for an agent that is older than this."""
        query = (("after", after), ("timeout_ms", str(round(seconds * 1000))))
        ctx = CallContext("service")
        answer = await self._caller.call("GET", "/v1/service-events", ctx, query=query, timeout=CALL_SECONDS + seconds)
        return events(answer)


def events(body: object) -> GuestServiceEvents:
    """Raises `guest.protocol` on nonsense."""
    f = Fields(body)
    return GuestServiceEvents(
        events=[_event(Fields(item)) for item in f.items("events", EVENTS_MAX)],
        lost=f.integer("lost", 0, MAX_INTEGER, default=0),
        next=_place(f.text("next", 64, default=""), empty=True),
        services=f.integer("services", 0, 10_000, default=0),
    )


def _event(f: Fields) -> GuestServiceEvent:
    kind, name = f.text("kind", 16), f.text("name", 64)
    if kind not in KINDS or _NAME.fullmatch(name) is None:
        raise protocol_error("an event of a service that is none")
    retry = f.integer("retry_ms", 0, _DAYS_MS, default=0)
    return GuestServiceEvent(
        place=_place(f.text("place", 64)),
        kind=kind,
        name=name,
        at_ns=f.integer("at_ns"),
        process_id=printable(f.text("process_id", 64, default="")) or None,
        exit_code=f.opt_integer("exit_code", 0, 255),
        signal=printable(f.text("signal", 16, default="")) or None,
        detail=printable(f.text("detail", _DETAIL_MAX, default="")),
        restarts=f.integer("restarts", default=0),
        retry=retry / 1000 if retry else None,
    )


def _place(text: str, *, empty: bool = False) -> str:
    if not (PLACE.fullmatch(text) or (empty and not text)):
        raise protocol_error("a place in a list of events that is none")
    return text
