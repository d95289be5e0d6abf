"""What is told of processes after their machine has been shut down: only what ran is lost."""

from __future__ import annotations

from typing import Any

from cloche_server.app.process_table import ProcessTable
from cloche_server.core.errors import ClocheError
from cloche_server.guest.frames import Exit
from cloche_server.guest.types import ExecInfo, Execs

_EXIT = Exit(0, "exited", None, None, 1.0, 1.0, 1.0, 1, None, 0, 0, 0, 0)


class Link:
    """To an agent that knows these."""

    def __init__(self, boot_id: str, *infos: ExecInfo) -> None:
        self._told = Execs(boot_id, infos)

    async def all_execs(self, *, timeout: float) -> Execs:
        return self._told


class Silent:
    async def all_execs(self, *, timeout: float) -> Execs:
        raise ClocheError("sandbox.unreachable", "it says nothing")


def _process(name: str, *, running: bool) -> ExecInfo:
    return ExecInfo(name, 1, running, 0, True, None if running else _EXIT, 0)


async def _after(link: Any) -> set[str]:
    """What is lost, of two that were seen to run, once the machine has started anew."""
    table = ProcessTable()
    table.saw_all([_process("ended", running=True), _process("runs", running=True)], "first")
    await table.look(link)
    table.saw_all([], "second")
    return {info.id for info in table.lost()}


async def test_what_has_ended_by_itself_is_not_lost() -> None:
    assert await _after(Link("first", _process("ended", running=False), _process("runs", running=True))) == {"runs"}


async def test_of_an_agent_that_says_nothing_what_was_seen_last_counts() -> None:
    assert await _after(Silent()) == {"ended", "runs"}
