"""A sandbox: make it, find it, run commands in it, end it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, AnyStr, Literal, Self, Unpack

from .. import _aio, _call, _wire, _wire_network, _wire_services, _wire_usage
from .._call import SILENCE, SLOW, Call
from .._wire import ExecOptions
from ..errors import ClocheError, SandboxNotFound
from ..models import ExecInfo, ExecResult, Isolation, Load, SandboxInfo
from ..network import NetworkPolicy
from ..services import ServiceDefinition
from ..usage import Budget, Usage
from .client import AsyncClient, transport_for
from .code import AsyncCode
from .execution import AsyncExec, AsyncExecStream, collect
from .files import AsyncFiles
from .git import AsyncGit
from .life import AsyncLife, IdleAction
from .network import AsyncNetwork
from .ports import AsyncPorts
from .processes import AsyncProcesses
from .services import AsyncServices
from .snapshot import AsyncSnapshot
from .terminal import AsyncTerminal
from .transport import AsyncTransport

Execs = list[ExecInfo]
Command = str | Sequence[str]

#: An orderly end may wait this long for the server even while the program is being interrupted.
KILL_SECONDS = 15.0


class AsyncSandbox(AsyncLife, AsyncNetwork, AsyncPorts, AsyncCode):
    """A sandbox. `info` is what the server said last; `refresh` asks again.

    As a context manager it is killed at the end of the block. An object of this class holds no connection
    and needs no closing.
    """

    def __init__(self, transport: AsyncTransport, info: SandboxInfo) -> None:
        """Not for direct use: `create`, `connect` and `list` make sandboxes."""
        super().__init__(transport, info)
        self.files = AsyncFiles(transport, info.id)
        self.processes = AsyncProcesses(transport, info.id)
        self.services = AsyncServices(transport, info.id)
        self.git = AsyncGit(transport, info.id)

    def terminal(
        self,
        cols: int | None = None,
        rows: int | None = None,
        *,
        process: str | None = None,
        from_offset: int | None = None,
        linger_seconds: int | None = None,
    ) -> AsyncTerminal:
        """A login shell at a terminal, or the terminal of a `process` that runs, with its output from an offset on.

        The shell ends when nobody has been at it for `linger_seconds` (default: the server's).
        """
        query = _call.params(cols=cols, rows=rows, process=process, linger_seconds=linger_seconds)
        if from_offset is not None:
            query["from"] = str(from_offset)
        return AsyncTerminal(self._transport, self.id, query)

    # --- make and find

    @classmethod
    async def create(
        cls,
        template: str = "base",
        *,
        name: str | None = None,
        if_exists: Literal["error", "connect", "replace"] | None = None,
        from_snapshot: str | AsyncSnapshot | None = None,
        cpus: int | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        ttl_seconds: int | None = None,
        persistent: bool | None = None,
        idle_seconds: int | None = None,
        idle_action: IdleAction | None = None,
        max_lifetime_seconds: int | None = None,
        budget: Budget | Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        minimum_boundary: Literal["any", "microvm", "microvm-kvm"] | None = None,
        network: NetworkPolicy | Mapping[str, Any] | str | None = None,
        network_group: str | None = None,
        secrets: Sequence[Mapping[str, Any]] | None = None,
        services: Sequence[ServiceDefinition | Mapping[str, Any]] | None = None,
        wait_for_services: float | None = None,
        idempotency_key: str | None = None,
        client: AsyncClient | None = None,
        api_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Make a sandbox; it is ready for commands when this returns.

        `name` is unique among the living; when it is in use, `if_exists` decides: `"error"` raises `NameTaken`,
        `"connect"` returns the sandbox that has it, awake and otherwise as it is, `"replace"` deletes that one first.
        `from_snapshot`: it goes on from there; template and sizes are the snapshot's. `ttl_seconds`: it is deleted
        that long after its creation (0: never). `idle_seconds`: after so long without activity, `idle_action`
        (`"hibernate"` unless given). `max_lifetime_seconds`: its end that no renewal, resume or start moves (0: none).
        `budget`: what it may use, see `Budget`. `env`, `cwd`, `user`: defaults for every command.
        `minimum_boundary="microvm-kvm"` refuses software emulation. `network`: what it may reach, or a mode alone.
        `network_group`: it and the workspace's other sandboxes of the same one reach each other by name. `secrets`:
        grants of secrets of the workspace, with `secret`, `hosts` and `env` at least. `services` that it keeps running;
        with `wait_for_services` it returns when they are well, or after so many seconds. Without room it is tried again
        for `max_retry_seconds`, then `CapacityError`. The `idempotency_key` of an earlier equal call gives its sandbox.
        """
        transport = transport_for(client, api_url, api_key, timeout)
        origin = from_snapshot.id if isinstance(from_snapshot, AsyncSnapshot) else from_snapshot
        body = _wire.given(template=template if origin is None else None, from_snapshot=origin)
        body |= _wire.given(name=name, if_exists=if_exists, cpus=cpus, memory_mb=memory_mb, disk_mb=disk_mb)
        body |= _wire.given(ttl_seconds=ttl_seconds, persistent=persistent, idle_seconds=idle_seconds)
        body |= _wire.given(metadata=dict(metadata or {}) or None, env=dict(env or {}) or None, cwd=cwd, user=user)
        body |= _wire.given(minimum_boundary=minimum_boundary, max_lifetime_seconds=max_lifetime_seconds)
        body |= _wire_services.of_create(services, wait_for_services) | _wire.given(idle_action=idle_action)
        body |= _wire.given(budget=_wire_usage.budget_body(budget), network_group=network_group)
        body |= _wire.given(network=_wire_network.policy_body(network), secrets=_wire_network.grants_body(secrets))
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        silence = SLOW + (wait_for_services or 0)
        call = Call("POST", _call.path("sandboxes"), json=body, headers=headers, kind="create", silence=silence)
        return cls(transport, _wire.sandbox_info(_wire.record(await transport.json(call))))

    @classmethod
    async def connect(
        cls,
        sandbox_id: str,
        *,
        client: AsyncClient | None = None,
        api_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Find a sandbox by its id. Nothing about it changes, its remaining time included."""
        transport = transport_for(client, api_url, api_key, timeout)
        call = Call("GET", _call.path("sandboxes", sandbox_id), kind="safe")
        return cls(transport, _wire.sandbox_info(_wire.record(await transport.json(call))))

    @classmethod
    async def list(
        cls,
        *,
        metadata: Mapping[str, str] | None = None,
        name: str | None = None,
        status: str | None = None,
        network_group: str | None = None,
        limit: int | None = None,
        after: str | None = None,
        client: AsyncClient | None = None,
        api_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> Sequence[Self]:
        """Sandboxes, oldest first; with `metadata` those that carry all of these values."""
        transport = transport_for(client, api_url, api_key, timeout)
        query = {f"metadata.{key}": value for key, value in (metadata or {}).items()}
        query |= _call.params(name=name, status=status, network_group=network_group, limit=limit, after=after)
        data = await transport.json(Call("GET", _call.path("sandboxes"), params=query, kind="safe"))
        return [cls(transport, _wire.sandbox_info(item)) for item in _wire.records(data)]

    # --- what it is

    @property
    def id(self) -> str:
        """The id."""
        return self.info.id

    @property
    def name(self) -> str | None:
        """The name, where it has one."""
        return self.info.name

    @property
    def status(self) -> str:
        """The status when the server was last asked; see `refresh`."""
        return self.info.status

    @property
    def template(self) -> str:
        """The template that was really used."""
        return self.info.template_resolved

    @property
    def isolation(self) -> Isolation:
        """The boundary around it."""
        return self.info.isolation

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata when the server was last asked."""
        return self.info.metadata

    # --- commands

    async def exec(
        self,
        cmd: Command,
        *,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult[str]:
        """Run a command and wait for it. A string goes to the login shell, a list is run as it is.

        A command that fails is a result (see `ExecResult.check`); one that runs into `timeout` raises
        `CommandTimeout` with the output so far. With a callback the output is also handed over as it comes.

        Options: `env`, `cwd`, `user`; `stdin` (without it, the command reads an empty input); `timeout` in
        seconds; `max_output_bytes` for each stream, and `on_output_limit`, `"truncate"` or `"kill"`;
        `detach=True` to let the command go on when the connection breaks (see `attach`).
        """
        if on_stdout is None and on_stderr is None:
            return await self._exec(cmd, "utf-8", options)
        stream = self.exec_stream(cmd, on_stdout=on_stdout, on_stderr=on_stderr, **options)
        return await collect(stream, options.get("max_output_bytes"))

    async def exec_bytes(self, cmd: Command, **options: Unpack[ExecOptions]) -> ExecResult[bytes]:
        """As `exec`, with the output as the bytes it is."""
        return await self._exec(cmd, "base64", options)

    def exec_stream(
        self,
        cmd: Command,
        *,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        **options: Unpack[ExecOptions],
    ) -> AsyncExecStream[str]:
        """Run a command and iterate over its events as they come. The command starts with the iteration."""
        return self._stream(cmd, "utf-8", on_stdout, on_stderr, options)

    def exec_stream_bytes(
        self,
        cmd: Command,
        *,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        **options: Unpack[ExecOptions],
    ) -> AsyncExecStream[bytes]:
        """As `exec_stream`, with the output as the bytes it is."""
        return self._stream(cmd, "base64", on_stdout, on_stderr, options)

    async def start(self, cmd: Command, **options: Unpack[ExecOptions]) -> AsyncExec:
        """Start a command in the background."""
        exec_id = uuid.uuid4().hex
        options["detach"] = True
        body = _wire.exec_body(cmd, "utf-8", exec_id, **options)
        call = Call("POST", f"{self._path}/exec", json={**body, "background": True}, exec_id=exec_id)
        data = _wire.record(await self._transport.json(call))
        return AsyncExec(self._transport, self.id, str(data.get("exec_id") or exec_id), data.get("pid"))

    def attach(self, exec_id: str) -> AsyncExec:
        """The handle of a command by its id, without asking the server."""
        return AsyncExec(self._transport, self.id, exec_id)

    async def execs(self) -> Execs:
        """The commands that run, and the finished ones that the server still knows."""
        data = await self._transport.json(Call("GET", f"{self._path}/exec", kind="safe"))
        return [_wire.exec_info(item) for item in _wire.records(_wire.record(data).get("execs"))]

    async def _exec(self, cmd: Command, encoding: _wire.Output, options: ExecOptions) -> ExecResult[Any]:
        exec_id = uuid.uuid4().hex
        body = {**_wire.exec_body(cmd, encoding, exec_id, **options), "keepalive": True}
        call = Call("POST", f"{self._path}/exec", json=body, silence=SILENCE, exec_id=exec_id, encoding=encoding)
        return _wire.exec_result(_wire.record(await self._transport.json(call)), encoding)

    def _stream(
        self,
        cmd: Command,
        encoding: _wire.Output,
        on_stdout: Callable[[AnyStr], object] | None,
        on_stderr: Callable[[AnyStr], object] | None,
        options: ExecOptions,
    ) -> AsyncExecStream[AnyStr]:
        exec_id = uuid.uuid4().hex
        call = Call(
            "POST",
            f"{self._path}/exec/stream",
            json=_wire.exec_body(cmd, encoding, exec_id, **options),
            silence=SILENCE,
            exec_id=exec_id,
            encoding=encoding,
            accept="text/event-stream",
        )
        return AsyncExecStream(self._transport, call, on_stdout=on_stdout, on_stderr=on_stderr)

    # --- what it uses, and its end

    async def usage(self) -> Usage:
        """What it has used since its creation; also after its end, for as long as the server keeps it."""
        data = await self._transport.json(Call("GET", f"{self._path}/usage", kind="safe"))
        return _wire_usage.usage(_wire.record(data))

    async def load(self) -> Load:
        """What runs in it now. This wakes it."""
        data = await self._transport.json(Call("GET", f"{self._path}/load", kind="safe"))
        return _wire.load(_wire.record(data))

    async def logs(self, tail: int | None = None, *, source: str | None = None) -> str:
        """The console; with `tail` its last lines. `source`: `agent`, `process:<id>` or `service:<name>` instead."""
        query = _call.params(tail=tail, source=source)
        call = Call("GET", f"{self._path}/logs", params=query, kind="safe", accept="text/plain")
        return (await self._transport.content(call)).decode("utf-8", "replace")

    async def kill(self) -> None:
        """End and delete it. One that is gone already is fine."""
        try:
            # Deleting twice is deleting once: this may be repeated like a call that changes nothing.
            await self._transport.json(Call("DELETE", self._path, kind="safe"))
        except SandboxNotFound:
            return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with _aio.shielded(KILL_SECONDS):
                await self.kill()
        except ClocheError as failure:
            if error is None:
                raise
            error.add_note(f"sandbox {self.id} could not be killed: {failure}")

    def __repr__(self) -> str:
        return f"<AsyncSandbox {self.id} {self.status} {self.template}>"
