"""Files in sandboxes: bytes are passed through, never gathered."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cloche_server.app.access import Access
from cloche_server.app.entry import Traffic
from cloche_server.core.errors import ClocheError
from cloche_server.core.trees import ReadWish
from cloche_server.guest.streams import FileBody
from cloche_server.guest.types import DirListing, Entry, WriteResult
from cloche_server.telemetry import metrics

Path = str | bytes


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a file is written. `mode` permission bits; `mtime_ns` Unix nanoseconds; `length` of the body if known.
    `if_match`, `if_absent`: what has to be true of the file, else `file.changed`."""

    mode: int | None = None
    mtime_ns: int | None = None
    append: bool = False
    length: int | None = None
    if_match: tuple[str, ...] = ()
    if_absent: bool = False


class OpenFile:
    """A file that is being read; iterate once, and always `aclose`. A file that shrinks meanwhile ends in
    an error, never in a short body."""

    def __init__(self, body: FileBody, held: contextlib.ExitStack, traffic: Traffic) -> None:
        self._body = body
        self._traffic = traffic
        self._held = held
        self.head = body.head
        self.size = body.size
        self.mode = body.mode
        self.mtime_ns = body.mtime_ns

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body.aiter_bytes():
            metrics.file_bytes.labels("out").inc(len(chunk))
            self._traffic.out(len(chunk))
            yield chunk

    async def aclose(self) -> None:
        self._held.close()
        await self._body.aclose()


class Files:
    """File operations. Errors: those of `Access.serving`, `file.*`, `exec.user_not_found`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def read(
        self, workspace: str, sandbox_id: str, path: Path, user: str | None, wish: ReadWish | None = None
    ) -> OpenFile:
        """Opens a file for reading."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        body = await guest.read_file(path, user or entry.record.defaults.user, wish=wish)
        held = contextlib.ExitStack()
        held.enter_context(self._access.busy(entry))
        return OpenFile(body, held, entry.traffic)

    async def write(
        self,
        workspace: str,
        sandbox_id: str,
        path: Path,
        body: AsyncIterator[bytes],
        options: WriteOptions,
        user: str | None,
    ) -> WriteResult:
        """Writes a file. A body that breaks off leaves the old file."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        with self._access.busy(entry):
            result = await guest.write_file(
                path,
                _counted(body, entry.traffic),
                mode=options.mode,
                mtime_ns=options.mtime_ns,
                append=options.append,
                user=user or entry.record.defaults.user,
                content_length=options.length,
                if_match=options.if_match,
                if_absent=options.if_absent,
            )
        metrics.file_bytes.labels("in").inc(result.bytes)
        return result

    async def delete(
        self,
        workspace: str,
        sandbox_id: str,
        path: Path,
        *,
        recursive: bool,
        must_exist: bool,
        user: str | None,
    ) -> None:
        entry, guest = await self._access.serving(workspace, sandbox_id)
        try:
            await guest.delete(path, recursive=recursive, user=user or entry.record.defaults.user)
        except ClocheError as error:
            if error.code != "file.not_found" or must_exist:
                raise

    async def list(
        self,
        workspace: str,
        sandbox_id: str,
        path: Path,
        *,
        limit: int,
        after: bytes | None,
        user: str | None,
    ) -> DirListing:
        entry, guest = await self._access.serving(workspace, sandbox_id)
        return await guest.list_dir(path, limit=limit, after=after, user=user or entry.record.defaults.user)

    async def stat(self, workspace: str, sandbox_id: str, path: Path, *, follow: bool, user: str | None) -> Entry:
        entry, guest = await self._access.serving(workspace, sandbox_id)
        return await guest.stat(path, follow=follow, user=user or entry.record.defaults.user)

    async def mkdir(
        self,
        workspace: str,
        sandbox_id: str,
        path: Path,
        *,
        parents: bool,
        mode: int | None,
        user: str | None,
    ) -> Entry:
        entry, guest = await self._access.serving(workspace, sandbox_id)
        return await guest.mkdir(path, parents=parents, mode=mode, user=user or entry.record.defaults.user)

    async def move(
        self,
        workspace: str,
        sandbox_id: str,
        source: Path,
        target: Path,
        *,
        overwrite: bool,
        user: str | None,
    ) -> Entry:
        entry, guest = await self._access.serving(workspace, sandbox_id)
        who = user or entry.record.defaults.user
        await guest.move(source, target, overwrite=overwrite, user=who)
        return await guest.stat(target, user=who)


async def _counted(body: AsyncIterator[bytes], traffic: Traffic) -> AsyncIterator[bytes]:
    """Counted as they go, so that an upload that breaks off counts for what was sent."""
    async for chunk in body:
        traffic.bytes_in += len(chunk)
        yield chunk
