"""What is different with WebSockets: where a token may stand, and how one is refused."""

from __future__ import annotations

from typing import Any, Final

from starlette.types import Message, Receive, Scope, Send

from cloche_server.api.errors import error_response
from cloche_server.api.guards import NO_STORE, SECURITY, Header, bearer
from cloche_server.app.calls import revoked
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import is_token

#: In place of a method, in the log, the metrics and the audit log.
SOCKET: Final = "WEBSOCKET"
_BEARER: Final = "bearer."


def socket_bearer(scope: Scope) -> str:
    """The token of a WebSocket: as of any request, or for pages, which cannot set headers, as the sub-protocol
    `bearer.<token>`. Raises `auth.missing_token`, `auth.invalid_token`."""
    if any(name == b"authorization" for name, _ in scope["headers"]):
        return bearer(scope)
    sent = [name.removeprefix(_BEARER) for name in scope.get("subprotocols", ()) if name.startswith(_BEARER)]
    if not sent:
        return bearer(scope)  # which says what is missing
    if len(sent) > 1 or not is_token(sent[0]):
        raise revoked()
    return str(sent[0])


class SocketAnswer:
    """What is sent on a WebSocket: adds headers to a refusal, and knows how far it has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.more: list[Header] = []
        self.status = 0
        self.location = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "websocket.accept":
            self.status = 101
        elif message["type"] == "websocket.http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.more, *SECURITY, NO_STORE]
        await self._send(message)

    async def refuse(self, error: ClocheError, scope: Scope, receive: Receive) -> None:
        """Before it is open an HTTP answer; afterwards it is closed, unless it is already."""
        if not self.status:
            request_id: Any = scope["cloche.request_id"]
            self.more.append((b"x-request-id", request_id.encode("latin-1")))
            await error_response(error, request_id)(scope, receive, self.send)
