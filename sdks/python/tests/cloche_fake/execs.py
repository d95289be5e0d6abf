"""Commands of the fake: a table instead of a shell."""

from __future__ import annotations

import asyncio
import base64
import codecs
import itertools
import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from .http import Abort, Reply, Request

Events = list[tuple[str, bytes]]


def run(body: dict[str, Any]) -> tuple[Events, int]:
    """What a command yields: pieces of output, and the exit code."""
    argv = body.get("argv") or shlex.split(body["cmd"])
    name, args = argv[0], argv[1:]
    if name == "echo":
        return [("stdout", (" ".join(args) + "\n").encode())], 0
    if name == "cat":
        text = body.get("stdin", "")
        return [("stdout", base64.b64decode(text) if body.get("stdin_base64") else text.encode())], 0
    if name == "argv":
        return [("stdout", json.dumps(args).encode())], 0
    if name == "context":
        seen = {key: body.get(key) for key in ("env", "cwd", "user", "timeout_seconds")}
        return [("stdout", json.dumps(seen).encode())], 0
    if name == "fail":
        return [("stdout", b"half"), ("stderr", b"no such thing\n")], int(args[0])
    if name == "raw":
        return [("stdout", b"\xff\xfeok"), ("stderr", b"\x80")], 0
    if name == "bytewise":
        return [("stdout", bytes([byte])) for byte in "日本é😀".encode()], 0
    if name == "separators":
        return [("stdout", "a\u2028b\u2029c\u0085d\r\ne".encode())], 0
    if name == "count":
        return [("stdout", b"%d\n" % number) for number in range(1, int(args[0]) + 1)], 5
    if name == "repeat":
        return [("stdout", args[0].encode() * int(args[1]))], 0
    return [("stderr", f"{name}: not found\n".encode())], 127


@dataclass
class Record:
    """A background command."""

    events: Events
    exit_code: int
    finished: bool = True
    readers: list[int] = field(default_factory=list)


class Execs:
    """`cut_after`: each stream of a background command breaks off after so many events."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.cut_after: int | None = None
        self.delay = 0.0
        self._pids = itertools.count(100)

    async def handle(self, parts: list[str], body: dict[str, Any], request: Request, reply: Reply) -> None:
        """Everything below `…/exec`."""
        if parts == ["stream"]:
            events, code = run(body)
            await self._stream(events, code, body.get("encoding"), reply, None)
        elif not parts and request.method == "POST":
            await self._post(body, reply)
        elif not parts:
            await reply.json(200, {"execs": [self._info(exec_id) for exec_id in self.records]})
        elif parts[0] not in self.records:
            await reply.error(404, "exec.not_found")
        elif request.method == "DELETE":
            self.records[parts[0]].finished = True
            await reply.send(204)
        elif parts[1:] == ["stream"]:
            record = self.records[parts[0]]
            start = int(request.query.get("from", "0"))
            record.readers.append(start)
            while not record.finished and not reply.gone():  # noqa: ASYNC110 - set from another thread
                await asyncio.sleep(0.01)
            await self._stream(
                record.events, record.exit_code, request.query.get("encoding"), reply, self.cut_after, start
            )
        else:
            await reply.json(200, self._info(parts[0], request.query.get("encoding", "utf-8")))

    async def _post(self, body: dict[str, Any], reply: Reply) -> None:
        events, code = run(body)
        if body.get("background"):
            slow = body.get("cmd", "").endswith("# slow")
            self.records[body["exec_id"]] = Record(events, code, finished=not slow)
            answer = {"exec_id": body["exec_id"], "status": "running", "pid": next(self._pids)}
            await reply.json(202, answer)
            return
        await reply.json(200, self._result(body["exec_id"], events, code, body.get("encoding", "utf-8")))

    def _info(self, exec_id: str, encoding: str = "utf-8") -> dict[str, Any]:
        record = self.records[exec_id]
        if not record.finished:
            return {"exec_id": exec_id, "status": "running", "pid": 7}
        return {"status": "exited", "pid": 7, **self._result(exec_id, record.events, record.exit_code, encoding)}

    def _result(self, exec_id: str, events: Events, code: int, encoding: str) -> dict[str, Any]:
        output = {name: b"".join(data for kind, data in events if kind == name) for name in ("stdout", "stderr")}
        return {
            "exec_id": exec_id,
            **{name: encoded(data, encoding) for name, data in output.items()},
            "encoding": encoding,
            "exit_code": code,
            "duration_ms": 1.5,
            "termination": {"reason": "exited"},
            "truncated": False,
            "stdout_dropped_bytes": 0,
            "stderr_dropped_bytes": 0,
            "agent_ms": 0.5,
        }

    async def _stream(
        self,
        events: Events,
        code: int,
        encoding: str | None,
        reply: Reply,
        cut_after: int | None,
        start: int = 0,
    ) -> None:
        await reply.begin(200, "text/event-stream; charset=utf-8")
        decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
        offset = sent = 0
        for name, data in events:
            offset += len(data)
            if offset <= start:
                continue
            if cut_after is not None and sent >= cut_after:
                raise Abort
            chunk = encoded(data, "base64") if encoding == "base64" else decoders[name].decode(data)
            extra = {"encoding": "base64"} if encoding == "base64" else {}
            await reply.chunk(b": ping\n\n")
            await reply.event(name, {"chunk": chunk, **extra}, offset)
            sent += 1
            if self.delay:
                await asyncio.sleep(self.delay)
        end = {"exit_code": code, "duration_ms": 2.0, "termination": {"reason": "exited"}}
        await reply.event("exit", end, offset)
        await reply.end()


def encoded(data: bytes, encoding: str) -> str:
    """Output as it goes into JSON."""
    return base64.b64encode(data).decode() if encoding == "base64" else data.decode("utf-8", "replace")
