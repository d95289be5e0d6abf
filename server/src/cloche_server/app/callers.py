"""Tokens of the API as what opens a port of a sandbox."""

from __future__ import annotations

from cloche_server.app.tokens import Tokens
from cloche_server.core.ids import is_token


class ApiCallers:
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def owner(self, token: str, sandbox_id: str) -> str | None:
        """The workspace of a token that may use the sandbox; None for one that is unknown."""
        found = await self._tokens.find(token) if is_token(token) else None
        return None if found is None else found.workspace
