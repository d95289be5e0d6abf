"""The bridge of the code interpreter as a process of this machine, with kernels that are real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kit import procs

SOURCE = Path(__file__).resolve().parents[2] / "templates" / "code-interpreter" / "bridge"


#: Of the answers to a request.
LAST = {"end", "refused", "reply"}


class BridgeClient:
    """Speaks to a bridge as the host does."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self, request: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        body = json.dumps(request).encode()
        writer.write(len(body).to_bytes(4, "big") + body)
        await writer.drain()
        return reader, writer

    async def read(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        try:
            size = int.from_bytes(await reader.readexactly(4), "big")
            data: dict[str, Any] = json.loads(await reader.readexactly(size))
        except asyncio.IncompleteReadError:
            return None
        return data

    async def rest(self, reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
        """What comes until the answer has ended; the connection stays open then."""
        while (event := await self.read(reader)) is not None:
            yield event
            if event["type"] in LAST:
                return

    async def events(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        reader, writer = await self.open(request)
        try:
            async for event in self.rest(reader):
                yield event
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        async for event in self.events({"op": op, **fields}):
            return event
        raise AssertionError("no answer")

    async def run(self, code: str, *, timeout: float = 30, **fields: Any) -> Ran:
        request = {"op": "run", "code": code, "timeout_ms": round(timeout * 1000), **fields}
        async with asyncio.timeout(timeout + 60):
            return Ran([event async for event in self.events(request)])


class Ran:
    """What came of a cell."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events = events
        self.end = events[-1]

    def text(self, stream: str) -> str:
        return "".join(event["text"] for event in self.events if event["type"] == stream)

    @property
    def stdout(self) -> str:
        return self.text("stdout")

    @property
    def results(self) -> list[dict[str, str]]:
        return [event["data"] for event in self.events if event["type"] == "result"]

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event for event in self.events if event["type"] == "error"), None)

    @property
    def status(self) -> str:
        return str(self.end.get("status"))


@contextlib.asynccontextmanager
async def bridge(folder: Path) -> AsyncIterator[BridgeClient]:
    """A bridge until the end of the block; its kernels end with it."""
    env = {**os.environ, "CLOCHE_CODE_DIR": str(folder / "b"), "CLOCHE_CODE_PORT": "0"}
    # ipykernel does not catch what programs write while it is tested itself.
    env.pop("PYTEST_CURRENT_TEST", None)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SOURCE / "bridge.py"),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=procs.heed_interrupts,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            port = int(await process.stdout.readline())
        yield BridgeClient(port)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(20):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
