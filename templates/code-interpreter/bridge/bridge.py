"""Runs code in kernels for whoever connects to a port of the loopback: the host, over the agent of the guest.

A connection has one request after the other: a frame with an object whose `op` is run, create, list, delete,
interrupt, restart, input, practise or languages. The answer to `run` is a row of events, the last of which is `end` or
`refused`; to all else one frame. A connection that is closed before the end of its run interrupts it. See
docs/code-interpreter.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from contexts import Contexts, Refused
from languages import languages
from outbox import Outbox, encode, read_frame

PORT = 1011
ALIVE_SECONDS = 5.0


class Bridge:
    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # It is read all the time, so that the end of the connection is seen.
        following = asyncio.create_task(read_frame(reader))
        try:
            if not may_connect(writer.get_extra_info("peername"), writer.get_extra_info("sockname")):
                return
            while True:
                request = await following
                following = asyncio.create_task(read_frame(reader))
                if request.get("op") != "run":
                    writer.write(encode(await self._answer(request)))
                    await writer.drain()
                elif not await self._run(request, following, writer):
                    return
        except (OSError, EOFError, ValueError, TypeError, KeyError):
            pass
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        contexts, op, chosen = self._contexts, request.get("op"), str(request.get("context", ""))
        try:
            if op == "create":
                return {"type": "reply", "context": (await contexts.create(request)).describe()}
            if op == "list":
                return {"type": "reply", "contexts": contexts.list()}
            if op == "languages":
                return {"type": "reply", "languages": languages()}
            if op == "practise":
                await contexts.practise()
            elif op == "delete":
                await contexts.delete(chosen)
            elif op == "interrupt":
                return {"type": "reply", "interrupted": await contexts.find(chosen).interrupt()}
            elif op == "restart":
                await contexts.find(chosen).restart()
            elif op == "input":
                if not await contexts.find(chosen).answer(str(request.get("text", ""))):
                    raise Refused("not_waiting")
            else:
                raise Refused("bad")
        except Refused as refused:
            return {"type": "refused", **refused.details}
        return {"type": "reply"}

    async def _run(
        self, request: dict[str, Any], following: asyncio.Task[dict[str, Any]], writer: asyncio.StreamWriter
    ) -> bool:
        """False when the connection has ended. `following`: what comes behind the request."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()

        def leave() -> None:
            if not gone.done():
                gone.set_result(None)
            out.close()

        def watch(_: asyncio.Task[dict[str, Any]]) -> None:
            if following.cancelled() or following.exception() is not None:
                leave()

        def beat() -> None:
            nonlocal beating
            out.event({"type": "alive"})
            beating = loop.call_later(ALIVE_SECONDS, beat)

        out = Outbox(writer, leave)
        following.add_done_callback(watch)
        beating = loop.call_later(ALIVE_SECONDS, beat)
        try:
            try:
                await (await self._contexts.chosen(request)).run(request, out, gone)
            except Refused as refused:
                out.end({"type": "refused", **refused.details})
            await out.sent()
        finally:
            following.remove_done_callback(watch)
            beating.cancel()
            out.close()
        return not gone.done()


def may_connect(peer: tuple[str, int], ours: tuple[str, int]) -> bool:
    """Only a process of the same user: a kernel of root is no way to become root."""
    wanted = f"{_hex(peer)} {_hex(ours)}"
    with open("/proc/net/tcp") as file:
        # Connections that are over stay in it for a minute, so that there may be many lines.
        _, found, rest = file.read().partition(f": {wanted} ")
    # State, queues, timer, retransmissions, and then the user.
    return bool(found) and int(rest.split(None, 5)[4]) in {0, os.getuid()}


def _hex(address: tuple[str, int]) -> str:
    packed = bytes(int(part) for part in address[0].split("."))
    return f"{int.from_bytes(packed, 'little'):08X}:{address[1]:04X}"


async def main() -> None:
    root = Path(os.environ.get("CLOCHE_CODE_DIR", "/run/cloche-code"))
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(mode=0o711, parents=True)
    for name, value in (("oom_score_adj", "-800"),):
        with contextlib.suppress(OSError):
            Path("/proc/self", name).write_text(value)
    contexts = Contexts(root)
    await contexts.start()
    bridge = Bridge(contexts)
    port = int(os.environ.get("CLOCHE_CODE_PORT", str(PORT)))
    server = await asyncio.start_server(bridge.serve, "127.0.0.1", port, limit=1 << 20, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    try:
        await server.serve_forever()
    finally:
        await contexts.aclose()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
