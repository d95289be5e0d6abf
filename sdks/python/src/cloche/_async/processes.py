"""Processes: started, and found again; signals, input and output of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from .. import _call, _wire, _wire_processes
from .._call import SILENCE, Call
from ..errors import ConflictError, WaitTimeout
from ..processes import ProcessInfo, ProcessTable
from .execution import AsyncExecStream
from .transport import AsyncTransport

#: Bytes of one write, and how long the server waits for the process to take them (seconds).
PIECE = 1024 * 1024
WRITE_SECONDS = 20
#: One question for the end of a process (seconds).
WAIT_PIECE = 20.0

Target = Literal["process", "group", "tree"]


class AsyncProcess:
    """A process in a sandbox. It goes on when the connection or this program ends. `info` is what was said last."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str, info: ProcessInfo) -> None:
        self.info = info
        self.process_id = info.process_id
        self._transport = transport
        self._path = _call.path("sandboxes", sandbox_id, "processes", info.process_id)

    @property
    def pid(self) -> int:
        """Its number in the sandbox."""
        return self.info.pid

    async def refresh(self) -> ProcessInfo:
        """How it is doing now."""
        return await self._ask(Call("GET", self._path, kind="safe"))

    async def wait(self, timeout: float | None = None) -> ProcessInfo:
        """Wait for the end. After `timeout` seconds `WaitTimeout` is raised and the process goes on."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT_PIECE if deadline is None else min(WAIT_PIECE, max(0.0, deadline - time.monotonic()))
            query = _call.params(timeout=left)
            info = await self._ask(Call("GET", f"{self._path}/wait", params=query, kind="safe", silence=SILENCE))
            if not info.running:
                return info
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"the process still runs after {timeout:g} s")

    async def _ask(self, call: Call) -> ProcessInfo:
        self.info = _wire_processes.process(_wire.record(await self._transport.json(call)))
        return self.info

    async def signal(self, signal: str | int, target: Target = "process") -> None:
        """Send a signal, by name or number: to the process, to its group, or to all that descends from it."""
        body = {"signal": signal, "target": target}
        await self._transport.json(Call("POST", f"{self._path}/signal", json=body))

    async def kill(self) -> None:
        """Kill it with all its processes. It is remembered; `delete` forgets it too."""
        await self.signal("KILL", "tree")

    async def delete(self) -> None:
        """Kill it with all its processes, and forget it."""
        await self._transport.json(Call("DELETE", self._path))

    async def write(self, data: bytes | str, *, timeout: float | None = None) -> None:
        """Write to its input, all of it, however slowly the process reads.

        `WaitTimeout`: not all was taken after `timeout` seconds. `ConflictError`: it takes no more.
        """
        rest = memoryview(data.encode() if isinstance(data, str) else bytes(data))
        deadline = None if timeout is None else time.monotonic() + timeout
        while rest:
            left = WRITE_SECONDS if deadline is None else max(0.0, min(WRITE_SECONDS, deadline - time.monotonic()))
            call = Call(
                "POST",
                f"{self._path}/stdin",
                params=_call.params(timeout=left),
                content=bytes(rest[:PIECE]),
                silence=SILENCE,
            )
            done = _wire_processes.written(await self._transport.json(call))
            rest = rest[done.bytes :]
            if rest and done.closed:
                raise ConflictError(f"the process takes no more input; {len(rest)} bytes were not written")
            if rest and deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"the process has not taken {len(rest)} bytes within {timeout:g} s")

    async def close_stdin(self) -> None:
        """End its input. A terminal has no such end: write `b"\\x04"` to it."""
        await self._transport.json(Call("DELETE", f"{self._path}/stdin"))

    async def resize(self, cols: int, rows: int) -> None:
        """Give its terminal another size."""
        await self._transport.json(Call("POST", f"{self._path}/resize", json={"cols": cols, "rows": rows}))

    def output(
        self,
        from_offset: int = 0,
        *,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
    ) -> AsyncExecStream[str]:
        """The events from an output offset on, up to the end of the process: any number of readers may do so.

        A broken connection is taken up again where it broke. What the server no longer keeps is told as `Gap`.
        """
        call = self._output_call(from_offset)
        return AsyncExecStream(
            self._transport, call, on_stdout=on_stdout, on_stderr=on_stderr, resume=True, as_text=True
        )

    def output_bytes(self, from_offset: int = 0) -> AsyncExecStream[bytes]:
        """As `output`, with the output as the bytes it is."""
        return AsyncExecStream(self._transport, self._output_call(from_offset), resume=True)

    def _output_call(self, from_offset: int) -> Call:
        return Call(
            "GET",
            f"{self._path}/output",
            params={"from": str(from_offset), "encoding": "base64"},
            kind="safe",
            silence=SILENCE,
            exec_id=self.process_id,
            encoding="base64",
            accept="text/event-stream",
        )

    async def recorded(self, stream: Literal["stdout", "stderr"] | None = None, from_offset: int = 0) -> bytes:
        """What it has written so far, as far as that is kept: of both streams in their order, or of one."""
        query = _call.params(follow=False, stream=stream) | {"from": str(from_offset)}
        accept = "application/octet-stream"
        call = Call("GET", f"{self._path}/output", params=query, kind="safe", silence=SILENCE, accept=accept)
        return await self._transport.content(call)

    def __repr__(self) -> str:
        return f"AsyncProcess({self.process_id!r}, pid={self.pid}, status={self.info.status!r})"


class AsyncProcesses:
    """`sandbox.processes`."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._path = _call.path("sandboxes", sandbox_id, "processes")

    async def start(
        self,
        command: str | Sequence[str] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: Literal["none", "pipe"] | None = None,
        pty: tuple[int, int] | None = None,
        timeout: float | None = None,
        rlimits: Mapping[str, int] | None = None,
        name: str | None = None,
        buffer_kb: int | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncProcess:
        """Start a process and return at once; it runs until it ends or is killed.

        `command`: text for the shell, or program and arguments; with a terminal none means the login shell.
        `pty`: a terminal of so many columns and rows. `timeout`: killed after so many seconds. `buffer_kb`: output that
        is kept. With the `idempotency_key` of an earlier call with the same arguments, that call's process is returned.
        """
        words = command if command is None or isinstance(command, str) else [str(word) for word in command]
        body = _wire.given(command=words, cwd=cwd, user=user, stdin=stdin, timeout_seconds=timeout, name=name)
        body |= _wire.given(env=dict(env or {}) or None, rlimits=dict(rlimits or {}) or None, buffer_kb=buffer_kb)
        if pty is not None:
            body["pty"] = {"cols": pty[0], "rows": pty[1]}
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        data = await self._transport.json(Call("POST", self._path, json=body, headers=headers, silence=SILENCE))
        return self._handle(_wire_processes.process(_wire.record(data)))

    async def list(self) -> Sequence[AsyncProcess]:
        """Those that run, those that have ended and are remembered, and those that are lost, oldest first."""
        data = await self._transport.json(Call("GET", self._path, kind="safe"))
        return [self._handle(info) for info in _wire_processes.table(data).processes]

    async def table(self) -> ProcessTable:
        """Everything that runs in the sandbox."""
        data = await self._transport.json(Call("GET", self._path, params=_call.params(all=True), kind="safe"))
        return _wire_processes.table(data)

    async def get(self, process: str | int) -> AsyncProcess:
        """A process by its id, or by the number of one that runs."""
        call = Call("GET", _call.path("sandboxes", self._sandbox_id, "processes", str(process)), kind="safe")
        return self._handle(_wire_processes.process(_wire.record(await self._transport.json(call))))

    def _handle(self, info: ProcessInfo) -> AsyncProcess:
        return AsyncProcess(self._transport, self._sandbox_id, info)
