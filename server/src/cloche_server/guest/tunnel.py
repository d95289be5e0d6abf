"""A connection to a TCP port of the guest over the link of its agent."""

from __future__ import annotations

from typing import Final

from ..core.errors import ClocheError
from .caller import Caller
from .errors import CallContext, protocol_error
from .h2stream import Response, Stream

#: Bytes that may be under way to one server that does not read. The agent holds them in the guest's memory.
IN_FLIGHT: Final = 64 * 1024
#: Seconds that the agent has to take the last bytes of a connection that has ended, and such connections of a sandbox.
LINGER_SECONDS: Final = 10.0
MAX_LINGERING: Final = 64
_HEADER: Final = 4
_PAYLOAD_MAX: Final = 64 * 1024


class TunnelFrames:
    """Decodes what the agent sends: a length of 4 bytes and so many bytes; a length of zero is the end."""

    __slots__ = ("_head", "_left", "ended")

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """The bytes of the server in `data`, in order. Raises `guest.protocol`."""
        parts = []
        at = 0
        while at < len(data):
            if self.ended:
                raise protocol_error("bytes behind the end of a connection")
            if self._left:
                piece = data[at : at + self._left]
                parts.append(piece)
                self._left -= len(piece)
                at += len(piece)
                continue
            taken = _HEADER - len(self._head)
            self._head += data[at : at + taken]
            at += taken
            if len(self._head) == _HEADER:
                self._left = int.from_bytes(self._head, "big")
                self._head = b""
                self.ended = self._left == 0
                if self._left > _PAYLOAD_MAX:
                    raise protocol_error("a piece of a connection that is too long")
        return parts[0] if len(parts) == 1 else b"".join(parts)


class GuestTunnel:
    """A `ByteStream`. Make it with `GuestClient.tunnel`."""

    def __init__(self, caller: Caller, stream: Stream, response: Response) -> None:
        self._lingering = caller.lingering
        self._stream = stream
        self._response = response
        self._frames = TunnelFrames()
        self._closed = False

    async def read(self) -> bytes:
        while not self._frames.ended:
            try:
                chunk = await self._response.next_chunk(None)
                if chunk is None:
                    raise protocol_error("a connection without an end")
                data = self._frames.feed(chunk)
            except ClocheError as error:
                self.close()
                raise ConnectionResetError("the connection to the port broke") from error
            if data:
                return data
        return b""

    @property
    def is_quiet(self) -> bool:
        """Nothing has come that was not read, not even an end: it may be written to."""
        return not (self._closed or self._frames.ended or self._stream.closed or self._stream.buf)

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.send(data)
        except ClocheError as error:
            raise ConnectionResetError("the connection to the port broke") from error

    async def write_eof(self) -> None:
        if not self._stream.closed:
            self._stream.finish()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stream.buf.clear()
        if not self._frames.ended or not self._stream.out_end:
            self._stream.abandon()
            return
        # Both sides have said all. What the agent has not taken yet must not be cut off, nor what its server has not.
        waiting = {one for one in self._lingering if not one.closed}
        self._lingering.clear()
        self._lingering |= waiting
        if len(waiting) >= MAX_LINGERING:
            self._stream.abandon()
        elif not self._stream.closed:
            self._lingering.add(self._stream)
            self._stream.linger(LINGER_SECONDS)


async def open_tunnel(caller: Caller, port: int, timeout: float) -> GuestTunnel:
    """Raises `port.closed`, `port.timeout`, and what any call raises."""
    ctx = CallContext("port", port=port)
    query = (("port", str(port)),)
    stream, response = await caller.duplex("/v1/tcp", ctx, query=query, most=IN_FLIGHT, timeout=timeout)
    return GuestTunnel(caller, stream, response)
