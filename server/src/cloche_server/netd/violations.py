"""Placeholders of secrets that were sent where they must not go, counted until the server has told of them.

What a guest does a thousand times a second is one record with a count: memory is bounded by sandboxes and their grants,
and a server that is told of a record is told of the next one with the same secret a minute later at the earliest.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

#: Between two records of one sandbox and secret (seconds).
APART: Final = 60.0
#: Sandboxes and secrets together that are remembered; the oldest go first.
MOST: Final = 4096
#: Records in one answer.
PAGE: Final = 200
MAX_WAIT: Final = 60.0
_CLIP: Final = 512


@dataclass(slots=True)
class _Record:
    """`count`: since the last one that was told. `due`: when it may be told (monotonic)."""

    workspace: str
    host: str
    method: str
    at: float
    count: int
    due: float
    told: int = 0


class Violations:
    """One for the process. `now`: Unix seconds; `monotonic`: seconds."""

    def __init__(self, now: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._now = now
        self._monotonic = monotonic
        self._records: dict[tuple[str, str], _Record] = {}
        self._answer = ""
        self._grown = asyncio.Event()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, sandbox: str, workspace: str, secret: str, host: str, method: str) -> None:
        """`host`: where it was sent to, as far as the guest says the truth."""
        key = (sandbox, secret)
        record = self._records.get(key)
        if record is None:
            if len(self._records) >= MOST:
                del self._records[next(iter(self._records))]
            record = self._records[key] = _Record(workspace, "", "", 0.0, 0, self._monotonic())
        record.count += 1
        record.host, record.method, record.at = host[:_CLIP], method[:32], self._now()
        self._grown.set()

    async def read(self, told: str, wait: float) -> dict[str, Any]:
        """What is due, and the word that says so: who gives it back (`told`) is done with it, and anybody else is told
        again. Waits for so many seconds when there is nothing."""
        if told and told == self._answer:
            self._done()
        until = self._monotonic() + min(wait, MAX_WAIT)
        while not (due := self._due()) and (left := until - self._monotonic()) > 0:
            self._grown.clear()
            try:
                async with asyncio.timeout(min(left, 1.0)):  # what is held back becomes due meanwhile
                    await self._grown.wait()
            except TimeoutError:
                pass
        for record in self._records.values():
            record.told = 0
        entries = []
        for (sandbox, secret), record in due:
            record.told = record.count
            entries.append(
                {
                    "sandbox": sandbox,
                    "workspace": record.workspace,
                    "secret": secret,
                    "host": record.host,
                    "method": record.method,
                    "count": record.count,
                    "at": record.at,
                }
            )
        self._answer = secrets.token_hex(8)
        return {"entries": entries, "next": self._answer}

    def _due(self) -> list[tuple[tuple[str, str], _Record]]:
        now = self._monotonic()
        for key in [key for key, one in self._records.items() if not one.count and one.due <= now]:
            del self._records[key]
        return [(key, one) for key, one in self._records.items() if one.count and one.due <= now][:PAGE]

    def _done(self) -> None:
        for record in self._records.values():
            if record.told:
                record.count -= record.told
                record.told = 0
                record.due = self._monotonic() + APART
