"""What this server remembers of the processes of one sandbox, beside what its agent tells.

The agent knows what runs and what has ended lately. The memory here is for what a start of the machine has taken
away: a process that ran when it was seen last and that a machine of another start does not know is lost. It is bounded,
and a server that starts anew has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient
from cloche_server.guest.types import ExecInfo

KEPT: Final = 512
#: For the last look before a machine is shut down, which must not hold it up (seconds).
LOOK: Final = 2.0


@dataclass(frozen=True, slots=True)
class Known:
    """The last that was seen of a process. `boot_id`: of the machine in which that was."""

    info: ExecInfo
    boot_id: str
    lost: bool = False


@dataclass(slots=True)
class ProcessTable:
    """Of one sandbox."""

    known: dict[str, Known] = field(default_factory=dict)
    _guest: object = None
    _boot_id: str = ""

    def boot_of(self, guest: object) -> str:
        """The start of the machine that this link leads to, once it is known; else "". A machine that starts anew gets
        a new link, so nobody needs to ask again."""
        return self._boot_id if guest is self._guest else ""

    def belongs(self, guest: object, boot_id: str) -> None:
        """`guest` leads to a machine of that start."""
        self._guest, self._boot_id = guest, boot_id

    async def look(self, guest: GuestClient) -> None:
        """What the agent tells now, if it does. Before a machine ends, so that what has ended by itself is not taken
        for lost."""
        try:
            found = await guest.all_execs(timeout=LOOK)
        except ClocheError:
            return
        self.saw_all((info for info in found.execs if info.detach), found.boot_id)

    def saw(self, info: ExecInfo, boot_id: str) -> None:
        """One process as the agent tells it."""
        self.known.pop(info.id, None)
        if info.running:
            self.known[info.id] = Known(info, boot_id)
            while len(self.known) > KEPT:
                del self.known[next(iter(self.known))]

    def saw_all(self, infos: Iterable[ExecInfo], boot_id: str) -> None:
        """All of them: what is not among them has been forgotten by the agent, or is lost."""
        present = set()
        for info in infos:
            present.add(info.id)
            self.saw(info, boot_id)
        for process_id, known in list(self.known.items()):
            if process_id in present or known.lost:
                continue
            if known.boot_id == boot_id:
                del self.known[process_id]
            else:
                self.known[process_id] = replace(known, lost=True)

    def lost(self) -> Iterator[ExecInfo]:
        return (known.info for known in self.known.values() if known.lost)

    def is_lost(self, process_id: str) -> bool:
        known = self.known.get(process_id)
        return known is not None and known.lost

    def forget(self, process_id: str) -> bool:
        return self.known.pop(process_id, None) is not None
