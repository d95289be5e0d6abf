"""Terminals over WebSockets. Binary messages are bytes both ways; text messages are JSON about the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from cloche_server.api.context import SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers
from cloche_server.api.errors import error_body
from cloche_server.api.respond import dump, waited
from cloche_server.app.process_output import Chunk, Loss
from cloche_server.app.services import Services
from cloche_server.app.terminal import SSH_GRACE, Terminal, TerminalWish
from cloche_server.core.errors import ClocheError
from cloche_server.core.process import SIZE_MAX, Size

router = APIRouter(tags=["terminal"])

#: The sub-protocol that is chosen when a client offers it beside its token.
PROTOCOL: Final = "cloche.terminal"
_NORMAL: Final = 1000
_FAILED: Final = 1011
_LINGER_MAX: Final = 604_800
#: How long a client that does not read is waited for with the last word (seconds).
_LAST_WORD: Final = 5.0


#: What sending to a client who has hung up ends in.
_BROKEN: Final = (WebSocketDisconnect, RuntimeError, OSError)


class _Gone(Exception):
    """The client has hung up."""


def _number(socket: WebSocket, name: str, low: int, high: int) -> int | None:
    text = socket.query_params.get(name)
    if text is None or text == "":
        return None
    if text.isascii() and text.isdigit() and len(text) <= 19 and low <= int(text) <= high:
        return int(text)
    raise ClocheError("request.invalid", f"{name}: want a whole number from {low} to {high}", details={"field": name})


def _size(socket: WebSocket) -> Size | None:
    cols, rows = (_number(socket, name, 1, SIZE_MAX) for name in ("cols", "rows"))
    return None if cols is None and rows is None else Size(cols or 80, rows or 24)


@router.websocket("/sandboxes/{sandbox_id}/terminal", name="terminal")
async def terminal(socket: WebSocket, sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> None:
    linger = _number(socket, "linger_seconds", 1, _LINGER_MAX) or services.settings.terminal_linger
    process = socket.query_params.get("process") or None
    wish = TerminalWish(_size(socket), linger, process, _number(socket, "from", 0, 2**62))
    await _serve(socket, services, workspace, sandbox_id, wish, greet=True)


@router.websocket("/sandboxes/{sandbox_id}/ssh", name="ssh")
@router.websocket("/sandboxes/{sandbox_id}/exec/pty", name="ssh")
async def ssh(socket: WebSocket, sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace) -> None:
    await _serve(socket, services, workspace, sandbox_id, TerminalWish(_size(socket), SSH_GRACE), greet=False)


Cells = Annotated[int | None, Query(ge=1, le=SIZE_MAX, description="Size of the terminal.")]


def _only_websocket() -> ClocheError:
    return ClocheError("request.invalid", "this is a WebSocket: send `Upgrade: websocket` and speak version 13 of it")


@router.get(
    "/sandboxes/{sandbox_id}/terminal",
    responses={101: {"description": "The WebSocket is open"}, **answers(400, 402, 404, 409, 502, 507)},
    response_class=Response,
    status_code=101,
    name="terminal",
    summary="A terminal in a WebSocket",
)
async def terminal_page(
    sandbox_id: SandboxId,
    services: ServicesDep,
    workspace: Workspace,
    cols: Cells = None,
    rows: Cells = None,
    process: Annotated[str | None, Query(description="A process with a terminal that runs; else a shell.")] = None,
    from_: Annotated[
        int | None, Query(alias="from", ge=0, le=2**62, description="Repeat its output from here.")
    ] = None,
    linger_seconds: Annotated[
        int | None, Query(ge=1, le=_LINGER_MAX, description="How long a new shell lives on without a client.")
    ] = None,
) -> Response:
    """docs/processes.md has the messages. A request that is no WebSocket is refused."""
    await services.access.find(workspace, sandbox_id)
    raise _only_websocket()


@router.get(
    "/sandboxes/{sandbox_id}/ssh",
    responses={101: {"description": "The WebSocket is open"}, **answers(400, 402, 404, 409, 502, 507)},
    response_class=Response,
    status_code=101,
    name="ssh",
    summary="A shell in a WebSocket that ends with its connection",
)
async def ssh_page(
    sandbox_id: SandboxId, services: ServicesDep, workspace: Workspace, cols: Cells = None, rows: Cells = None
) -> Response:
    """The same at `exec/pty`. The shell is hung up on 10 s after its client has gone."""
    await services.access.find(workspace, sandbox_id)
    raise _only_websocket()


async def _serve(
    socket: WebSocket, services: Services, workspace: str, sandbox_id: str, wish: TerminalWish, *, greet: bool
) -> None:
    """What fails before the WebSocket is open is an HTTP answer."""
    opened = await services.terminals.open(workspace, sandbox_id, wish)
    try:
        try:
            await socket.accept(_chosen(socket))
        except _BROKEN as error:
            raise _Gone from error
        if greet:
            await _tell(socket, {"process": opened.process_id, "offset": opened.stream.offset})
        await _run(socket, opened)
    except _Gone:
        pass
    finally:
        await opened.stream.aclose()


def _chosen(socket: WebSocket) -> str | None:
    offered: list[str] = socket.scope.get("subprotocols", [])
    if PROTOCOL in offered:
        return PROTOCOL
    return next((name for name in offered if name.startswith("bearer.")), None)


async def _run(socket: WebSocket, opened: Terminal) -> None:
    down = asyncio.ensure_future(_down(socket, opened))
    up = asyncio.ensure_future(_up(socket, opened))
    try:
        await asyncio.wait(waited(down, up), return_when=asyncio.FIRST_COMPLETED)
        if not down.done():
            up.result()
        code = await down
        # Last, so that a client that prints text prints nothing else after it.
        await _end(socket, {"exit": code}, _NORMAL)
    except ClocheError as error:
        body = error_body(error, socket.scope["cloche.request_id"])
        await _end(socket, {"error": body["error"], "code": body["code"]}, _FAILED)
    except asyncio.CancelledError:
        call = socket.scope.get("cloche.call")
        why = call.ended.message if call is not None and call.ended is not None else "the server is shutting down"
        await _end(socket, {"error": why}, _FAILED)
        raise
    finally:
        for task in (down, up):
            task.cancel()
            with contextlib.suppress(BaseException):
                await task


async def _down(socket: WebSocket, opened: Terminal) -> int:
    """What the terminal shows, until it ends. A client that does not read holds it up, and nothing else."""
    async for item in opened.stream.items():
        if isinstance(item, Chunk):
            await _send(socket, item.data)
        elif isinstance(item, Loss):
            await _tell(socket, {"gap": item.count})
        else:
            return getattr(item, "exit_code", 0)
    return 0


async def _up(socket: WebSocket, opened: Terminal) -> None:
    """What is typed, until the client goes. Nothing more is read while the process does not take it."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise _Gone
        if (data := message.get("bytes")) is None:
            data = await _about(socket, opened, message.get("text") or "")
        if data and not await opened.type(data):
            await _tell(socket, {"error": "the terminal did not take all that was typed"})


async def _about(socket: WebSocket, opened: Terminal, text: str) -> bytes:
    """A text message: a new size, or text that was typed, which is returned."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict) and isinstance(message.get("stdin"), str):
        return str(message["stdin"]).encode("utf-8", "replace")
    size = _asked_size(message)
    if size is None:
        want = f'{{"resize": {{"cols": 1 to {SIZE_MAX}, "rows": 1 to {SIZE_MAX}}}}} or {{"stdin": text}}'
        await _tell(socket, {"error": f"this message is not understood: want {want}"})
    else:
        await opened.resize(size)
    return b""


def _asked_size(message: Any) -> Size | None:
    asked = message.get("resize") if isinstance(message, dict) else None
    if not isinstance(asked, dict):
        return None
    cols, rows = asked.get("cols"), asked.get("rows")
    if type(cols) is int and type(rows) is int and 1 <= cols <= SIZE_MAX and 1 <= rows <= SIZE_MAX:
        return Size(cols, rows)
    return None


async def _send(socket: WebSocket, data: bytes) -> None:
    try:
        await socket.send_bytes(data)
    except _BROKEN as error:
        raise _Gone from error


async def _tell(socket: WebSocket, value: dict[str, Any]) -> None:
    try:
        await socket.send_text(dump(value).decode("ascii"))
    except _BROKEN as error:
        raise _Gone from error


async def _end(socket: WebSocket, last: dict[str, Any], code: int) -> None:
    if socket.application_state is not WebSocketState.CONNECTED:
        return
    with contextlib.suppress(_Gone, *_BROKEN, TimeoutError):
        async with asyncio.timeout(_LAST_WORD):
            await _tell(socket, last)
            await socket.close(code)
