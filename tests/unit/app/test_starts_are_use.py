"""A command that waits for its turn to be started is use of its sandbox: it counts, and the sandbox is not idle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cloche_server.app.access import Access
from cloche_server.app.attached import Attachments, AttachWish
from cloche_server.app.entry import Traffic
from cloche_server.app.exec import Execs
from cloche_server.app.process_table import ProcessTable
from cloche_server.app.processes import Processes
from cloche_server.core.command import Command
from cloche_server.core.errors import ClocheError
from cloche_server.core.process import ProcessWish
from cloche_server.core.records import ExecDefaults
from cloche_server.host.clock import SystemClock


class Queue:
    """The start of a command that was not its turn."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry
        self.in_use: list[int] = []

    async def __aenter__(self) -> None:
        self.in_use.append(self._entry.running_execs)
        raise ClocheError("sandbox.busy", "too many are being started")

    async def __aexit__(self, *_: object) -> None:
        return


class Site(Access):
    """One sandbox, whose guest starts nothing."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        record = SimpleNamespace(id="s", workspace="w", defaults=ExecDefaults(), is_read=False)
        self.entry: Any = SimpleNamespace(
            record=record, traffic=Traffic(), processes=ProcessTable(), running_execs=0, last_activity=0.0
        )
        self.queue = Queue(self.entry)
        self.guest: Any = SimpleNamespace(exec=lambda _: self.queue)
        self.entry.processes.belongs(self.guest, "boot")

    async def serving(self, workspace: str, sandbox_id: str) -> tuple[Any, Any]:
        return self.entry, self.guest


def _shell(site: Site) -> Awaitable[object]:
    return Attachments(site).open("w", "s", AttachWish(script="x"))


def _stream(site: Site) -> Awaitable[object]:
    return Execs(site).stream("w", "s", Command("e", shell="x"))


def _background(site: Site) -> Awaitable[object]:
    return Execs(site).start("w", "s", Command("e", shell="x", detach=True))


def _process(site: Site) -> Awaitable[object]:
    return Processes(site).start("w", "s", ProcessWish(shell="x"))


@pytest.mark.parametrize("start", [_shell, _stream, _background, _process])
async def test_a_start_that_waits_is_use(start: Callable[[Site], Awaitable[object]]) -> None:
    site = Site()
    with pytest.raises(ClocheError) as told:
        await start(site)
    assert told.value.code == "sandbox.busy"
    assert site.queue.in_use == [1]
    assert site.entry.running_execs == 0
