"""One local connection, joined to a TCP port of a sandbox through a WebSocket of the server."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Final
from urllib.parse import quote, urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from ._config import Settings

#: Says that an empty message ends one direction.
PROTOCOL: Final = "cloche.tcp"
_PIECE: Final = 65536
_OPEN_SECONDS: Final = 60.0
_NORMAL: Final = 1000
_REFUSAL_MAX: Final = 65536


class Refused(Exception):
    """The server does not join the connection; the text is what it says about that."""


async def carry(
    settings: Settings, sandbox_id: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Joins both until they have ended. Raises Refused, `OSError`."""
    parts = urlsplit(settings.api_url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    number = parts.port or (443 if secure else 80)
    far_reader, far_writer = await asyncio.open_connection(parts.hostname, number, ssl=secure)
    try:
        link = _Link(far_reader, far_writer)
        path = f"{parts.path.rstrip('/')}/v1/sandboxes/{quote(sandbox_id, safe='')}/tunnel/{port}"
        async with asyncio.timeout(_OPEN_SECONDS):
            await link.open(parts.netloc, path, settings.api_key)
        await link.join(reader, writer)
    except (RemoteProtocolError, LocalProtocolError) as error:
        raise Refused(f"the server speaks no WebSocket ({error})") from error
    finally:
        far_writer.close()


class _Link:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ws = WSConnection(ConnectionType.CLIENT)
        self._early: list[Event] = []

    async def open(self, host: str, path: str, key: str) -> None:
        headers = [(b"Authorization", f"Bearer {key}".encode())]
        await self._send(Request(host=host, target=path, extra_headers=headers, subprotocols=[PROTOCOL]))
        body = b""
        while True:
            data = await self._reader.read(_PIECE)
            self._ws.receive_data(data or None)
            events = list(self._ws.events())
            for at, event in enumerate(events):
                if isinstance(event, AcceptConnection):
                    self._early = events[at + 1 :]
                    return
                if isinstance(event, RejectData):
                    body += event.data
                whole = isinstance(event, RejectConnection) and not event.has_body
                if whole or (isinstance(event, RejectData) and event.body_finished) or len(body) > _REFUSAL_MAX:
                    raise Refused(_sentence(body))
            if not data:
                raise Refused(_sentence(body))

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.TaskGroup() as group:
            up = group.create_task(self._up(reader))
            await self._down(writer)
            up.cancel()

    async def _up(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_PIECE):
            await self._send(BytesMessage(data))
        await self._send(BytesMessage(b""))

    async def _down(self, writer: asyncio.StreamWriter) -> None:
        events = self._early
        while True:
            for event in events:
                if isinstance(event, BytesMessage):
                    if event.data:
                        writer.write(bytes(event.data))
                        await writer.drain()
                    elif event.message_finished:
                        writer.write_eof()
                elif isinstance(event, Ping):
                    await self._send(event.response())
                elif isinstance(event, CloseConnection):
                    await self._send(event.response())
                    if event.code != _NORMAL:
                        writer.transport.abort()
                    return
            data = await self._reader.read(_PIECE)
            if not data:
                writer.transport.abort()  # without a farewell something may be missing
                return
            self._ws.receive_data(data)
            events = list(self._ws.events())

    async def _send(self, event: Event) -> None:
        self._writer.write(self._ws.send(event))
        await self._writer.drain()


def _sentence(body: bytes) -> str:
    """What the server says about a refusal."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict):
        text = found.get("detail") or found.get("error")
        if isinstance(text, str):
            return text
    return "the server has refused the connection"
