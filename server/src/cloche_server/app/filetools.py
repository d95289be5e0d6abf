"""Trees of files in sandboxes: what is done to them at once, searches, archives and watches. Nothing is gathered but
what a caller has bounded."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cloche_server.app.access import Access
from cloche_server.app.entry import Traffic
from cloche_server.core.trees import Extracted, Found, Match, SearchEnd, WatchEvent
from cloche_server.guest.client import GuestClient
from cloche_server.guest.filetools import PackBody
from cloche_server.telemetry import metrics

Path = str | bytes
_T = TypeVar("_T")

#: Characters of text that one answer to a search holds; what is more is told with `truncated`.
ANSWER_CHARACTERS = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Search:
    """What a search has found. `truncated`: there is more."""

    found: Sequence[Found | Match]
    end: SearchEnd
    truncated: bool


class FileTools:
    """Errors: those of `Access.serving`, `file.*`, `exec.user_not_found`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def do(
        self,
        workspace: str,
        sandbox_id: str,
        user: str | None,
        work: Callable[[GuestClient, str | None], Awaitable[_T]],
    ) -> _T:
        """One call to the guest, with the user whose rights apply. The sandbox is not idle meanwhile."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        with self._access.busy(entry):
            return await work(guest, user or entry.record.defaults.user)

    async def search(
        self, workspace: str, sandbox_id: str, kind: str, path: Path, body: Mapping[str, Any], user: str | None
    ) -> Search:
        """`kind`: glob or grep. Ends in the guest too when the caller goes away."""

        async def work(guest: GuestClient, who: str | None) -> Search:
            call = guest.glob if kind == "glob" else guest.grep
            found: list[Found | Match] = []
            room = ANSWER_CHARACTERS
            async with contextlib.aclosing(call(path, body, user=who)) as items:
                async for item in items:
                    if isinstance(item, SearchEnd):
                        return Search(found, item, item.truncated)
                    room -= _weight(item)
                    if room < 0:
                        return Search(found, SearchEnd(True, 0, 0, 0), True)
                    found.append(item)
            raise AssertionError("a search without an exception has seen its end")

        return await self.do(workspace, sandbox_id, user, work)

    async def pack(
        self,
        workspace: str,
        sandbox_id: str,
        path: Path,
        fmt: str,
        *,
        skip_unreadable: bool,
        include: Sequence[str],
        exclude: Sequence[str],
        user: str | None,
    ) -> OpenArchive:
        """An archive that is read as it is made."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        who = user or entry.record.defaults.user
        with contextlib.ExitStack() as held:
            held.enter_context(self._access.busy(entry))
            body = await guest.pack(
                path, fmt, skip_unreadable=skip_unreadable, include=include, exclude=exclude, user=who
            )
            return OpenArchive(body, held.pop_all(), entry.traffic)

    async def extract(
        self,
        workspace: str,
        sandbox_id: str,
        path: Path,
        fmt: str,
        body: AsyncIterator[bytes],
        options: Mapping[str, int | None],
        user: str | None,
    ) -> Extracted:
        """What came before an error stays, and is told in its details."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        who = user or entry.record.defaults.user
        with self._access.busy(entry):
            result = await guest.extract(path, fmt, _counted(body, entry.traffic), options=options, user=who)
        metrics.file_bytes.labels("in").inc(result.bytes)
        return result

    async def watch(self, workspace: str, sandbox_id: str, path: Path, *, recursive: bool, user: str | None) -> Watch:
        """The watch is set up when this returns. Somebody who watches is no activity: an idle sandbox may sleep, which
        ends the watch."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        events = guest.watch(path, recursive=recursive, user=user or entry.record.defaults.user)
        return Watch(await anext(events), events)


class Watch:
    """A watch that is set up; iterate once, and always `aclose`."""

    def __init__(self, first: WatchEvent, rest: AsyncGenerator[WatchEvent, None]) -> None:
        self._first = first
        self._rest = rest

    async def __aiter__(self) -> AsyncIterator[WatchEvent]:
        yield self._first
        async for event in self._rest:
            yield event

    async def aclose(self) -> None:
        await self._rest.aclose()


class OpenArchive:
    """An archive that is being made; iterate once, and always `aclose`."""

    def __init__(self, body: PackBody, held: contextlib.ExitStack, traffic: Traffic) -> None:
        self._body = body
        self._held = held
        self._traffic = traffic
        self.entries, self.bytes, self.skipped = body.entries, body.bytes, body.skipped

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            metrics.file_bytes.labels("out").inc(len(chunk))
            self._traffic.out(len(chunk))
            yield chunk

    async def aclose(self) -> None:
        self._held.close()
        await self._body.aclose()


async def _counted(body: AsyncIterator[bytes], traffic: Traffic) -> AsyncIterator[bytes]:
    async for chunk in body:
        traffic.bytes_in += len(chunk)
        yield chunk


def _weight(item: Found | Match) -> int:
    if isinstance(item, Found):
        return 300 + 2 * len(item.raw_path)
    return 200 + 2 * len(item.raw_path) + len(item.text) + sum(map(len, item.before)) + sum(map(len, item.after))
