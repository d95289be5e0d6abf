"""Requests under way, by the token they came with: they end when it does."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from cloche_server.core.errors import ClocheError
from cloche_server.core.records import TokenInfo


@dataclass(slots=True, eq=False)
class Call:
    """One request. `ended` is why it was cut off, when it was: its task is then cancelled."""

    token: TokenInfo
    task: asyncio.Task[Any]
    ended: ClocheError | None = None
    #: Whether its token was looked at after the request had begun.
    checked: bool = field(default=False)


class Calls:
    def __init__(self) -> None:
        self._open: dict[str, set[Call]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(self, token: TokenInfo) -> Call:
        """The request that is carried out by the task that calls this."""
        task = asyncio.current_task()
        assert task is not None
        call = Call(token, task)
        self._open.setdefault(token.prefix, set()).add(call)
        return call

    def finish(self, call: Call) -> None:
        found = self._open.get(call.token.prefix)
        if found is not None:
            found.discard(call)
            if not found:
                del self._open[call.token.prefix]

    def all_checked(self) -> bool:
        """Whether every request has been looked at; from now on it has."""
        fresh = [call for calls in self._open.values() for call in calls if not call.checked]
        for call in fresh:
            call.checked = True
        return not fresh

    def end_revoked(self, living: Collection[str]) -> None:
        """Ends the requests of all tokens but these, which are named by their prefixes."""
        for prefix in [one for one in self._open if one not in living]:
            self.end(prefix, revoked())

    def end_expired(self, now: float) -> None:
        for calls in list(self._open.values()):
            token = next(iter(calls)).token
            if token.ended(now):
                self.end(token.prefix, expired())

    def end(self, prefix: str, why: ClocheError) -> None:
        """Ends the requests of one token, except that of the task that calls this."""
        caller = asyncio.current_task()
        for call in list(self._open.get(prefix, ())):
            if call.ended is None and call.task is not caller:
                call.ended = why
                call.task.cancel()


def revoked() -> ClocheError:
    return ClocheError("auth.invalid_token", "the bearer token is unknown or revoked")


def expired() -> ClocheError:
    return ClocheError("auth.token_expired", "the bearer token has expired")
