"""How a guest's program learns that it may not: a sentence in HTTP, an alert in TLS, a reset otherwise."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Final

from cloche_server.core.policy import Claim, ClaimKind, Decision
from cloche_server.netd.waits import reset

#: Fatal, access_denied.
_ALERT: Final = bytes((21, 3, 3, 0, 2, 2, 49))
_PATIENCE: Final = 1.0
_DRAIN: Final = 64 * 1024


def forbidden(decision: Decision, host: str) -> bytes:
    """An answer in HTTP/1.1 that says why."""
    body = json.dumps(
        {
            "error": f"The network policy of this sandbox does not allow this: {decision.reason}.",
            "code": "network.denied",
            "rule": decision.rule,
            "host": host,
        }
    ).encode("ascii")
    head = (
        "HTTP/1.1 403 Forbidden\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


async def refuse(guest: socket.socket, claim: Claim | None, decision: Decision, address: str) -> None:
    """Tells and closes."""
    if claim is None or claim.kind in {ClaimKind.RAW, ClaimKind.HTTP2}:
        reset(guest)
        return
    said = _ALERT if claim.kind is ClaimKind.TLS else forbidden(decision, claim.name or address)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_PATIENCE):
            # What is left unread would turn the close into a reset, and take the words with it.
            guest.recv(_DRAIN)
            await loop.sock_sendall(guest, said)
            guest.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(guest, _DRAIN):
                pass
    except (OSError, TimeoutError):
        reset(guest)
    else:
        guest.close()
