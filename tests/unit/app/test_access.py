"""One sandbox may not take the server's memory: its calls are counted."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from cloche_server.app.access import MAX_CALLS, Access
from cloche_server.app.entry import Entry
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.ports import MachineCondition
from cloche_server.core.records import ExecDefaults, Isolation, Resources, Sandbox
from cloche_server.host.clock import SystemClock

RECORD = Sandbox(
    id="abcdefgh12",
    workspace="w",
    status=Status.RUNNING,
    template="base",
    template_name="base",
    template_id="t",
    resources=Resources(1, 256, 4096),
    isolation=Isolation(),
    defaults=ExecDefaults(),
    metadata={},
    created_at=0.0,
)


class _Machine:
    ended = False
    condition = MachineCondition.OK


class _Supervisor:
    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def get(self, _: str) -> Entry:
        return self.entry


def access_to(entry: Entry) -> Access:
    parts: Any = (_Supervisor(entry), None, SystemClock())
    return Access(*parts)


def running() -> Entry:
    entry = Entry(RECORD)
    parts: Any = (_Machine(), object())
    entry.machine, entry.guest = parts
    return entry


async def test_the_calls_of_one_sandbox_are_bounded() -> None:
    entry = running()
    access = access_to(entry)
    with contextlib.ExitStack() as held:
        for _ in range(MAX_CALLS):
            await access.serving("w", RECORD.id)
            held.enter_context(access.busy(entry))
        with pytest.raises(ClocheError) as refused:
            await access.serving("w", RECORD.id)
        assert refused.value.code == "sandbox.busy"
        assert refused.value.retry_after
    await access.serving("w", RECORD.id)


async def test_a_failed_sandbox_says_so() -> None:
    entry = running()
    entry.record = replace(RECORD, status=Status.FAILED)
    with pytest.raises(ClocheError) as refused:
        await access_to(entry).serving("w", RECORD.id)
    assert refused.value.code == "sandbox.failed"


async def test_a_full_host_disk_says_so() -> None:
    entry = running()
    machine: Any = entry.machine
    machine.condition = MachineCondition.DISK_FULL
    with pytest.raises(ClocheError) as refused:
        await access_to(entry).serving("w", RECORD.id)
    assert refused.value.code == "host.disk_full"
