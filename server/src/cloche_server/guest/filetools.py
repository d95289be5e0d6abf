"""What the agent does with trees of files: §4.1 to §4.4 of docs/agent-protocol.md."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Final

from ..core.trees import DiskUse, Extracted, Found, Match, Replaced, SearchEnd, TreeUse, Use, WatchEvent
from . import decode
from .caller import CALL_SECONDS, Caller
from .errors import CallContext, protocol_error
from .fields import Fields
from .files import TREE_SECONDS, Query, base64url, path_query, target
from .h2stream import Response
from .lines import json_lines
from .streams import IDLE_SECONDS
from .types import Entry

_PATH_MAX: Final = 8192
_PARTS_MAX: Final = 10_000
_DU_BYTES: Final = 8 * 1024 * 1024
_FILES_BYTES: Final = 8 * 1024 * 1024
_SHOWN_MAX: Final = 8192
_WATCH_KINDS: Final = frozenset(
    {"ready", "created", "modified", "attributes", "deleted", "moved", "overflow", "gone", "error"}
)

Path = str | bytes


class PackBody:
    """An archive on its way. `entries`, `bytes`, `skipped`: what a look at the tree has found before."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self.entries = decode.number_header(response.headers, "x-entries")
        self.bytes = decode.number_header(response.headers, "x-bytes")
        self.skipped = decode.number_header(response.headers, "x-skipped")

    def __aiter__(self) -> AsyncGenerator[bytes, None]:
        # A directory with a million names that are left out is silent for a while.
        return self._response.aiter_bytes(idle_timeout=TREE_SECONDS)

    async def aclose(self) -> None:
        await self._response.aclose()


class FileToolCalls:
    """More file methods of `GuestClient`; paths, users and errors as in `FileCalls`."""

    _caller: Caller

    async def copy(self, path: Path, to: Path, *, overwrite: bool, recursive: bool, user: str | None) -> Entry:
        """A file or a tree; the copy is there as a whole or not at all."""
        query = [path_query(path), path_query(to, "to"), *_flags(overwrite=overwrite, recursive=recursive)]
        ctx = CallContext("file", path=path, to=to, user=user)
        return decode.entry(await self._do("POST", "/v1/copy", ctx, query, timeout=TREE_SECONDS))

    async def set_attributes(
        self,
        path: Path,
        *,
        mode: int | None,
        owner: str | None,
        group: str | None,
        mtime_ns: int | None,
        recursive: bool,
        user: str | None,
    ) -> tuple[int, Entry]:
        """How many entries were changed, and the path as it is now."""
        query = [path_query(path), *_flags(recursive=recursive)]
        given = {"mode": None if mode is None else f"{mode:04o}", "owner": owner, "group": group, "mtime_ns": mtime_ns}
        query += [(name, str(value)) for name, value in given.items() if value is not None]
        ctx = CallContext("file", path=path, user=user)
        f = Fields(await self._do("POST", "/v1/attributes", ctx, query, timeout=TREE_SECONDS))
        return f.integer("changed"), decode.entry(f.raw("entry"))

    async def touch(self, path: Path, *, mtime_ns: int | None, user: str | None) -> Entry:
        query = [path_query(path)] if mtime_ns is None else [path_query(path), ("mtime_ns", str(mtime_ns))]
        return decode.entry(await self._do("POST", "/v1/touch", CallContext("file", path=path, user=user), query))

    async def link(self, path: Path, to: Path, *, hard: bool, overwrite: bool, user: str | None) -> Entry:
        """A symbolic link with the text `to`, or another name for the file `to`."""
        raw = to.encode("utf-8", "surrogateescape") if isinstance(to, str) else to
        query = [path_query(path), ("to_b64", base64url(raw)), *_flags(hard=hard, overwrite=overwrite)]
        ctx = CallContext("file", path=path, to=to, user=user)
        return decode.entry(await self._do("POST", "/v1/link", ctx, query))

    async def readlink(self, path: Path, *, user: str | None) -> bytes:
        ctx = CallContext("file", path=path, user=user)
        found = Fields(await self._do("GET", "/v1/readlink", ctx, [path_query(path)]))
        text = found.opt_base64url("target_b64", _PATH_MAX)
        if text is None:
            raise protocol_error("a link without a target")
        return text

    async def tree_use(self, path: Path, *, depth: int, user: str | None) -> TreeUse:
        query = [path_query(path), ("depth", str(depth))]
        ctx = CallContext("file", path=path, user=user)
        f = Fields(await self._do("GET", "/v1/du", ctx, query, timeout=TREE_SECONDS, limit=_DU_BYTES))
        parts = [_use(Fields(item)) for item in f.items("parts", _PARTS_MAX)]
        return TreeUse(_use(f), parts, f.flag("truncated"), f.integer("unreadable", default=0))

    async def disk_use(self, path: Path, *, user: str | None) -> DiskUse:
        f = Fields(await self._do("GET", "/v1/df", CallContext("file", path=path, user=user), [path_query(path)]))
        names = ("bytes", "used_bytes", "available_bytes", "files", "files_free")
        size, used, available, files, free = (f.integer(name, default=0) for name in names)
        return DiskUse(size, used, available, files, free, f.flag("read_only"))

    async def glob(
        self, path: Path, body: Mapping[str, Any], *, user: str | None
    ) -> AsyncGenerator[Found | SearchEnd, None]:
        """Entries as they are found; the last item is a `SearchEnd`."""
        async with contextlib.aclosing(self._search("/v1/glob", path, body, user)) as items:
            async for f in items:
                yield _end(f) if f.has("end") else Found(decode.entry(f.values), _raw_path(f))

    async def grep(
        self, path: Path, body: Mapping[str, Any], *, user: str | None
    ) -> AsyncGenerator[Match | SearchEnd, None]:
        """Lines as they are found; the last item is a `SearchEnd`."""
        async with contextlib.aclosing(self._search("/v1/grep", path, body, user)) as items:
            async for f in items:
                yield _end(f) if f.has("end") else _match(f)

    async def _search(
        self, call: str, path: Path, body: Mapping[str, Any], user: str | None
    ) -> AsyncGenerator[Fields, None]:
        ctx, query = target(path, user)
        response = await self._caller.open_json("POST", call, ctx, query=query, json_body=dict(body))
        async with contextlib.aclosing(json_lines(response, IDLE_SECONDS)) as lines:
            async for f in lines:
                yield f
                if f.has("end"):
                    return
        raise protocol_error("a search without an end")

    async def replace(self, body: Mapping[str, Any], *, user: str | None) -> list[Replaced]:
        query: Query = [("path", "/")]
        ctx = CallContext("file", user=user)
        answer = await self._do("POST", "/v1/replace", ctx, query, body, timeout=TREE_SECONDS, limit=_FILES_BYTES)
        return [_replaced(Fields(item)) for item in Fields(answer).items("files", 1000)]

    async def pack(
        self,
        path: Path,
        fmt: str,
        *,
        skip_unreadable: bool,
        include: Sequence[str],
        exclude: Sequence[str],
        user: str | None,
    ) -> PackBody:
        """An archive of a tree. Close it, or read it to its end."""
        ctx, query = target(path, user)
        query += [("format", fmt), *_flags(skip_unreadable=skip_unreadable)]
        query += [("include", one) for one in include] + [("exclude", one) for one in exclude]
        return PackBody(await self._caller.open("GET", "/v1/archive", ctx, query=query, timeout=TREE_SECONDS))

    async def extract(
        self, path: Path, fmt: str, body: AsyncIterator[bytes], *, options: Mapping[str, int | None], user: str | None
    ) -> Extracted:
        """Unpacks an archive. What came before an error stays; `details.done` says how much."""
        ctx, query = target(path, user)
        query += [("format", fmt), *((name, str(value)) for name, value in options.items() if value is not None)]
        headers = [("content-type", "application/octet-stream")]
        response = await self._caller.open(
            "PUT", "/v1/archive", ctx, query=query, headers=headers, body=body, timeout=TREE_SECONDS
        )
        f = Fields(await self._caller.read_json(response, timeout=CALL_SECONDS))
        notices = [Fields(item) for item in f.items("notices", 100)]
        told = [(one.text("name", _PATH_MAX), decode.printable(one.text("why", 200))) for one in notices]
        names = ("files", "dirs", "links", "bytes", "skipped")
        files, dirs, links, size, skipped = (f.integer(name, default=0) for name in names)
        return Extracted(f.text("path", _PATH_MAX, default=""), files, dirs, links, size, skipped, told)

    async def watch(self, path: Path, *, recursive: bool, user: str | None) -> AsyncGenerator[WatchEvent, None]:
        """What happens in a directory, from the first event (`ready`) on; `gone` or `error` is the last."""
        ctx, query = target(path, user)
        query += _flags(recursive=recursive)
        response = await self._caller.open("GET", "/v1/watch", ctx, query=query, timeout=TREE_SECONDS)
        async with contextlib.aclosing(json_lines(response, IDLE_SECONDS)) as lines:
            async for f in lines:
                kind = f.text("type", 16)
                if kind not in _WATCH_KINDS:
                    continue  # of a newer agent
                old = _raw_path(f, "from") if kind == "moved" else None
                there = f.has("path")
                yield WatchEvent(
                    kind, _raw_path(f) if there else None, old, f.flag("dir"), f.opt_text("code", 32)
                )  # fmt: skip
                if kind in {"gone", "error"}:
                    return
        raise protocol_error("a watch without an end")

    async def _do(
        self,
        method: str,
        call: str,
        ctx: CallContext,
        query: Query,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float = CALL_SECONDS,
        limit: int = 256 * 1024,
    ) -> Any:
        if ctx.user is not None:
            query = [*query, ("user", ctx.user)]
        sent = None if body is None else dict(body)
        return await self._caller.call(method, call, ctx, query=query, json_body=sent, timeout=timeout, limit=limit)


def _flags(**flags: bool) -> Query:
    return [(name, "1") for name, value in flags.items() if value]


def _raw_path(f: Fields, name: str = "path") -> bytes:
    raw = f.opt_base64url(name + "_b64", _PATH_MAX)
    return f.text(name, _PATH_MAX).encode() if raw is None else raw


def _use(f: Fields) -> Use:
    numbers = (f.integer(name, default=0) for name in ("bytes", "disk_bytes", "entries"))
    return Use(f.text("path", _PATH_MAX), _raw_path(f), *numbers)


def _end(f: Fields) -> SearchEnd:
    numbers = (f.integer(name, default=0) for name in ("files", "skipped_binary", "unreadable"))
    return SearchEnd(f.flag("truncated"), *numbers)


def _match(f: Fields) -> Match:
    around = [[_shown(text) for text in f.items(name, 20)] for name in ("before", "after")]
    return Match(
        f.text("path", _PATH_MAX), _raw_path(f), f.integer("line", 1), f.integer("column", 1),
        f.text("text", _SHOWN_MAX), f.flag("cut"), around[0], around[1],
    )  # fmt: skip


def _shown(text: object) -> str:
    if not isinstance(text, str):
        raise protocol_error("a line that is not text")
    return text[:_SHOWN_MAX].encode("utf-8", "replace").decode()


def _replaced(f: Fields) -> Replaced:
    error = f.raw("error")
    code = Fields(error).text("code", 32) if error is not None else None
    return Replaced(f.text("path", _PATH_MAX), _raw_path(f), f.integer("count", default=0), code)
