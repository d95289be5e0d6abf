"""Reading the journal: the last events, those after one, and all that come from now on.

Each reader is a position in the journal and reads page by page at its own pace; nothing is queued for it. It sees each
event once and in order, also when it comes back with the last id it has seen, to this server or to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from cloche_server.app.access import Access
from cloche_server.app.journal import PAGE
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.happenings import Told, matches
from cloche_server.core.ids import is_sandbox_id

#: A reader looks again after so many seconds, whatever it was told.
LONGEST_LOOK: Final = 10.0


@dataclass(frozen=True, slots=True)
class Missing:
    """Events that retention has removed before they were read; not all need have been for this reader."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class End:
    """The sandbox has been deleted: nothing more will be told of it."""

    sandbox_id: str


Item = Told | Missing | End


@dataclass(frozen=True, slots=True)
class Question:
    """Which events: of a workspace, of one sandbox in it, of some types (none: of all)."""

    workspace: str
    sandbox_id: str | None = None
    types: Sequence[str] = ()


class Events:
    def __init__(self, access: Access, supervisor: Supervisor) -> None:
        self._access = access
        self._supervisor = supervisor
        self._journal = supervisor.journal

    async def check(self, workspace: str, sandbox_id: str) -> None:
        """Raises `sandbox.not_found` for one that this workspace never had, or of which nothing is known any more."""
        if is_sandbox_id(sandbox_id):
            page = await self._journal.store.after(workspace, sandbox_id, 0, 1)
            if page.events:
                return
        await self._access.find(workspace, sandbox_id)

    async def last(self, question: Question, count: int) -> list[Told]:
        """The newest `count`, oldest first."""
        _, newest = await self._journal.store.bounds()
        return await self._last(question, count, newest + 1)

    async def _last(self, question: Question, count: int, before: int) -> list[Told]:
        found: list[Told] = []
        while len(found) < count:
            page = await self._journal.store.before(question.workspace, question.sandbox_id, before, PAGE)
            if not page:
                break
            found += [told for told in page if matches(question.types, told.what.type)]
            before = page[-1].seq
        return found[:count][::-1]

    async def since(self, question: Question, since: int, count: int) -> tuple[list[Told], Missing | None]:
        """The oldest `count` after `since`, and what is missing before them. Raises `request.invalid`."""
        await self._check_since(since)
        found: list[Told] = []
        missing: Missing | None = None
        position, more = since, True
        while more and len(found) < count:
            page = await self._journal.store.after(question.workspace, question.sandbox_id, position, PAGE)
            if page.first > position + 1:
                if found:
                    break  # removed while this is read: whoever asks for what comes after it is told
                missing = Missing(missing.first if missing is not None else position + 1, page.first - 1)
            found += [told for told in page.events if matches(question.types, told.what.type)]
            position, more = page.events[-1].seq if page.events else position, page.more
        return found[:count], missing

    async def follow(self, question: Question, since: int | None, tail: int) -> tuple[int, AsyncIterator[Item]]:
        """What comes after `since`, or after all but the last `tail` events, as it comes; and the id after which that
        begins. Raises `request.invalid`."""
        if since is not None:
            await self._check_since(since)
            return since, self._items(question, since)
        _, newest = await self._journal.store.bounds()
        shown = await self._last(question, tail, newest + 1)
        begin = shown[0].seq - 1 if shown else newest
        return begin, self._items(question, begin)

    async def _check_since(self, since: int) -> None:
        _, newest = await self._journal.store.bounds()
        if since > newest:
            raise ClocheError(
                "request.invalid",
                f"there is no event {since} yet, the newest is {newest}; take the id of an event of this server",
                details={"field": "since", "newest": str(newest)},
            )

    async def _items(self, question: Question, position: int) -> AsyncIterator[Item]:
        one = question.sandbox_id
        while True:
            # Both before the look: what comes after it is seen by the next one.
            grown = self._journal.grown
            gone = one is not None and self._supervisor.get(one) is None
            page = await self._journal.store.after(question.workspace, one, position, PAGE)
            if page.first > position + 1:
                yield Missing(position + 1, page.first - 1)
            for told in page.events:
                if matches(question.types, told.what.type):
                    yield told
                if one is not None and told.what.type == "sandbox.deleted":
                    yield End(one)
                    return
            position = page.events[-1].seq if page.more else max(position, page.last)
            if page.more:
                continue
            if gone and one is not None:
                yield End(one)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_LOOK):
                    await grown.wait()
