"""Services: defined, and found again; started, stopped, waited for, read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

from .. import _call, _wire, _wire_services
from .._call import SILENCE, SLOW, Call
from ..errors import WaitTimeout
from ..services import HealthCheck, LogPage, ServiceDefinition, ServiceInfo
from .processes import AsyncProcess, AsyncProcesses
from .transport import AsyncTransport

#: One question for the state of a service (seconds).
WAIT_PIECE = 20.0

Restart = Literal["no", "on-failure", "always"]
State = Literal["starting", "healthy", "unhealthy", "backoff", "stopped", "failed"]


class AsyncService:
    """A service of a sandbox. The sandbox keeps it running, whether or not anybody is connected. `info` is what was
    said last."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str, info: ServiceInfo) -> None:
        self.info = info
        self.name = info.name
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._path = _call.path("sandboxes", sandbox_id, "services", info.name)

    @property
    def state(self) -> str:
        """`starting`, `healthy`, `unhealthy`, `backoff`, `stopped` or `failed`, as it was said last."""
        return self.info.state

    async def refresh(self) -> ServiceInfo:
        """How it is doing now."""
        return await self._ask(Call("GET", self._path, kind="safe"))

    async def start(self) -> ServiceInfo:
        """Start it, and what it depends on; `wait` tells when it is healthy."""
        return await self._ask(Call("POST", f"{self._path}/start", silence=SLOW))

    async def stop(self) -> ServiceInfo:
        """Stop it: all its processes have ended then."""
        return await self._ask(Call("POST", f"{self._path}/stop", silence=SLOW))

    async def restart(self) -> ServiceInfo:
        """Stop it and start it again."""
        return await self._ask(Call("POST", f"{self._path}/restart", silence=SLOW))

    async def wait(self, *states: State, timeout: float | None = None) -> ServiceInfo:
        """Wait for one of these states; without any, until it neither starts nor waits for a restart.

        `WaitTimeout` after so many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        wanted = states or ("healthy", "unhealthy", "stopped", "failed")
        while True:
            left = WAIT_PIECE if deadline is None else min(WAIT_PIECE, max(0.0, deadline - time.monotonic()))
            query = _call.params(timeout=left, state=",".join(wanted))
            info = await self._ask(Call("GET", f"{self._path}/wait", params=query, kind="safe", silence=SILENCE))
            if info.state in wanted:
                return info
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"the service {self.name} is {info.state} after {timeout:g} s")

    async def delete(self) -> None:
        """Stop it and forget it."""
        await self._transport.json(Call("DELETE", self._path, silence=SLOW))

    async def logs(self, from_: str | None = None, *, tail: int | None = None) -> LogPage:
        """What it has written, across its runs: from the place `from_` on (the `next` of the page before), or the last
        lines."""
        query = _call.params(source=f"service:{self.name}", format="json", tail=tail)
        query |= {} if from_ is None else {"from": from_}
        call = Call("GET", _call.path("sandboxes", self._sandbox_id, "logs"), params=query, kind="safe")
        return _wire_services.page(await self._transport.json(call))

    async def process(self) -> AsyncProcess | None:
        """The process of its present run, or of the last one, with its output; None if it never ran."""
        info = await self.refresh()
        if info.process_id is None:
            return None
        return await AsyncProcesses(self._transport, self._sandbox_id).get(info.process_id)

    async def _ask(self, call: Call) -> ServiceInfo:
        self.info = _wire_services.service(_wire.record(await self._transport.json(call)))
        return self.info

    def __repr__(self) -> str:
        return f"AsyncService({self.name!r}, state={self.info.state!r})"


class AsyncServices:
    """`sandbox.services`."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._path = _call.path("sandboxes", sandbox_id, "services")

    async def define(
        self,
        name: str,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        restart: Restart | None = None,
        backoff: float | None = None,
        max_restarts: int | None = None,
        window: float | None = None,
        health: HealthCheck | None = None,
        depends_on: Sequence[str] = (),
        autostart: bool | None = None,
        stop_grace: float | None = None,
        buffer_kb: int | None = None,
    ) -> AsyncService:
        """Define a service and start it. The same definition changes nothing; another one starts it anew.

        `command`: text for the shell, or program and arguments; it has to stay in the foreground. `backoff`: seconds
        before the first restart, doubled with each one; after `max_restarts` in `window` seconds it has failed.
        `autostart`: now, and at each boot. `stop_grace`: seconds until what does not end is killed.
        """
        one = ServiceDefinition(
            name, command, env or {}, cwd, user, restart, backoff, max_restarts, window, health, depends_on, autostart
        )
        body = _wire_services.definition(one) | _wire.given(stop_grace_seconds=stop_grace, buffer_kb=buffer_kb)
        call = Call("PUT", self._one(name), json=body, silence=SLOW)
        return self._handle(_wire_services.service(_wire.record(await self._transport.json(call))))

    async def list(self) -> Sequence[AsyncService]:
        """All of them, by name."""
        data = await self._transport.json(Call("GET", self._path, kind="safe"))
        return [self._handle(info) for info in _wire_services.services(data)]

    async def get(self, name: str) -> AsyncService:
        """One by its name."""
        data = await self._transport.json(Call("GET", self._one(name), kind="safe"))
        return self._handle(_wire_services.service(_wire.record(data)))

    def _one(self, name: str) -> str:
        return _call.path("sandboxes", self._sandbox_id, "services", name)

    def _handle(self, info: ServiceInfo) -> AsyncService:
        return AsyncService(self._transport, self._sandbox_id, info)
