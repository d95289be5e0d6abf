"""Files in the sandbox. Any name, any size, no shell."""

from __future__ import annotations

import os
import posixpath
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Literal, Self

from .. import _aio, _call, _paths, _wire
from .._call import SLOW, Call
from .._paths import RemotePath
from ..errors import ConnectionLost, FileNotFound, ProtocolError
from ..models import FileEntry, WriteResult
from .transport import AsyncBody, AsyncTransport
from .trees import AsyncTrees

CHUNK = 256 * 1024

Entries = list[FileEntry]
Source = str | bytes | bytearray | memoryview | Path | IO[Any] | Iterable[str | bytes] | AsyncIterable[str | bytes]


class AsyncFileStream:
    """The content of a file, piece by piece. Iterate over it; leaving early closes the connection."""

    def __init__(self, transport: AsyncTransport, call: Call, chunk_size: int) -> None:
        self._transport = transport
        self._call = call
        self._chunk_size = chunk_size
        self._body: AsyncBody | None = None
        self._received = 0
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._closed:
            raise StopAsyncIteration
        try:
            if self._body is None:
                self._body = await self._transport.open(self._call, self._chunk_size)
            chunk = await self._body.next()
        except BaseException:
            await self.aclose()
            raise
        if chunk is not None:
            self._received += len(chunk)
            return chunk
        announced = self._body.header("content-length")
        await self.aclose()
        if announced and int(announced) != self._received:
            raise ConnectionLost(f"the file ended after {self._received} of {announced} bytes")
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close the connection; the iteration is over."""
        self._closed = True
        body, self._body = self._body, None
        if body is not None:
            await body.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncFiles(AsyncTrees):
    """The file system of one sandbox; a sandbox has it as `sandbox.files`.

    Paths are absolute. A name that is not UTF-8 is text with surrogate escapes, or bytes.
    """

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = _call.path("sandboxes", sandbox_id, "fs")

    # --- content

    async def read(self, path: RemotePath) -> bytes:
        """The whole content. For what may be large, `iter_bytes` or `download`."""
        return await self._transport.content(self._read_call(path))

    async def read_text(self, path: RemotePath, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The whole content as text; line ends are left as they are."""
        return (await self.read(path)).decode(encoding, errors)

    def iter_bytes(self, path: RemotePath, chunk_size: int = CHUNK) -> AsyncFileStream:
        """The content piece by piece. A body that ends early raises `ConnectionLost`."""
        return AsyncFileStream(self._transport, self._read_call(path), chunk_size)

    async def write(
        self,
        path: RemotePath,
        data: Source,
        *,
        mode: int | str | None = None,
        user: str | None = None,
        mtime: int | None = None,
        append: bool = False,
        if_match: str | None = None,
        if_absent: bool = False,
    ) -> WriteResult:
        """Write a file; missing parents are made, and a reader sees the old content or the new.

        `data`: text (as UTF-8), bytes, a local `Path`, an open file, or an iterable of text or bytes; the
        last three are sent piece by piece. `mode`: octal, as `0o755` or `"755"`; without it an existing file
        keeps its mode. `user`: whose rights apply and whose the file is. `if_match` (an `etag`) and `if_absent`: write
        only if the file is still so, or not there; else `FileChanged`.
        """
        query = _call.params(mode=_paths.mode_text(mode), user=user, mtime=mtime, append=append or None)
        call = Call(
            "PUT",
            self._path,
            params={**_paths.field(path), **query},
            content=content(data),
            silence=SLOW,
            headers=_wire.given(**{"If-Match": if_match, "If-None-Match": "*" if if_absent else None}),
        )
        result = _wire.record(await self._transport.json(call))
        return WriteResult(
            path=_paths.text(path),
            bytes=int(_wire.required(result, "bytes")),
            created=bool(result.get("created", False)),
            etag=result.get("etag"),
        )

    async def upload(
        self,
        local: str | os.PathLike[str],
        path: RemotePath,
        *,
        mode: int | str | None = None,
        user: str | None = None,
    ) -> WriteResult:
        """Write the content of a local file to `path`."""
        return await self.write(path, Path(local), mode=mode, user=user)

    async def download(self, path: RemotePath, local: str | os.PathLike[str] | BinaryIO) -> int:
        """Write the content of `path` to a local file and return its size.

        The local file is replaced in one step when all of it has come; a failure leaves it as it was. An open
        binary file is written to as the bytes come.
        """
        return await save(self.iter_bytes(path), local)

    def _read_call(self, path: RemotePath) -> Call:
        return Call("GET", self._path, params=_paths.field(path), kind="safe", accept="*/*")

    # --- names

    async def list(self, path: RemotePath) -> Entries:
        """All entries of a directory, sorted by name."""
        return [entry async for entry in self.iter_dir(path)]

    async def iter_dir(self, path: RemotePath, page_size: int | None = None) -> AsyncIterator[FileEntry]:
        """The entries of a directory, fetched page by page."""
        directory = _paths.text(path)
        after: str | None = None
        while True:
            query = {**_paths.field(path), **_call.params(limit=page_size, after=after)}
            data = await self._transport.json(Call("GET", f"{self._path}/dir", params=query, kind="safe"))
            page = _wire.record(data)
            for item in _wire.records(page.get("entries") or []):
                yield _paths.entry(item, directory)
            following = page.get("next")
            if not page.get("truncated") or following is None:
                return
            if following == after:
                raise ProtocolError("the server repeats a page of the listing")
            after = str(following)

    async def stat(self, path: RemotePath) -> FileEntry:
        """Size, mode, times, owner of a path; a link is not followed."""
        query = _paths.field(path)
        data = await self._transport.json(Call("GET", f"{self._path}/stat", params=query, kind="safe"))
        return self._entry(data, path)

    async def exists(self, path: RemotePath) -> bool:
        """Whether there is something at the path. Any other failure than its absence is raised."""
        try:
            await self.stat(path)
        except FileNotFound:
            return False
        return True

    async def mkdir(
        self,
        path: RemotePath,
        *,
        mode: int | str | None = None,
        parents: bool = True,
        user: str | None = None,
    ) -> FileEntry:
        """Make a directory. With `parents` (the default) an existing one and missing parents are fine.

        The path must be UTF-8.
        """
        body: dict[str, Any] = {**_paths.text_field(path, "path"), "parents": parents}
        body |= {k: v for k, v in {"mode": _paths.mode_text(mode), "user": user}.items() if v is not None}
        data = await self._transport.json(Call("POST", f"{self._path}/mkdir", json=body))
        return self._entry(data, path)

    async def move(
        self, source: RemotePath, target: RemotePath, *, overwrite: bool = False, user: str | None = None
    ) -> FileEntry:
        """Rename or move. An existing target is an error unless `overwrite`. Both names must be UTF-8."""
        body: dict[str, Any] = {
            **_paths.text_field(source, "from"),
            **_paths.text_field(target, "to"),
            "overwrite": overwrite,
        }
        if user is not None:
            body["user"] = user
        data = await self._transport.json(Call("POST", f"{self._path}/move", json=body, silence=SLOW))
        return self._entry(data, target)

    async def remove(self, path: RemotePath, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Delete a file or an empty directory; with `recursive` a whole tree. Links are not followed."""
        query = {**_paths.field(path), **_call.params(recursive=recursive, must_exist=not missing_ok)}
        await self._transport.json(Call("DELETE", self._path, params=query, silence=SLOW))

    def _entry(self, data: Any, path: RemotePath) -> FileEntry:
        return _paths.entry(_wire.record(data), posixpath.dirname(_paths.text(path).rstrip("/")) or "/")


async def save(stream: AsyncFileStream, local: str | os.PathLike[str] | BinaryIO) -> int:
    """Write a stream to a local file, which is replaced in one step when all has come, or to an open one. The size."""
    if not isinstance(local, str | os.PathLike):
        return await _pour(stream, local)
    target = Path(local)
    part = target.with_name(f".{target.name[:200]}.{uuid.uuid4().hex[:12]}.part")
    file = await _aio.run_blocking(_open, part, "xb")
    try:
        try:
            size = await _pour(stream, file)
        finally:
            file.close()
        await _aio.run_blocking(part.replace, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return size


async def _pour(stream: AsyncFileStream, file: BinaryIO) -> int:
    size = 0
    async with stream as chunks:
        async for chunk in chunks:
            await _aio.write_chunk(file, chunk)
            size += len(chunk)
    return size


class LocalFile:
    """A local file by its path, closed at the end, or one that is open already, which stays open."""

    def __init__(self, source: str | os.PathLike[str] | IO[bytes]) -> None:
        self._source = source
        self._file: BinaryIO | None = None

    async def __aenter__(self) -> IO[bytes]:
        if not isinstance(self._source, str | os.PathLike):
            return self._source
        self._file = await _aio.run_blocking(_open, Path(self._source), "rb")
        return self._file

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def content(data: Source) -> bytes | AsyncIterator[bytes]:
    if isinstance(data, str):
        return data.encode("utf-8")
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    if isinstance(data, Path):
        return _from_path(data)
    if hasattr(data, "read"):
        return pieces(data)
    if hasattr(data, "__aiter__") or hasattr(data, "__iter__"):
        return _gathered(data)
    raise TypeError(f"cannot write {type(data).__name__}; give text, bytes, a Path, a file or an iterable")


def _open(path: Path, mode: Literal["rb", "xb"]) -> BinaryIO:
    return path.open(mode)


async def _from_path(path: Path) -> AsyncIterator[bytes]:
    file = await _aio.run_blocking(_open, path, "rb")
    try:
        async for chunk in pieces(file):
            yield chunk
    finally:
        file.close()


async def pieces(file: Any) -> AsyncIterator[bytes]:
    """The bytes of an open file, piece by piece."""
    while chunk := await _aio.read_chunk(file, CHUNK):
        yield chunk.encode("utf-8") if isinstance(chunk, str) else chunk


async def _gathered(source: Any) -> AsyncIterator[bytes]:
    """The pieces of an iterable, small ones put together."""
    buffer = bytearray()
    async for piece in _aio.iterate(source):
        if not isinstance(piece, str | bytes | bytearray | memoryview):
            raise TypeError(f"an iterable to write yields text or bytes, not {type(piece).__name__}")
        buffer += piece.encode("utf-8") if isinstance(piece, str) else piece
        if len(buffer) >= CHUNK:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)
