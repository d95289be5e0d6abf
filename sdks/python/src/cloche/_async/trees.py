"""Trees of files in the sandbox: copies, attributes, links, searches, archives, watches, links that need no token."""

from __future__ import annotations

import os
import posixpath
from collections import deque
from collections.abc import AsyncIterable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Literal, Self

from .. import _call, _paths, _sse, _wire, _wire_trees
from .._call import SILENCE, SLOW, Call
from .._paths import RemotePath
from ..errors import ConnectionLost, ProtocolError
from ..models import FileEntry
from ..trees import ArchiveFormat, DiskUse, Extracted, Glob, Grep, Replaced, TreeUse, WatchEvent
from .transport import AsyncBody, AsyncTransport

CHANGES = frozenset({"created", "modified", "attributes", "deleted", "moved", "overflow"})


class AsyncWatch:
    """What happens in a directory. Iterate over it; it ends when the directory goes, or when it is closed.

    A connection that breaks raises `ConnectionLost`: what happened since is not told later, so look again.
    """

    def __init__(self, transport: AsyncTransport, call: Call) -> None:
        self._transport = transport
        self._call = call
        self._body: AsyncBody | None = None
        self._parser = _sse.Parser()
        self._messages: deque[_sse.Message] = deque()
        self._closed = False

    async def start(self) -> Self:
        """Begin to watch now, and not only with the first step of the iteration: from here on nothing is missed."""
        if self._body is None and not self._closed:
            self._body = await self._transport.open(self._call)
            while not self._messages:
                await self._receive()
            if self._messages[0].event == "ready":
                self._messages.popleft()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        try:
            await self.start()
            while not self._closed:
                while self._messages:
                    message = self._messages.popleft()
                    data = _wire.record(_wire.parse_json(message.data.encode()))
                    if message.event == "error":
                        text = str(data.get("error") or "the watch was ended")
                        raise _call.told(self._call, {**data, "error": text}, 200, "")
                    if message.event == "end":
                        await self.aclose()
                        break
                    if message.event in CHANGES:
                        return _wire_trees.watch_event(message.event, data)
                else:
                    await self._receive()
        except BaseException:
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def _receive(self) -> None:
        if self._body is None:
            raise ProtocolError("the watch is not open")
        chunk = await self._body.next()
        if chunk is None:
            raise ConnectionLost("the watch ended without its end")
        self._messages.extend(self._parser.feed(chunk))

    async def aclose(self) -> None:
        """Close the connection; the iteration is over."""
        self._closed = True
        body, self._body = self._body, None
        if body is not None:
            await body.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncTrees:
    """What `AsyncFiles` can do with more than one file's content. Not for direct use."""

    _transport: AsyncTransport
    _path: str

    async def _post(self, verb: str, body: dict[str, Any], *, kind: _call.Kind = "other") -> Any:
        call = Call("POST", f"{self._path}/{verb}", json=body, kind=kind, silence=SLOW)
        return _wire.record(await self._transport.json(call))

    async def _get(self, verb: str, path: RemotePath, **query: str | float | bool | None) -> Any:
        params = {**_paths.field(path), **_call.params(**query)}
        call = Call("GET", f"{self._path}/{verb}", params=params, kind="safe", silence=SLOW)
        return _wire.record(await self._transport.json(call))

    # --- copies, attributes, links

    async def copy(
        self,
        source: RemotePath,
        target: RemotePath,
        *,
        recursive: bool = True,
        overwrite: bool = False,
        user: str | None = None,
    ) -> FileEntry:
        """Copy a file or a tree; the copy is there as a whole or not at all. Links stay links."""
        body = {**_paths.field(source, "from"), **_paths.field(target, "to")}
        body |= _wire.given(recursive=recursive, overwrite=overwrite, user=user)
        return _entry(await self._post("copy", body), target)

    async def chmod(
        self, path: RemotePath, mode: int | str, *, recursive: bool = False, user: str | None = None
    ) -> int:
        """Change the mode, octal as `0o755` or `"755"`. How many entries were changed."""
        return await self._attributes(path, mode=_paths.mode_text(mode), recursive=recursive, user=user)

    async def chown(
        self,
        path: RemotePath,
        owner: str | int | None = None,
        group: str | int | None = None,
        *,
        recursive: bool = False,
        user: str | None = None,
    ) -> int:
        """Change owner or group, by name or number. How many entries were changed."""
        who = {name: str(value) for name, value in (("owner", owner), ("group", group)) if value is not None}
        return await self._attributes(path, **who, recursive=recursive, user=user)

    async def _attributes(self, path: RemotePath, **fields: Any) -> int:
        answer = await self._post("attributes", {**_paths.field(path), **_wire.given(**fields)})
        return int(_wire.required(answer, "changed"))

    async def touch(self, path: RemotePath, *, mtime: float | None = None, user: str | None = None) -> FileEntry:
        """Make an empty file, or set the time of what is there: now, unless `mtime` (Unix seconds) is given."""
        return _entry(await self._post("touch", {**_paths.field(path), **_wire.given(mtime=mtime, user=user)}), path)

    async def symlink(
        self, target: str, path: RemotePath, *, overwrite: bool = False, user: str | None = None
    ) -> FileEntry:
        """Make a symbolic link at `path` with the text `target`."""
        body = {**_paths.field(path), **_wire.given(target=target, overwrite=overwrite, user=user)}
        return _entry(await self._post("link", body), path)

    async def hardlink(
        self, target: str, path: RemotePath, *, overwrite: bool = False, user: str | None = None
    ) -> FileEntry:
        """Make `path` another name for the file `target`."""
        body = {**_paths.field(path), **_wire.given(target=target, hard=True, overwrite=overwrite, user=user)}
        return _entry(await self._post("link", body), path)

    async def readlink(self, path: RemotePath) -> str:
        """The text of a symbolic link."""
        return _wire_trees.path(await self._get("readlink", path), "target")

    # --- searches

    async def glob(
        self,
        pattern: str,
        path: RemotePath = "/",
        *,
        exclude: Sequence[str] = (),
        type: Literal["file", "dir", "symlink"] | None = None,
        max_results: int | None = None,
        user: str | None = None,
    ) -> Glob:
        """Entries below `path` whose name matches: `*`, `?`, `[a-z]`, `{a,b}`, and `**` for any directories."""
        fields = _wire.given(exclude=list(exclude) or None, type=type, max_results=max_results, user=user)
        return _wire_trees.glob(
            await self._post("glob", {**_paths.field(path), "pattern": pattern, **fields}, kind="safe")
        )

    async def grep(
        self,
        pattern: str,
        path: RemotePath = "/",
        *,
        literal: bool = False,
        ignore_case: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        context_lines: int | None = None,
        max_results: int | None = None,
        max_per_file: int | None = None,
        user: str | None = None,
    ) -> Grep:
        """Lines of a file, or of all files below a directory, that match a regular expression (RE2) or a text."""
        fields = _wire.given(include=list(include) or None, exclude=list(exclude) or None, user=user)
        fields |= _wire.given(context_lines=context_lines, max_results=max_results, max_per_file=max_per_file)
        body = {**_paths.field(path), "pattern": pattern, "literal": literal, "ignore_case": ignore_case, **fields}
        return _wire_trees.grep(await self._post("grep", body, kind="safe"))

    async def replace(
        self,
        paths: RemotePath | Sequence[RemotePath],
        pattern: str,
        replacement: str,
        *,
        literal: bool = False,
        ignore_case: bool = False,
        max_count: int | None = None,
        dry_run: bool = False,
        user: str | None = None,
    ) -> Sequence[Replaced]:
        """Replace text in files, each in one step. Without `literal`, `$1` is what a group has found."""
        many = [paths] if isinstance(paths, str | bytes | os.PathLike) else paths
        body: dict[str, Any] = {"paths": [_paths.text_field(one, "path")["path"] for one in many], "pattern": pattern}
        body |= {"replacement": replacement, "literal": literal, "ignore_case": ignore_case, "dry_run": dry_run}
        answer = await self._post("replace", body | _wire.given(max_count=max_count, user=user))
        return [_wire_trees.replaced(one) for one in _wire.records(_wire.required(answer, "files"))]

    async def tree_use(self, path: RemotePath = "/", *, depth: int = 1) -> TreeUse:
        """What a tree takes up, with its directories down to `depth`."""
        return _wire_trees.tree_use(await self._get("du", path, depth=depth))

    async def disk_use(self, path: RemotePath = "/") -> DiskUse:
        """What the file system at a path holds."""
        return _wire_trees.disk_use(await self._get("df", path))

    # --- states

    async def etag(self, path: RemotePath) -> str:
        """The state of a file, for `if_match` of a write."""
        call = Call("HEAD", self._path, params=_paths.field(path), kind="safe", accept="*/*")
        async with await self._transport.open(call) as body:
            return body.header("etag")

    async def read_part(self, path: RemotePath, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on."""
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        call = Call("GET", self._path, params=_paths.field(path), kind="safe", accept="*/*", headers=headers)
        return await self._transport.content(call)

    # --- archives

    async def archive(
        self,
        path: RemotePath,
        local: str | os.PathLike[str] | BinaryIO,
        *,
        format: ArchiveFormat = "tar.gz",
        skip_unreadable: bool = False,
        exclude: str | None = None,
        user: str | None = None,
    ) -> int:
        """Write an archive of what a directory holds to a local file, which is replaced when all has come. Its size."""
        from .files import CHUNK, AsyncFileStream, save

        query = _call.params(format=format, skip_unreadable=skip_unreadable, exclude=exclude, user=user)
        params = {**_paths.field(path), **query}
        call = Call("GET", f"{self._path}/archive", params=params, accept="*/*", silence=SLOW)
        return await save(AsyncFileStream(self._transport, call, CHUNK), local)

    async def extract(
        self,
        source: bytes | Path | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes],
        path: RemotePath,
        *,
        format: ArchiveFormat = "tar.gz",
        strip: int = 0,
        max_bytes: int | None = None,
        max_entries: int | None = None,
        user: str | None = None,
    ) -> Extracted:
        """Unpack an archive (bytes, a local `Path`, an open file, an iterable) into a directory of the sandbox."""
        from .files import content

        query = _call.params(
            format=format, strip=strip or None, max_bytes=max_bytes, max_entries=max_entries, user=user
        )
        params = {**_paths.field(path), **query}
        call = Call("PUT", f"{self._path}/archive", params=params, content=content(source), silence=SLOW)
        return _wire_trees.extracted(_wire.record(await self._transport.json(call)))

    # --- watches and links

    def watch(self, path: RemotePath, *, recursive: bool = False, user: str | None = None) -> AsyncWatch:
        """What happens in a directory from now on; enter it, or `start` it, so that nothing is missed."""
        params = {**_paths.field(path), **_call.params(recursive=recursive, user=user)}
        call = Call("GET", f"{self._path}/watch", params=params, silence=SILENCE, accept="text/event-stream")
        return AsyncWatch(self._transport, call)

    async def download_url(
        self, path: RemotePath, *, expires_seconds: int | None = None, user: str | None = None
    ) -> str:
        """A URL of the file that needs no token, for at most seven days."""
        return await self._url(path, "GET", _wire.given(expires_seconds=expires_seconds, user=user))

    async def upload_url(
        self,
        path: RemotePath,
        *,
        expires_seconds: int | None = None,
        max_bytes: int | None = None,
        user: str | None = None,
    ) -> str:
        """A URL to `PUT` the file to without a token."""
        return await self._url(
            path, "PUT", _wire.given(expires_seconds=expires_seconds, max_bytes=max_bytes, user=user)
        )

    async def _url(self, path: RemotePath, method: str, fields: dict[str, Any]) -> str:
        answer = await self._post("url", {**_paths.field(path), "method": method, **fields})
        return str(_wire.required(answer, "url"))


def _entry(data: Any, path: RemotePath) -> FileEntry:
    return _paths.entry(_wire.record(data), posixpath.dirname(_paths.text(path).rstrip("/")) or "/")
