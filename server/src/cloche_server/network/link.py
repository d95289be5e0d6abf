"""netd as the server sees it: found or started, asked, and started again when it has ended.

netd outlives the server, so that the connections of guests do: a server that starts finds it by its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from cloche_server.core.errors import CATALOGUE, ClocheError
from cloche_server.core.netctl import PROTOCOL, FrameError
from cloche_server.host import process
from cloche_server.host.fdlink import FdClient, LinkLost, LinkRefused
from cloche_server.network.slots import Handed
from cloche_server.telemetry import log

_log = log.get("netd")

START_TIMEOUT: Final = 30.0
ASK_TIMEOUT: Final = 20.0
#: Between two starts of a netd that does not stay (seconds).
AGAIN_AFTER: Final = 1.0
_FAILURES: Final = (LinkLost, LinkRefused, FrameError, TimeoutError)


class Netd:
    """`uid`: whom netd becomes. `settings`: what it is told before anything else (`configure`). `extra_ca`: a PEM file
    of authorities that it trusts besides those of the host."""

    def __init__(self, data: Path, uid: int, settings: Mapping[str, Any], extra_ca: Path | None = None) -> None:
        self._extra_ca = extra_ca
        self._data = data
        self._socket = data / "run" / "netd.sock"
        self._uid = uid
        self._settings = dict(settings)
        self._client: FdClient | None = None
        self._attached: frozenset[str] = frozenset()
        self._lost = asyncio.Event()

    @property
    def attached(self) -> Collection[str]:
        return self._attached

    async def start(self) -> None:
        """Finds a netd that speaks our language, or starts one. Raises `network.unavailable`."""
        try:
            if not await self._join():
                try:
                    await self._launch()
                except LinkLost:  # there may have been one that was just ending
                    await asyncio.sleep(AGAIN_AFTER)
                    await self._launch()
        except (OSError, *_FAILURES) as error:
            raise _unavailable(f"the process that carries the network did not start ({error})") from error

    async def _join(self) -> bool:
        lost = asyncio.Event()
        try:
            client = await FdClient.connect(self._socket, lost.set)
        except OSError:
            return False
        try:
            hello = await client.call("hello", timeout=ASK_TIMEOUT)
            if hello.get("version") == PROTOCOL:
                await client.call("configure", timeout=ASK_TIMEOUT, **self._settings)
                self._client, self._lost, self._attached = client, lost, frozenset(hello["sandboxes"])
                return True
            _log.warning("netd.replaced", version=hello.get("version"))
            await client.call("stop", timeout=ASK_TIMEOUT)
        except (*_FAILURES, KeyError) as error:
            _log.warning("netd.not_joined", error=repr(error))
        client.close()
        return False

    async def end(self) -> None:
        """Ends a netd that runs without a server. Fine when there is none."""
        try:
            client = await FdClient.connect(self._socket)
        except OSError:
            return
        with contextlib.suppress(*_FAILURES):
            await client.call("stop", timeout=ASK_TIMEOUT)
        client.close()

    async def _launch(self) -> None:
        argv = [sys.executable, "-m", "cloche_server.netd", "--socket", str(self._socket), "--uid", str(self._uid)]
        if self._extra_ca is not None:
            argv += ["--extra-ca", str(self._extra_ca)]
        pid = await asyncio.to_thread(
            process.spawn_detached, argv, cwd=self._data / "run", stdout_path=self._data / "run" / "netd.log"
        )
        started = process.start_time(pid) or 0
        async with asyncio.timeout(START_TIMEOUT):
            while process.is_alive(pid, started):
                if await self._join():
                    _log.info("netd.started", pid=pid)
                    return
                await asyncio.sleep(0.05)
        raise LinkLost(f"it ended at once; {self._data / 'run' / 'netd.log'} says why")

    async def ask(self, op: str, fields: Mapping[str, Any], sockets: Handed | None = None) -> dict[str, Any]:
        """Raises `network.unavailable`, or what netd answers."""
        client = self._client
        if client is None or not client.connected:
            raise _unavailable("the process that carries the network is being started")
        fds = [one.fileno() for one in sockets.all()] if sockets is not None else []
        wait = ASK_TIMEOUT + float(fields.get("wait", 0))
        try:
            answer: dict[str, Any] = await client.call(op, fds=fds, timeout=wait, **fields) or {}
        except LinkRefused as error:
            if error.code == "not-attached":
                raise _unavailable("the network of the sandbox is being connected again") from error
            raise ClocheError(error.code if error.code in CATALOGUE else "internal", error.message) from error
        except (LinkLost, FrameError, TimeoutError) as error:
            raise _unavailable("the process that carries the network has ended or does not answer") from error
        return answer

    async def run(self, again: Callable[[], Awaitable[None]]) -> None:
        """Starts netd whenever it has ended, and calls `again` then; cancel to stop."""
        while True:
            await self._lost.wait()
            _log.error("netd.lost")
            try:
                await self.start()
                await again()
            except ClocheError as error:
                _log.error("netd.not_started", error=error.message)
            await asyncio.sleep(AGAIN_AFTER)

    async def close(self, *, stop: bool) -> None:
        """Lets go of netd, which runs on unless `stop`."""
        if self._client is None:
            return
        if stop:
            try:
                await self._client.call("stop", timeout=5)
            except _FAILURES as error:
                _log.warning("netd.not_stopped", error=str(error))
        self._client.close()
        self._client = None


def _unavailable(sentence: str) -> ClocheError:
    return ClocheError("network.unavailable", sentence, retry_after=2)
