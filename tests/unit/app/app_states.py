"""Sandboxes in each state, and the verbs that change it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from app_host import Host

from cloche_server.core.lifecycle import Status
from cloche_server.core.ports import MachineExit
from cloche_server.core.records import Sandbox
from kit.fake_engine import settle

Verb = Callable[[Host, str], Awaitable[Any]]
VERBS: dict[str, Verb] = {
    "pause": lambda host, name: host.sleep.pause("w", name),
    "resume": lambda host, name: host.sleep.resume("w", name),
    "hibernate": lambda host, name: host.sleep.hibernate("w", name),
    "wake": lambda host, name: host.sleep.wake("w", name),
}


async def sandbox_in(host: Host, state: str, **options: Any) -> Sandbox:
    record = await host.create(**options)
    if state == "paused":
        return await host.sleep.pause("w", record.id)
    if state == "hibernated":
        return await host.sleep.hibernate("w", record.id)
    if state == "stopped":
        return await host.power.stop("w", record.id, 5)
    if state == "failed":
        host.world.alive[record.id].die(MachineExit(signal="SIGKILL"))
        await settle(lambda: status(host, record.id) is Status.FAILED)
        await settle(lambda: not host.world.held)
    return record


def status(host: Host, sandbox_id: str) -> Status:
    entry = host.supervisor.get(sandbox_id)
    assert entry is not None
    return entry.record.status
