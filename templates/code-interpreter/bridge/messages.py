"""Messages of Jupyter's protocol, and the sockets that carry them (jupyter-client.readthedocs.io, "Messaging", 5.3).

`jupyter_client` does the same, and reads every date in every message; an emulated machine took 50 ms a cell for that.
Only what the bridge looks at is read here.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import zmq

_DELIMITER = b"<IDS|MSG>"
#: Messages that are taken at once, before others have their turn.
_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Message:
    """`header` is that of the message, `parent_id` the message that it is about."""

    kind: str
    header: dict[str, Any]
    parent_id: str
    content: dict[str, Any]


class Signer:
    """Makes and reads the parts of messages of one kernel, which both sides sign with one key."""

    def __init__(self) -> None:
        self.key = os.urandom(16).hex().encode()
        self.session = uuid.uuid4().hex
        self._hmac = hmac.new(self.key, digestmod=hashlib.sha256)

    def _sign(self, parts: list[bytes]) -> bytes:
        made = self._hmac.copy()
        for part in parts:
            made.update(part)
        return made.hexdigest().encode()

    def encode(
        self, kind: str, content: dict[str, Any], metadata: Any = None, parent: Any = None
    ) -> tuple[str, list[bytes]]:
        """The id of a new message, and its parts."""
        message_id = uuid.uuid4().hex
        header = {
            "msg_id": message_id, "username": "cloche", "session": self.session, "msg_type": kind, "version": "5.3",
            "date": datetime.now(UTC).isoformat(),
        }  # fmt: skip
        parts = [json.dumps(one).encode() for one in (header, parent or {}, metadata or {}, content)]
        return message_id, [_DELIMITER, self._sign(parts), *parts]

    def decode(self, raw: list[bytes]) -> Message | None:
        """None for what is not signed, or is no message."""
        try:
            at = raw.index(_DELIMITER)
            signature, *parts = raw[at + 1 : at + 6]
            if len(parts) != 4 or not hmac.compare_digest(self._sign(parts), signature):
                return None
            header, parent, content = (json.loads(parts[n]) for n in (0, 1, 3))
            return Message(str(header["msg_type"]), header, str(parent.get("msg_id", "")), dict(content))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


class Channel:
    """A socket of ZeroMQ on the loop of asyncio. `take` gets the parts of every message, as soon as there is one: a
    kernel that cannot send would drop what it has to say. Nothing that is sent waits."""

    def __init__(
        self, context: zmq.Context[Any], kind: int, address: str, identity: bytes, take: Callable[[list[bytes]], None]
    ) -> None:
        self._take = take
        self._socket = context.socket(kind)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if kind == zmq.SUB:
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        else:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)
        self._loop = asyncio.get_running_loop()
        self._fd = self._socket.getsockopt(zmq.FD)
        self._soon: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._read)

    def send(self, parts: list[bytes]) -> None:
        self._socket.send_multipart(parts, zmq.NOBLOCK)
        # The descriptor tells of a change once, and a send may have been who has heard it.
        self._again()

    def _again(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        for _ in range(_AT_ONCE):
            if self._socket.closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)
        self._again()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._soon is not None:
            self._soon.cancel()
        self._socket.close(0)
