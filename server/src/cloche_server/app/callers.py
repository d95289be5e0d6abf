"""Tokens of the API as what opens a port of a sandbox."""

from __future__ import annotations

from cloche_server.app.tokens import Tokens
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import is_token
from cloche_server.core.scopes import NOWHERE, Scope


class ApiCallers:
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def owner(self, token: str, sandbox_id: str) -> str | None:
        """The workspace of a token that may use the sandbox; None for one that is unknown. For a token of another
        sandbox a workspace in which nothing is. Raises `auth.token_expired`, `auth.forbidden`."""
        found = await self._tokens.find(token) if is_token(token) else None
        if found is None:
            return None
        if not found.scope.holds(Scope.EXEC):
            raise ClocheError(
                "auth.forbidden",
                f"a port is opened by a token of scope {Scope.EXEC.value}, and this one has {found.scope.value}",
                details={"scope": Scope.EXEC.value, "has": found.scope.value},
            )
        return found.workspace if found.sandbox_id in (None, sandbox_id) else NOWHERE
