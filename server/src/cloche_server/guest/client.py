"""The calls of one sandbox's agent as methods (docs/agent-protocol.md)."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from ..core.errors import ClocheError
from . import decode
from .caller import CALL_SECONDS, Caller
from .errors import CallContext
from .files import FileCalls
from .filetools import FileToolCalls
from .h2link import Response
from .processes import ProcessCalls, exec_path, is_exec_id
from .service_events import ServiceEventCalls
from .services import ServiceCalls
from .sockets import SocketCalls
from .starts import Starts
from .streams import IDLE_SECONDS, ExecCall
from .tunnel import GuestTunnel, open_tunnel
from .types import AgentInfo, ExecInfo, ExecRequest, ListeningPort, RenewRequest, RenewResult, Usage

__all__ = ["GuestClient"]

_MACHINE: Final = CallContext("machine")
_EXECS_BYTES: Final = 4 * 1024 * 1024


class GuestClient(FileCalls, FileToolCalls, ProcessCalls, ServiceCalls, ServiceEventCalls, SocketCalls):
    """Speaks to the agent of one sandbox; file calls are in `FileCalls` and `FileToolCalls`, those of processes in
    `ProcessCalls`, those of services in `ServiceCalls` and `ServiceEventCalls`, those of sockets in
    `SocketCalls`.

    Connects when a call needs it. Every method raises ClocheError: `sandbox.unreachable` (LinkLost,
    LinkTimeout) when the agent is not there, `guest.protocol` when it answers nonsense, and what
    `errors.agent_error` makes of its error answers. `timeout` is in seconds everywhere.
    """

    def __init__(self, path: str, *, connect_timeout: float = 10.0) -> None:
        """`path`: the Unix socket of the agent port. No connection is made here."""
        self._caller = Caller(path, connect_timeout=connect_timeout)
        self._starts = Starts()

    async def connect(self, *, timeout: float | None = None) -> int:
        """Make sure there is a link; answers the agent's protocol generation.

        Keeps knocking until the agent answers, so it may be called before the guest has booted; only
        the socket has to be there.
        """
        return (await self._caller.connect(timeout)).generation

    @property
    def connected(self) -> bool:
        """Whether there is a link now; it may be lost the next moment."""
        return self._caller.link is not None

    def stand_still(self, still: bool) -> None:
        """The machine was stopped (true), or goes on. The silence of one that stands still ends no call that was under
        way when it stopped, and what a call has waited then is not counted."""
        if (link := self._caller.link) is not None:
            link.stand_still(still)

    async def wait_lost(self) -> None:
        """Return when the present link ends; at once if there is none."""
        if (link := self._caller.link) is not None:
            await link.wait_closed()

    async def aclose(self) -> None:
        """End the link for good. May be called twice."""
        await self._caller.aclose()

    # --- machine

    async def info(self, *, timeout: float = CALL_SECONDS) -> AgentInfo:
        """What the agent says about itself and its machine."""
        return decode.agent_info(await self._caller.call("GET", "/v1/info", _MACHINE, timeout=timeout))

    async def usage(self, *, timeout: float = CALL_SECONDS) -> Usage:
        """Processor, memory and disk in use."""
        return decode.usage(await self._caller.call("GET", "/v1/usage", _MACHINE, timeout=timeout))

    async def renew(self, request: RenewRequest, *, timeout: float = CALL_SECONDS) -> RenewResult:
        """Give a restored machine its own entropy, time, names and disk size."""
        body: dict[str, Any] = {}
        if request.entropy is not None:
            body["entropy"] = base64.b64encode(request.entropy).decode()
        if request.hostname is not None:
            body["hostname"] = request.hostname
        if request.machine_id is not None:
            body["machine_id"] = request.machine_id
        if request.ca_pem is not None:
            body["ca_pem"] = request.ca_pem
        if request.grow_disk:
            body["grow_disk"] = True
        if request.warm:
            body["warm"] = True
        if request.thaw:
            body["thaw"] = True
        if request.network is not None:
            body["network"] = asdict(request.network)
        if request.time_now:
            await self._caller.connect(min(timeout, self._caller.connect_timeout))
            body["time_ns"] = time.time_ns()
        elif request.time_ns is not None:
            body["time_ns"] = request.time_ns
        answer = await self._caller.call("POST", "/v1/renew", _MACHINE, json_body=body, timeout=timeout)
        return decode.renew_result(answer)

    async def quiesce(self, *, timeout: float = 120.0) -> None:
        """Write everything in the guest's caches to its disk; the default allows for a slow one."""
        await self._caller.call("POST", "/v1/quiesce", _MACHINE, timeout=timeout)

    async def freeze(
        self, disk: bool = False, timeout_ms: int = 10_000, *, timeout: float = CALL_SECONDS
    ) -> Mapping[str, float]:
        """Make all commands stand still, and with `disk` the file system, so that the machine can be copied.

        The agent thaws by itself when the guest has run for `timeout_ms`. Until the thaw a lost link
        cancels no command, and none is started: calls that would start one wait. Answers the
        milliseconds of each step. Raises `guest.exhausted` when it is not possible in time; then, and
        after any other error answer, the machine is as before.
        """
        body = {"disk": disk, "timeout_ms": timeout_ms}
        return decode.steps(await self._caller.call("POST", "/v1/freeze", _MACHINE, json_body=body, timeout=timeout))

    async def thaw(self, keep: bool, *, timeout: float = CALL_SECONDS) -> None:
        """Undo `freeze`; fine when there is nothing to undo.

        `keep`: attached commands whose link was lost meanwhile go on, without a reader, and `execs` and
        `exec_kill` know them; otherwise they are killed.
        """
        await self._caller.call("POST", "/v1/thaw", _MACHINE, json_body={"keep": keep}, timeout=timeout)

    async def shutdown(self, grace_ms: int = 5000, *, timeout: float = CALL_SECONDS) -> None:
        """Ask the machine to power off; returns when the agent has agreed, not when it is off."""
        body = {"grace_ms": grace_ms}
        await self._caller.call("POST", "/v1/shutdown", _MACHINE, json_body=body, timeout=timeout)

    # --- ports

    async def ports(self, *, timeout: float = CALL_SECONDS) -> list[ListeningPort]:
        """The TCP sockets that listen in the guest, by port."""
        return decode.ports(await self._caller.call("GET", "/v1/ports", _MACHINE, timeout=timeout))

    async def tunnel(self, port: int, *, timeout: float = CALL_SECONDS) -> GuestTunnel:
        """A connection to a TCP port of the guest, made by its agent. Raises `port.closed`, `port.timeout`."""
        return await open_tunnel(self._caller, port, timeout)

    # --- exec

    def exec(
        self, request: ExecRequest, *, timeout: float = CALL_SECONDS, idle_timeout: float = IDLE_SECONDS
    ) -> ExecCall:
        """Run a command; see `ExecCall`. `timeout` is for its start, when it is its turn to be started (`Starts`, which
        raises `sandbox.busy`), `request.timeout_ms` for its run."""
        ctx = CallContext("exec", user=request.user, cwd=request.cwd, exec_id=request.id)

        async def start() -> Response:
            body = _exec_body(request)
            async with self._starts.turn():
                return await self._caller.open_json("POST", "/v1/exec", ctx, json_body=body, timeout=timeout)

        kill = (lambda: self.exec_kill(request.id)) if request.detach else None
        return ExecCall(start, kill, attached=True, idle_timeout=idle_timeout)

    def exec_output(
        self,
        exec_id: str,
        from_offset: int = 0,
        stream: str | None = None,
        *,
        timeout: float = CALL_SECONDS,
        idle_timeout: float = IDLE_SECONDS,
    ) -> ExecCall:
        """Follow the output of a detached command from an offset to its exit: of both streams, or of one alone, whose
        own bytes are then counted."""
        path = exec_path(exec_id) + "/output"
        query = (("from", str(from_offset)), *((("stream", stream),) if stream else ()))

        async def start() -> Response:
            ctx = CallContext("exec", exec_id=exec_id)
            return await self._caller.open("GET", path, ctx, query=query, timeout=timeout)

        return ExecCall(start, lambda: self.exec_kill(exec_id), attached=False, idle_timeout=idle_timeout)

    async def execs(self, *, timeout: float = CALL_SECONDS) -> list[ExecInfo]:
        """Running commands of both kinds, and detached ones that have ended and are still known."""
        ctx = CallContext("exec")
        answer = await self._caller.call("GET", "/v1/exec", ctx, timeout=timeout, limit=_EXECS_BYTES)
        return decode.exec_list(answer)

    async def exec_info(self, exec_id: str, *, timeout: float = CALL_SECONDS) -> ExecInfo:
        """One command. Raises `exec.not_found`."""
        ctx = CallContext("exec", exec_id=exec_id)
        return decode.exec_info(await self._caller.call("GET", exec_path(exec_id), ctx, timeout=timeout))

    async def exec_kill(self, exec_id: str, *, timeout: float = CALL_SECONDS) -> None:
        """Kill a command with all its processes; fine when it has ended. Raises `exec.not_found`."""
        ctx = CallContext("exec", exec_id=exec_id)
        await self._caller.call("DELETE", exec_path(exec_id), ctx, timeout=timeout)


_PLAIN: Final = (
    *("cwd", "user", "timeout_ms", "detach", "max_output", "kill_on_limit"),
    *("record_bytes", "linger_ms", "tag", "tools", "on_lost"),
)


def _exec_body(request: ExecRequest) -> dict[str, Any]:
    if not is_exec_id(request.id):
        raise ClocheError("request.invalid", "The id of an exec is [a-z0-9][a-z0-9-]{0,63}.")
    login = request.pty is not None and request.argv is None and request.shell is None
    if (request.argv is None) == (request.shell is None) and not login:
        raise ClocheError("request.invalid", "Exactly one of `argv` and `shell` has to be given.")
    body: dict[str, Any] = {"id": request.id}
    if request.argv is not None:
        body["argv"] = list(request.argv)
    elif request.shell is not None:
        body["shell"] = request.shell
    if request.env:
        body["env"] = dict(request.env)
    if request.stdin is not None:
        body["stdin_b64"] = base64.b64encode(request.stdin).decode()
    if request.rlimits:
        body["rlimits"] = dict(request.rlimits)
    if request.keep_stdin:
        body["stdin"] = "pipe"
    if request.pty is not None:
        body["pty"] = {"cols": request.pty[0], "rows": request.pty[1]}
    for name in _PLAIN:
        if value := getattr(request, name):
            body[name] = value
    return body
