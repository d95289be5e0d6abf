"""What is done to a sandbox in which nothing has been going on for as long as it was told."""

from __future__ import annotations

from cloche_server.app.entry import Entry
from cloche_server.app.sleep import SleepVerbs
from cloche_server.app.stop import StopVerbs
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.lifecycle import Event
from cloche_server.core.records import IdleAction, TerminationReason
from cloche_server.telemetry import log

_log = log.get("idle")

#: So long a guest that is idle may take to shut down (seconds). After that it may still end, and is not killed.
STOP_TIMEOUT = 30.0
REASON = "idle"


class IdleActions:
    def __init__(self, supervisor: Supervisor, sleep: SleepVerbs, power: StopVerbs) -> None:
        self._supervisor = supervisor
        self._sleep = sleep
        self._power = power
        supervisor.on_idle = self.act

    async def act(self, entry: Entry) -> None:
        """Inside the task of the sandbox."""
        action = entry.record.idle_action
        _log.info("sandbox.idle", sandbox=entry.record.id, action=action.value)
        if action is IdleAction.PAUSE:
            await self._sleep.pause_entry(entry, REASON)
        elif action is IdleAction.HIBERNATE:
            await self._sleep.hibernate_entry(entry, REASON)
        elif action is IdleAction.STOP:
            await self._power.ask(entry, STOP_TIMEOUT, REASON)
        else:
            self._supervisor.send(entry, Event.DELETE, reason=TerminationReason.IDLE)
