"""The control link, netd's end: several clients at once, each bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any, Final

from cloche_server.core.netctl import FrameError
from cloche_server.host.fdlink import FdStream, LinkLost
from cloche_server.netd.registry import Refusal, Registry

MOST_CLIENTS: Final = 16
#: Requests of one client that are under way; it is not read from while there are as many.
AT_ONCE: Final = 64


class Control:
    """Accepts clients on a listening socket. `tasks` owns what they ask for."""

    def __init__(self, listener: socket.socket, registry: Registry, tasks: asyncio.TaskGroup) -> None:
        self._listener = listener
        self._registry = registry
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._clients: set[Client] = set()
        self._loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(self._clients) >= MOST_CLIENTS:
                sock.close()
                return
            self._clients.add(Client(sock, self._registry, self._tasks, self._clients.discard))

    @property
    def has_clients(self) -> bool:
        return bool(self._clients)

    def close(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for client in list(self._clients):
            client.close()


class Client:
    def __init__(self, sock: socket.socket, registry: Registry, tasks: asyncio.TaskGroup, gone: Any) -> None:
        self._registry = registry
        self._tasks = tasks
        self._gone = gone
        self._running: set[asyncio.Task[None]] = set()
        self._stream = FdStream(sock, self._received, self._ended)

    def _received(self, message: dict[str, Any], fds: list[int]) -> None:
        task = self._tasks.create_task(self._answer(message, fds))
        self._running.add(task)
        task.add_done_callback(self._done)
        if len(self._running) >= AT_ONCE:
            self._stream.pause()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if len(self._running) < AT_ONCE:
            self._stream.resume()

    async def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        number = message.get("id")
        answer: dict[str, Any] = {"id": number if isinstance(number, int) else 0}
        try:
            answer["ok"] = await self._registry.handle(message, fds)
        except Refusal as error:
            answer["error"] = {"code": error.code, "message": error.message}
        except Exception as error:  # noqa: BLE001 - one request that fails leaves all others alone
            answer["error"] = {"code": "internal", "message": f"netd failed on this ({type(error).__name__})"}
        finally:
            for fd in fds:
                os.close(fd)
        with contextlib.suppress(LinkLost, FrameError):
            await self._stream.send(answer)

    def _ended(self) -> None:
        for task in self._running:
            task.cancel()
        self._gone(self)

    def close(self) -> None:
        self._stream.close()
