"""What the journal tells, and what it means: the moves of a sandbox, read back from its events."""

from __future__ import annotations

from app_host import Host

from cloche_server.core.happenings import TELLS, Happening, Told
from cloche_server.core.lifecycle import Event, Status, step

E = Event
#: The moves that an event stands for, by its type. Where there are several, that which the state allows.
PATHS: dict[str, tuple[tuple[Event, ...], ...]] = {
    "sandbox.created": ((),),
    "sandbox.running": ((E.BOOTED,),),
    "sandbox.paused": ((E.PAUSE,),),
    "sandbox.resumed": ((E.RESUME,),),
    "sandbox.hibernated": ((E.HIBERNATE, E.SAVED),),
    "sandbox.woken": ((E.WAKE, E.BOOTED),),
    "sandbox.stopped": ((E.STOP, E.HALTED), (E.START, E.UNDONE)),
    "sandbox.started": ((E.START, E.BOOTED),),
    "sandbox.failed": ((E.CRASHED,), (E.WAKE, E.CRASHED)),
    "sandbox.deleted": ((E.DELETE, E.RELEASED),),
}


def replayed(types: list[str]) -> Status:
    """The state a sandbox is in after its events. Fails on one that its state does not allow."""
    assert types[:2] == ["sandbox.created", "sandbox.running"], types
    state = Status.CREATING
    for number, kind in enumerate(types):
        ends = [_walk(state, path) for path in PATHS.get(kind, ((),))]
        found = [end for end in ends if end is not None]
        assert found, f"{kind} cannot follow {types[:number]}"
        state = found[0]
        assert TELLS.get(kind, state) is state
    return state


def _walk(state: Status, path: tuple[Event, ...]) -> Status | None:
    found: Status | None = state
    for event in path:
        found = step(found, event) if found is not None else None
    return found


async def journal(host: Host, sandbox_id: str | None = None, workspace: str = "w") -> list[Told]:
    """All of it, in order, and without holes over the whole."""
    found: list[Told] = []
    more, position = True, 0
    while more:
        page = await host.store.events.after(workspace, sandbox_id, position, 50)
        found += page.events
        more, position = page.more, found[-1].seq if found else 0
    return found


async def happened(host: Host, sandbox_id: str | None = None) -> list[Happening]:
    return [told.what for told in await journal(host, sandbox_id)]


async def types(host: Host, sandbox_id: str | None = None) -> list[str]:
    return [one.type for one in await happened(host, sandbox_id)]
