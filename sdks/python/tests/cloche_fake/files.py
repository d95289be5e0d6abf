"""Files of the fake: a dictionary from raw paths to bytes; what ends in `/` is a directory."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any

from .http import Reply, Request

BLOCK = b"\0" * 65536


class Files:
    """`received` holds the SHA-256 and the size of an upload to a path below `/sink/`, which is not kept."""

    def __init__(self) -> None:
        self.content: dict[bytes, bytes] = {}
        self.modes: dict[bytes, str] = {}
        self.directories: set[bytes] = {b"/", b"/tmp"}
        self.received: dict[bytes, tuple[str, int]] = {}
        self.aborted: list[bytes] = []
        self.page = 3

    async def handle(self, parts: list[str], request: Request, reply: Reply) -> None:
        """Everything below `…/fs`."""
        if parts == ["dir"]:
            await self._list(request, reply)
        elif parts == ["stat"]:
            await self._stat(_path(request.query), reply)
        elif parts == ["mkdir"]:
            path = _path(await request.json())
            self.directories.add(path)
            await reply.json(201, self._entry(path))
        elif parts == ["move"]:
            await self._move(await request.json(), reply)
        else:
            await {"GET": self._get, "PUT": self._put, "DELETE": self._delete}[request.method](request, reply)

    async def _get(self, request: Request, reply: Reply) -> None:
        path = _path(request.query)
        if path.startswith(b"/zeros/"):
            size = int(path.removeprefix(b"/zeros/"))
            await reply.begin(200, "application/octet-stream", size)
            for _ in range(size // len(BLOCK)):
                await reply.raw(BLOCK)
            await reply.raw(BLOCK[: size % len(BLOCK)])
        elif path in self.directories:
            await reply.error(400, "file.is_directory")
        elif path not in self.content:
            await reply.error(404, "file.not_found", "there is no such file or directory")
        else:
            await reply.send(200, self.content[path], kind="application/octet-stream")

    async def _put(self, request: Request, reply: Reply) -> None:
        path = _path(request.query)
        if len(path.split(b"/")[-1]) > 255:
            await reply.error(400, "file.name_too_long")
            return
        digest, size, parts = hashlib.sha256(), 0, []
        try:
            async for chunk in request.chunks():
                digest.update(chunk)
                size += len(chunk)
                if not path.startswith(b"/sink/"):
                    parts.append(chunk)
        except (asyncio.IncompleteReadError, OSError):
            self.aborted.append(path)
            raise
        self.received[path] = (digest.hexdigest(), size)
        created = path not in self.content
        if not path.startswith(b"/sink/"):
            old = self.content.get(path, b"") if request.query.get("append") == "1" else b""
            self.content[path] = old + b"".join(parts)
        if "mode" in request.query:
            self.modes[path] = request.query["mode"]
        await reply.json(200, {"path": path.decode("utf-8", "replace"), "bytes": size, "created": created})

    async def _delete(self, request: Request, reply: Reply) -> None:
        path = _path(request.query)
        below = [p for p in [*self.content, *self.directories] if p.startswith(path + b"/")]
        if path not in self.content and path not in self.directories:
            if request.query.get("must_exist") == "1":
                await reply.error(404, "file.not_found")
            else:
                await reply.send(204)
        elif below and request.query.get("recursive") == "0":
            await reply.error(409, "file.not_empty")
        else:
            for name in [path, *below]:
                self.content.pop(name, None)
                self.directories.discard(name)
            await reply.send(204)

    async def _list(self, request: Request, reply: Reply) -> None:
        path = _path(request.query)
        if path in self.content:
            await reply.error(400, "file.not_a_directory")
            return
        if path not in self.directories:
            await reply.error(404, "file.not_found")
            return
        every = [*self.content, *self.directories - {b"/"}]
        names = sorted(p.rpartition(b"/")[2] for p in every if p.rpartition(b"/")[0] == path.rstrip(b"/"))
        after = base64.urlsafe_b64decode(request.query["after"]) if "after" in request.query else b""
        left = [name for name in names if name > after]
        page = left[: int(request.query.get("limit", self.page))]
        answer: dict[str, Any] = {
            "path": path.decode("utf-8", "replace"),
            "entries": [self._entry(path.rstrip(b"/") + b"/" + name) for name in page],
            "truncated": len(left) > len(page),
        }
        if answer["truncated"]:
            answer["next"] = base64.urlsafe_b64encode(page[-1]).decode()
        await reply.json(200, answer)

    async def _stat(self, path: bytes, reply: Reply) -> None:
        if path in self.content or path in self.directories:
            await reply.json(200, self._entry(path))
        else:
            await reply.error(404, "file.not_found")

    async def _move(self, body: dict[str, Any], reply: Reply) -> None:
        source, target = _path(body, "from"), _path(body, "to")
        if source not in self.content:
            await reply.error(404, "file.not_found")
        elif target in self.content and not body.get("overwrite"):
            await reply.error(409, "file.exists")
        else:
            self.content[target] = self.content.pop(source)
            await reply.json(200, self._entry(target))

    def _entry(self, path: bytes) -> dict[str, Any]:
        name = path.rpartition(b"/")[2]
        entry: dict[str, Any] = {
            "name": name.decode("utf-8", "replace"),
            "path": path.decode("utf-8", "replace"),
            "type": "dir" if path in self.directories else "file",
            "is_dir": path in self.directories,
            "size": len(self.content.get(path, b"")),
            "mode": self.modes.get(path, "0644"),
            "mtime": 1700000000,
            "mtime_ns": 1700000000123456789,
            "uid": 0,
            "gid": 0,
            "owner": "root",
            "group": "root",
        }
        if entry["name"].encode() != name:
            entry["name_b64"] = base64.urlsafe_b64encode(name).decode().rstrip("=")
        return entry


def _path(fields: dict[str, Any], name: str = "path") -> bytes:
    if f"{name}_b64" in fields:
        text = fields[f"{name}_b64"]
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    return str(fields[name]).encode()
