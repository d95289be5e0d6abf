"""Tokens of the API as what opens a port of a sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from cloche_server.app.entry import not_found
from cloche_server.app.tokens import Tokens
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import is_token
from cloche_server.core.records import TokenInfo
from cloche_server.core.scopes import Scope


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose token it is. `hold` is entered around what is done by it: that is cut off when the token ends."""

    workspace: str
    #: What tells the token apart, and is no secret.
    prefix: str
    hold: Callable[[], AbstractContextManager[None]]


class ApiCallers:
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def owner(self, token: str, sandbox_id: str) -> Owner | None:
        """None for a token that is unknown. Raises `auth.forbidden` for one that may not reach into a sandbox,
        `auth.token_expired`; for one of another sandbox nothing is there."""
        found = await self._tokens.find(token) if is_token(token) else None
        if found is None:
            return None
        if not found.scope.holds(Scope.EXEC):
            raise forbidden(found)
        if found.sandbox_id not in (None, sandbox_id):
            raise not_found("with this id")
        return Owner(found.workspace, found.prefix, lambda: self._hold(found))

    @contextlib.contextmanager
    def _hold(self, token: TokenInfo) -> Iterator[None]:
        call = self._tokens.calls.begin(token)
        try:
            yield
        finally:
            self._tokens.calls.finish(call)


def forbidden(token: TokenInfo) -> ClocheError:
    return ClocheError(
        "auth.forbidden",
        f"this call needs a token of scope {Scope.EXEC.value}, and this one has {token.scope.value}",
        details={"scope": Scope.EXEC.value, "has": token.scope.value},
    )
