"""One request and its answer, as the gateway sees them, whichever version of HTTP the client speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cloche_server.core.http1 import Framing, RequestHead
from cloche_server.host.sockets import SocketStream

HeaderList = Sequence[tuple[bytes, bytes]]


class Exchange(Protocol):
    """`ConnectionError` of any method: the client is gone."""

    @property
    def head(self) -> RequestHead: ...
    @property
    def framing(self) -> Framing:
        """Of the request's body."""

    @property
    def secure(self) -> bool:
        """The client came by TLS."""

    @property
    def client(self) -> str:
        """Its address."""

    @property
    def upgrade(self) -> bytes | None:
        """The protocol that the client wants to go on with."""

    @property
    def begun(self) -> bool:
        """The head of the answer has been sent."""

    @property
    def trailers(self) -> HeaderList:
        """What came behind the body, once that has been read."""

    def watch(self, gone: Callable[[], None] | None) -> None:
        """`gone` is called when the client hangs up."""

    async def read_body(self) -> bytes:
        """The next bytes of the body; empty at its end. Raises HttpError for one that is malformed."""

    async def inform(self, status: int, reason: bytes, headers: HeaderList) -> None:
        """An interim answer."""

    async def begin(self, status: int, reason: bytes, headers: HeaderList, framing: Framing) -> None:
        """The head of the answer; `headers` are without those of the framing and of the connection."""

    async def send(self, data: bytes) -> None:
        """Bytes of the answer's body."""

    async def finish(self, trailers: HeaderList = ()) -> None:
        """The answer is complete."""

    def cut(self) -> None:
        """Ends it so that the client sees that the answer is not complete."""

    async def switch(self, reason: bytes, headers: HeaderList) -> SocketStream:
        """101; the connection itself. Only when `upgrade` is not None."""
