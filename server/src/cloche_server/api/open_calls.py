"""How many requests may be open at once: streams, commands that are waited for, transfers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Final

from cloche_server.core.errors import ClocheError

#: What ends something is never refused: it makes room.
_FREE: Final = frozenset({"DELETE"})


class OpenCalls:
    """Of each workspace, and of each sandbox in it; 0: no bound."""

    def __init__(self, workspace: int, sandbox: int) -> None:
        self._most = workspace, sandbox
        self._open: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def enter(self, workspace: str, method: str, path: str) -> Iterator[None]:
        """Around one request. Raises `request.rate_limited`."""
        parts = path.split("/", 4)
        sandbox = parts[3] if parts[:3] == ["", "v1", "sandboxes"] and len(parts) > 4 else ""
        keys = [(workspace, "")] + ([(workspace, sandbox)] if sandbox else [])
        if method not in _FREE:
            for key, most, of in zip(keys, self._most, ("workspace", "sandbox"), strict=False):
                if most and self._open[key] >= most:
                    raise ClocheError(
                        "request.rate_limited",
                        f"{most} requests to this {of} are open already, which is the limit; end streams that nobody "
                        "reads, or try again when some have ended",
                        details={"limit": most, "of": of},
                        retry_after=1,
                    )
        self._open.update(keys)
        try:
            yield
        finally:
            for key in keys:
                self._open[key] -= 1
                if not self._open[key]:
                    del self._open[key]
