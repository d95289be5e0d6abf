"""The audit log: who has changed what, or tried to. A line of JSON for each request that is not a mere look.

Writing it delays nobody: entries are gathered in memory and written by one task, within a fraction of a second. When
the disk takes none, they wait, and when too many do, the newest are counted and left out; no request ever fails for it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Final

from cloche_server.app.steps import to_the_end
from cloche_server.core.times import rfc3339
from cloche_server.host.append import AppendLog
from cloche_server.telemetry import log, metrics

_log = log.get("audit")

#: Entries that wait for the disk.
MAX_WAITING: Final = 20_000
#: Of them in one write.
BATCH: Final = 1000
#: How long entries gather before they are written (seconds), and how long a disk that takes none is left alone.
GATHER_SECONDS = 0.1
AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One request. `at` is Unix seconds, `token` a prefix, `route` a template and never what was asked for."""

    at: float
    request_id: str
    token: str | None
    workspace: str | None
    method: str
    route: str
    sandbox_id: str | None
    status: int
    code: str | None
    client: str


class Audit:
    def __init__(self, file: AppendLog) -> None:
        self._file = file
        self._waiting: deque[tuple[int, AuditEntry]] = deque()
        self._more = asyncio.Event()
        self._writing = asyncio.Lock()
        self._next = 1
        self._lost = 0
        #: The last write failed, and was told of.
        self._complained = False

    async def open(self) -> None:
        """Goes on with the numbers of an earlier server."""
        self._next = await asyncio.to_thread(self._last_number) + 1

    def record(self, entry: AuditEntry) -> None:
        """Takes an entry. Never waits, never fails."""
        if len(self._waiting) >= MAX_WAITING:
            self._lost += 1
            metrics.audit_lost.inc()
            return
        self._waiting.append((self._next, entry))
        self._next += 1
        self._more.set()

    async def run(self) -> None:
        """Writes what is recorded, until it is cancelled; `close` writes the rest."""
        while True:
            await self._more.wait()
            # First gather: a write at once would compete with the answer that it tells of, and with the next request.
            await asyncio.sleep(GATHER_SECONDS)
            if not await self.flush():
                await asyncio.sleep(AGAIN_SECONDS)

    async def close(self) -> None:
        await self.flush()
        await asyncio.to_thread(self._file.close)

    async def flush(self) -> bool:
        """Writes what waits now. False when the disk does not take it."""
        await to_the_end(self._flush())
        return not self._complained

    async def _flush(self) -> None:
        async with self._writing:
            self._more.clear()
            batch, lost = list(self._waiting), self._lost
            for begin in range(0, len(batch), BATCH):
                part = batch[begin : begin + BATCH]
                if not await self._add("".join(_line(*one) for one in part), len(batch)):
                    return
                for _ in part:
                    self._waiting.popleft()
            if lost and await self._add(json.dumps({"lost": lost}) + "\n", 0):
                self._lost -= lost

    async def _add(self, lines: str, waiting: int) -> bool:
        try:
            await asyncio.to_thread(self._file.append, lines.encode("ascii"))
        except OSError as error:
            self._more.set()
            if not self._complained:
                _log.error("audit.unwritten", error=error.strerror, waiting=waiting)
            self._complained = True
            return False
        self._complained = False
        return True

    async def read(self, workspace: str, limit: int, before: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """The newest `limit` entries of a workspace before a cursor, newest first, and the cursor of what follows.
        Raises ValueError for what is no cursor."""
        if before is not None and not (before.isascii() and before.isdigit() and len(before) <= 18):
            raise ValueError("not a cursor")
        await self.flush()
        return await asyncio.to_thread(self._read, workspace, limit, None if before is None else int(before))

    # ---------------------------------------------------------------- on a thread

    def _read(self, workspace: str, limit: int, before: int | None) -> tuple[list[dict[str, Any]], str | None]:
        found: list[dict[str, Any]] = []
        number = 0
        for line in self._file.newest_first():
            told = _parsed(line)
            if told is None or told.get("workspace") != workspace or (before is not None and told["number"] >= before):
                continue
            if len(found) == limit:
                return found, str(number)
            number = told.pop("number")
            found.append(told)
        return found, None

    def _last_number(self) -> int:
        for line in self._file.newest_first():
            told = _parsed(line)
            if told is not None:
                return int(told["number"])
        return 0


def _line(number: int, entry: AuditEntry) -> str:
    fields = {name: value for name, value in asdict(entry).items() if value is not None and name != "at"}
    return json.dumps({"number": number, "time": rfc3339(entry.at), **fields}, separators=(",", ":")) + "\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """An entry; None for what is none: a count of lost ones, or half a line that a power cut has left."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) and isinstance(told.get("number"), int) else None
