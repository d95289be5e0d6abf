"""Unix sockets of the guest, and listeners that its agent opens for the host."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from .caller import CALL_SECONDS, Caller
from .errors import CallContext, protocol_error
from .fields import Fields
from .h2stream import Response
from .lines import json_lines
from .streams import IDLE_SECONDS
from .tunnel import IN_FLIGHT, GuestTunnel

#: Bytes of an identifier, and of an address, that an honest agent stays below.
_ID_MAX: Final = 32
_HOST_MAX: Final = 64
#: Lines of other kinds between two connections.
_OTHERS: Final = 1000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A connection that has come to a listener; `host` and `port` are those it comes from, empty for a Unix socket. The
    agent keeps it for 30 seconds."""

    id: str
    host: str
    port: int


class GuestListener:
    """Takes connections inside the guest until it is closed. `port`: of a Unix socket 0."""

    def __init__(self, port: int, response: Response, lines: AsyncGenerator[Fields, None]) -> None:
        self.port = port
        self._response = response
        self._lines = lines

    async def next(self) -> Arrival:
        """The next connection. Raises `sandbox.unreachable` and its like when there will be none any more."""
        others = 0
        async for f in self._lines:
            if f.text("type", 16) != "accepted":
                others += 1
                if others > _OTHERS:
                    raise protocol_error("a listener that tells of anything but connections")
                continue  # of a newer agent
            found = f.text("id", _ID_MAX)
            if not (found.isascii() and found.isalnum()):
                raise protocol_error("a connection with an impossible identifier")
            host = f.opt_text("from", _HOST_MAX) or ""
            return Arrival(found, host if _is_address(host) else "", f.opt_integer("from_port", 0, 65535) or 0)
        raise protocol_error("a listener without an end")

    def close(self) -> None:
        """It listens no more, and what nobody has taken is cut. May be called twice."""
        self._response.close()


class SocketCalls:
    """The methods of `GuestClient` about such sockets. `user`: whose permissions count, root without one."""

    _caller: Caller

    async def unix_tunnel(self, path: str, user: str | None, *, timeout: float = CALL_SECONDS) -> GuestTunnel:
        """A connection to a Unix socket. Raises `file.not_found`, `file.permission_denied`, `port.closed`,
        `port.timeout`."""
        ctx = CallContext("socket", path=path, user=user)
        query = [("path", quote(path, safe="/")), *_as(user)]
        made = await self._caller.duplex("/v1/unix", ctx, query=query, most=IN_FLIGHT, timeout=timeout)
        return GuestTunnel(self._caller, *made)

    async def listen_port(self, port: int, user: str | None, *, timeout: float = CALL_SECONDS) -> GuestListener:
        """Listens on a port of loopback; 0 is any. Raises `port.in_use`, `file.permission_denied`."""
        ctx = CallContext("port", port=port, user=user)
        return await self._listen(("port", str(port)), ctx, timeout)

    async def listen_unix(self, path: str, user: str | None, *, timeout: float = CALL_SECONDS) -> GuestListener:
        """Makes a Unix socket that only this user may connect to, and removes it at the end. Raises `file.exists`,
        `file.not_found`, `file.permission_denied`."""
        return await self._listen(("path", path), CallContext("socket", path=path, user=user), timeout)

    async def _listen(self, where: tuple[str, str], ctx: CallContext, timeout: float) -> GuestListener:
        query = [where, *([("user", ctx.user)] if ctx.user else [])]
        response = await self._caller.open("POST", "/v1/listen", ctx, query=query, timeout=timeout)
        lines = json_lines(response, IDLE_SECONDS)
        try:
            first = await anext(lines, None)
            if first is None or first.text("type", 16) != "listening":
                raise protocol_error("a listener that does not listen")
            port = first.opt_integer("port", 0, 65535) or 0
            if where[0] == "port" and (not port or where[1] not in ("0", str(port))):
                raise protocol_error("a listener on another port")
        except BaseException:
            response.close()
            raise
        return GuestListener(port, response, lines)

    async def accept(self, arrival: Arrival, *, timeout: float = CALL_SECONDS) -> GuestTunnel:
        """Takes a connection that has come. Raises `port.closed` when it waits no more."""
        ctx = CallContext("arrival")
        query = [("id", arrival.id)]
        made = await self._caller.duplex("/v1/accept", ctx, query=query, most=IN_FLIGHT, timeout=timeout)
        return GuestTunnel(self._caller, *made)


def _is_address(text: str) -> bool:
    """It goes to the client, which may show it."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _as(user: str | None) -> list[tuple[str, str]]:
    return [("user", quote(user, safe=""))] if user else []
