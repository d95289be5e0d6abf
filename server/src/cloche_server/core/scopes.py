"""What a token may do: three scopes, each of which holds the one below it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from cloche_server.core.errors import ClocheError

#: The longest life that may be asked for when a token is made (seconds): ten years.
MAX_EXPIRY_SECONDS: Final = 315_360_000
#: A workspace in which nothing is, for a token of one sandbox that asks for another: what it is answered is what it
#: would be answered for an id that nobody has. No token has this name, because names are printable.
NOWHERE: Final = "\0"
#: Living tokens of one workspace.
MAX_TOKENS: Final = 1000


class Scope(StrEnum):
    """`read` looks and changes nothing; `exec` uses and makes sandboxes; `admin` does everything in its workspace."""

    READ = "read"
    EXEC = "exec"
    ADMIN = "admin"

    def holds(self, other: Scope) -> bool:
        """Whether whoever has this one may do what asks for `other`."""
        return _RANK[self] >= _RANK[other]


_RANK: Final = {Scope.READ: 0, Scope.EXEC: 1, Scope.ADMIN: 2}


def expiry(now: float, seconds: float | None, maker: float | None) -> float | None:
    """When a token ends that is asked to live for `seconds` (None: as long as its maker may).

    Raises `auth.forbidden` when that is later than `maker`, the end of the token that makes it.
    """
    if seconds is None:
        return maker
    at = now + seconds
    if maker is not None and at > maker:
        raise ClocheError("auth.forbidden", "a token cannot make one that outlives it; ask for a shorter life")
    return at
