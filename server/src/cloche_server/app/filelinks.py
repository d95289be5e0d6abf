"""Links to files that are good without a token: made for a caller, and followed by whoever has one."""

from __future__ import annotations

import math

from cloche_server.app.access import Access
from cloche_server.core.errors import ClocheError
from cloche_server.core.filelinks import MAX_SECONDS, SECONDS, FileLink, mint, read
from cloche_server.host.clock import Clock


class FileLinks:
    """`key` signs. A link ends with its time, or with its sandbox: nothing is kept of it."""

    def __init__(self, access: Access, clock: Clock, key: bytes) -> None:
        self._access = access
        self._clock = clock
        self._key = key

    async def make(
        self,
        workspace: str,
        sandbox_id: str,
        path: str | bytes,
        method: str,
        *,
        seconds: int | None,
        max_bytes: int | None,
        user: str | None,
    ) -> tuple[str, FileLink]:
        """A token and what it is good for. Whether the file exists is not asked, and nothing wakes."""
        wanted = SECONDS if seconds is None else seconds
        if not 1 <= wanted <= MAX_SECONDS:
            raise ClocheError(
                "request.invalid",
                f"expires_seconds must be from 1 to {MAX_SECONDS}",
                details={"field": "expires_seconds"},
            )
        entry = await self._access.find(workspace, sandbox_id)
        link = FileLink(
            sandbox_id=sandbox_id,
            workspace=entry.record.workspace,
            method=method,
            path=path.encode("utf-8", "surrogateescape") if isinstance(path, str) else path,
            expires_at=math.ceil(self._clock.now()) + wanted,
            user=user or "",
            max_bytes=max_bytes or 0,
        )
        return mint(self._key, link), link

    def read(self, token: str, method: str) -> FileLink:
        """What a link is good for. Raises `file.link_invalid` for one of another form, method or time."""
        link = read(self._key, token, self._clock.now())
        if link is None:
            raise ClocheError("file.link_invalid", "the link is not one of this server, or has expired")
        if link.method != method:
            raise ClocheError("file.link_invalid", f"the link is good for {link.method}, and for nothing else")
        return link
