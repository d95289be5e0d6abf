"""File calls of the agent (docs/agent-protocol.md §4)."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from typing import Final

from ..core.errors import ClocheError
from ..core.trees import ReadWish
from . import decode
from .caller import CALL_SECONDS, Caller
from .errors import CallContext, protocol_error
from .h2link import Response
from .streams import IDLE_SECONDS, FileBody
from .types import DirListing, Entry, WriteResult

_PATH_MAX: Final = 4095
_PAGE: Final = 1000
_PAGE_BYTES: Final = 8 * 1024 * 1024
_LIST_MAX: Final = 10_000
#: For whole trees: the agent says nothing until it is done. That a machine has died is noticed without it.
TREE_SECONDS: Final = 3600.0

Query = list[tuple[str, str]]


def path_query(path: str | bytes, name: str = "path") -> tuple[str, str]:
    """The query parameter for a path: as it is when UTF-8, else `<name>_b64`.

    Raises `request.invalid` for a path that is not absolute or has a NUL, `file.name_too_long`.
    """
    try:
        raw = path.encode("utf-8") if isinstance(path, str) else path
    except UnicodeEncodeError:
        raise ClocheError("request.invalid", f"The {name} is not valid Unicode.") from None
    if not raw.startswith(b"/") or b"\0" in raw:
        raise ClocheError(
            "request.invalid",
            f"The {name} has to be absolute and without NUL.",
            details={"field": name},
        )
    if len(raw) > _PATH_MAX:
        raise ClocheError("file.name_too_long", f"The {name} is longer than {_PATH_MAX} bytes.")
    try:
        return name, raw.decode("utf-8")
    except UnicodeDecodeError:
        return name + "_b64", base64url(raw)


def base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


class FileCalls:
    """The file methods of `GuestClient`.

    A path is text, or bytes for names that are not UTF-8. `user` is a name, a number, `name:group` or
    `uid:gid`, default root; the operation has that user's rights. Errors: the `file.*` codes,
    `exec.user_not_found`, and those of every call (see `GuestClient`).
    """

    _caller: Caller

    async def read_file(
        self,
        path: str | bytes,
        user: str | None = None,
        *,
        wish: ReadWish | None = None,
        timeout: float = CALL_SECONDS,
        idle_timeout: float = IDLE_SECONDS,
    ) -> FileBody:
        """Open a file for reading; the caller has to read the body to its end or close it.

        `timeout` is for the begin of the answer, `idle_timeout` for silence after that.
        """
        ctx, query = target(path, user)
        query += [] if wish is None else wish.query()
        response = await self._open(ctx, query, head=wish is not None and wish.head, timeout=timeout)
        try:
            return FileBody(response, decode.file_head(response.headers), idle_timeout=idle_timeout)
        except ClocheError:
            await response.aclose()
            raise

    async def _open(self, ctx: CallContext, query: Query, *, head: bool, timeout: float) -> Response:
        """The answer to a HEAD has no body, so a refusal has no words: a read is asked what it has to say."""
        if head:
            try:
                return await self._caller.open("HEAD", "/v1/files", ctx, query=query, timeout=timeout)
            except ClocheError as error:
                if error.code != "guest.protocol":
                    raise
        return await self._caller.open("GET", "/v1/files", ctx, query=query, timeout=timeout)

    async def write_file(
        self,
        path: str | bytes,
        body: bytes | AsyncIterator[bytes],
        *,
        mode: int | None = None,
        mtime_ns: int | None = None,
        append: bool = False,
        parents: bool = True,
        user: str | None = None,
        content_length: int | None = None,
        if_match: Sequence[str] = (),
        if_absent: bool = False,
        timeout: float = CALL_SECONDS,
    ) -> WriteResult:
        """Write a file; readers see the old or the new content (not with `append`).

        `timeout`: seconds the agent may take no part of the body, and seconds for its answer after the
        end. The iterator may take its time. If it raises, or the caller is cancelled, nothing is left in
        the guest, and an async generator is closed. With `content_length` the agent refuses a body of
        another length. `if_match` (tags, or `*`) and `if_absent`: otherwise `file.changed`.
        """
        ctx, query = target(path, user)
        if mode is not None:
            query.append(("mode", f"{mode:04o}"))
        if mtime_ns is not None:
            query.append(("mtime_ns", str(mtime_ns)))
        if append:
            query.append(("append", "1"))
        if not parents:
            query.append(("parents", "0"))
        if if_match:
            query.append(("if_match", ",".join(if_match)))
        if if_absent:
            query.append(("if_absent", "1"))
        headers = [("content-type", "application/octet-stream")]
        if isinstance(body, bytes):
            content_length = len(body)
        if content_length is not None:
            headers.append(("content-length", str(content_length)))
        response = await self._caller.open(
            "PUT", "/v1/files", ctx, query=query, headers=headers, body=body, timeout=timeout
        )
        return decode.write_result(await self._caller.read_json(response, timeout=timeout))

    async def delete(
        self,
        path: str | bytes,
        *,
        recursive: bool = False,
        user: str | None = None,
        timeout: float = TREE_SECONDS,
    ) -> None:
        """Remove a file or an empty directory; with `recursive` a whole tree, links not followed.

        The agent is silent until all is gone, and some trees are large: hence the long default timeout.
        """
        ctx, query = target(path, user)
        if recursive:
            query.append(("recursive", "1"))
        await self._caller.call("DELETE", "/v1/files", ctx, query=query, timeout=timeout)

    async def list_dir(
        self,
        path: str | bytes,
        *,
        limit: int = 1000,
        after: bytes | None = None,
        user: str | None = None,
        timeout: float = CALL_SECONDS,
    ) -> DirListing:
        """Up to `limit` (1 to 10 000) entries whose raw names come after `after`.

        Fetched in pages, so that decoding never holds the event loop for long.
        """
        if not 1 <= limit <= _LIST_MAX:
            raise ClocheError("request.invalid", f"The limit of a list is 1 to {_LIST_MAX}.")
        entries: list[Entry] = []
        while True:
            page = await self._page(path, min(_PAGE, limit - len(entries)), after, user, timeout)
            entries += page.entries
            if page.next is None or len(entries) >= limit:
                return DirListing(page.path, entries, page.next)
            if not page.entries or (after is not None and page.next <= after):
                raise protocol_error("a list that does not get on")
            after = page.next

    async def _page(
        self, path: str | bytes, limit: int, after: bytes | None, user: str | None, timeout: float
    ) -> DirListing:
        ctx, query = target(path, user)
        query.append(("limit", str(limit)))
        if after is not None:
            query.append(("after", base64url(after)))
        # Room for names of 255 bytes that JSON has to escape, in `name` and in `path`.
        room = min(_PAGE_BYTES, 65536 + limit * (3600 + 6 * len(path)))
        answer = await self._caller.call("GET", "/v1/dir", ctx, query=query, timeout=timeout, limit=room)
        return decode.dir_listing(answer, limit)

    async def stat(
        self,
        path: str | bytes,
        *,
        follow: bool = False,
        user: str | None = None,
        timeout: float = CALL_SECONDS,
    ) -> Entry:
        """One entry; of a link the link itself unless `follow`."""
        ctx, query = target(path, user)
        if follow:
            query.append(("follow", "1"))
        return decode.entry(await self._caller.call("GET", "/v1/stat", ctx, query=query, timeout=timeout))

    async def mkdir(
        self,
        path: str | bytes,
        *,
        parents: bool = False,
        mode: int | None = None,
        user: str | None = None,
        timeout: float = CALL_SECONDS,
    ) -> Entry:
        """Make a directory. With `parents` missing ones too, and one that exists is fine."""
        ctx, query = target(path, user)
        query.append(("parents", "1" if parents else "0"))
        if mode is not None:
            query.append(("mode", f"{mode:04o}"))
        return decode.entry(await self._caller.call("POST", "/v1/mkdir", ctx, query=query, timeout=timeout))

    async def move(
        self,
        path: str | bytes,
        to: str | bytes,
        *,
        overwrite: bool = False,
        user: str | None = None,
        timeout: float = TREE_SECONDS,
    ) -> None:
        """Rename; across file systems the agent copies, hence the long default timeout."""
        ctx, query = target(path, user)
        ctx = CallContext("file", path=path, to=to, user=user)
        query.append(path_query(to, "to"))
        if overwrite:
            query.append(("overwrite", "1"))
        await self._caller.call("POST", "/v1/move", ctx, query=query, timeout=timeout)


def target(path: str | bytes, user: str | None) -> tuple[CallContext, Query]:
    query = [path_query(path)]
    if user is not None:
        query.append(("user", user))
    return CallContext("file", path=path, user=user), query
