"""The decisions about one sandbox: a ring that readers follow, and what a policy would have to say to allow them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from cloche_server.core.netctl import LogEntry, entry_to_json
from cloche_server.core.network import Transport

KEPT: Final = 2000
MAX_PAGE: Final = 1000
MAX_WAIT: Final = 60.0
_CLIP: Final = 512
_MAX_LEARNED: Final = 2000
#: Of one name or address; whoever tries more of them is scanning, and needs another rule.
_MAX_PORTS: Final = 64
_Port = tuple[Transport, int]


class DecisionLog:
    """Keeps the last entries. What a reader has missed it is told as a number."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: deque[LogEntry] = deque(maxlen=KEPT)
        self._last = 0
        self._grown = asyncio.Event()

    def add(self, entry: LogEntry) -> None:
        """Number and time are set here; long texts of a guest are cut."""
        self._last += 1
        made = replace(
            entry,
            seq=self._last,
            at=self._clock(),
            name=entry.name[:_CLIP],
            method=entry.method[:32],
            path=entry.path[:_CLIP],
        )
        self._entries.append(made)
        self._grown.set()

    async def read(self, after: int, limit: int, wait: float) -> dict[str, Any]:
        """Entries after a number, the number to go on after, and how many before them are lost."""
        if after >= self._last and wait > 0:
            self._grown.clear()
            try:
                async with asyncio.timeout(min(wait, MAX_WAIT)):
                    await self._grown.wait()
            except TimeoutError:
                pass
        first = self._entries[0].seq if self._entries else self._last + 1
        skipped = max(0, after + 1 - first)
        page = [self._entries[at] for at in range(skipped, min(len(self._entries), skipped + max(1, limit)))]
        return {
            "entries": [entry_to_json(entry) for entry in page[:MAX_PAGE]],
            "next": page[:MAX_PAGE][-1].seq if page else max(0, min(after, self._last)),
            "lost": max(0, first - after - 1),
        }


class Learner:
    """Remembers what a sandbox wanted. `proposal` is the least that allows it: names with their ports, and addresses
    only where no name was known."""

    def __init__(self) -> None:
        self._names: dict[str, set[_Port]] = {}
        self._addresses: dict[str, set[_Port]] = {}

    def asked(self, name: str) -> None:
        """A name was resolved; with no connection to follow it is proposed for the web."""
        if name and len(self._names) < _MAX_LEARNED:
            self._names.setdefault(name, set())

    def connected(self, name: str, address: str, port: int, transport: Transport = Transport.TCP) -> None:
        table, key = (self._names, name) if name else (self._addresses, address)
        if key in table or len(table) < _MAX_LEARNED:
            ports = table.setdefault(key, set())
            if len(ports) < _MAX_PORTS:
                ports.add((transport, port))

    def proposal(self) -> list[dict[str, Any]]:
        """Rules as a client would write them."""
        rules: list[dict[str, Any]] = []
        for field, table in (("domain", self._names), ("cidr", self._addresses)):
            for key in sorted(table):
                for transport in Transport:
                    ports = sorted(port for kind, port in table[key] if kind is transport)
                    # A name that was only asked for is proposed for the web.
                    if not ports and (transport is not Transport.TCP or table[key]):
                        continue
                    rule: dict[str, Any] = {"id": f"learned-{len(rules) + 1}", "action": "allow", field: key}
                    if field == "cidr" or transport is Transport.UDP or not set(ports) <= {80, 443}:
                        rule["ports"] = ports
                        rule["protocol"] = transport.value
                    rules.append(rule)
        return rules
