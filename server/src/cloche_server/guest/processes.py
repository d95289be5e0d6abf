"""Calls of the agent about detached commands and about all that runs (docs/agent-protocol.md §3.6)."""

from __future__ import annotations

import re
from typing import Final

from ..core.errors import ClocheError
from . import decode
from .caller import CALL_SECONDS, Caller
from .errors import CallContext
from .feed import IN_FLIGHT, GuestFeed
from .types import ExecInfo, Execs, GuestProcess, Written

#: Bytes that one write may carry.
WRITE_MAX: Final = 256 * 1024
_EXEC_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}", re.ASCII)
_LIST_BYTES: Final = 4 * 1024 * 1024


def is_exec_id(text: str) -> bool:
    return _EXEC_ID.fullmatch(text) is not None


def exec_path(exec_id: str) -> str:
    # An id of another form can't exist, and must not become part of a path.
    if not is_exec_id(exec_id):
        raise ClocheError("exec.not_found", "There is no exec with this id: it is not a valid one.")
    return "/v1/exec/" + exec_id


def _path(process_id: str) -> str:
    if not is_exec_id(process_id):
        raise ClocheError("process.not_found", "There is no process with this id: it is not a valid one.")
    return "/v1/exec/" + process_id


class ProcessCalls:
    """The methods of `GuestClient` about processes. Errors: `process.not_found`, `process.ended` where it has to run,
    and those of every call. `timeout` is in seconds everywhere."""

    _caller: Caller

    async def all_execs(self, *, timeout: float = CALL_SECONDS) -> Execs:
        """As `execs`, with the start of the machine that they belong to."""
        ctx = CallContext("process")
        return decode.execs(await self._caller.call("GET", "/v1/exec", ctx, timeout=timeout, limit=_LIST_BYTES))

    async def process_wait(self, process_id: str, seconds: float, *, timeout: float = CALL_SECONDS) -> ExecInfo:
        """What is known of a process, once it has ended or after so long."""
        ctx = CallContext("process", exec_id=process_id)
        query = (("timeout_ms", str(round(seconds * 1000))),)
        path = _path(process_id) + "/wait"
        answer = await self._caller.call("GET", path, ctx, query=query, timeout=timeout + seconds)
        return decode.exec_info(answer)

    async def process_write(
        self, process_id: str, data: bytes, seconds: float, *, close: bool = False, timeout: float = CALL_SECONDS
    ) -> Written:
        """Write at most `WRITE_MAX` bytes to its input, for at most so long; `close` ends the input behind them if all
        were taken. Raises `process.no_input`."""
        ctx = CallContext("process", exec_id=process_id)
        query = [("timeout_ms", str(round(seconds * 1000)))]
        if close:
            query.append(("close", "1"))
        path = _path(process_id) + "/stdin"
        response = await self._caller.open("POST", path, ctx, query=query, body=data, timeout=timeout + seconds)
        return decode.written(await self._caller.read_json(response, timeout=timeout), len(data))

    async def process_feed(self, process_id: str, *, most: int = IN_FLIGHT, timeout: float = CALL_SECONDS) -> GuestFeed:
        """Its input, for as long as there is any; the end of a feed is that of the input, but of a terminal's. `most`:
        bytes that may be under way. Raises `process.no_input`."""
        ctx = CallContext("process", exec_id=process_id)
        path = _path(process_id) + "/feed"
        return GuestFeed(*await self._caller.duplex(path, ctx, query=(), most=most, timeout=timeout))

    async def process_signal(
        self, process_id: str, signal: str | int, target: str, *, timeout: float = CALL_SECONDS
    ) -> None:
        """`target`: process, group or tree."""
        ctx = CallContext("process", exec_id=process_id)
        body = {"signal": signal, "target": target}
        await self._caller.call("POST", _path(process_id) + "/signal", ctx, json_body=body, timeout=timeout)

    async def process_resize(self, process_id: str, cols: int, rows: int, *, timeout: float = CALL_SECONDS) -> None:
        """Give its terminal another size. Raises `process.no_terminal`."""
        ctx = CallContext("process", exec_id=process_id)
        body = {"cols": cols, "rows": rows}
        await self._caller.call("POST", _path(process_id) + "/resize", ctx, json_body=body, timeout=timeout)

    async def process_forget(self, process_id: str, *, timeout: float = CALL_SECONDS) -> None:
        """Kill it with all its processes, and have nothing of it kept."""
        ctx = CallContext("process", exec_id=process_id)
        await self._caller.call("DELETE", _path(process_id), ctx, query=(("forget", "1"),), timeout=timeout)

    async def guest_processes(self, *, timeout: float = CALL_SECONDS) -> tuple[list[GuestProcess], bool]:
        """All processes of the guest, and whether there are more than are told."""
        ctx = CallContext("process")
        answer = await self._caller.call("GET", "/v1/processes", ctx, timeout=timeout, limit=_LIST_BYTES)
        return decode.processes(answer)
