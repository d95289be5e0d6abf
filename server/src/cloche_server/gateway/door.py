"""Port 80 beside previews with TLS: what an authority asks for, and the way to the right address for everybody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloche_server.core.acme import challenge_token
from cloche_server.core.errors import ClocheError
from cloche_server.core.http1 import RequestHead
from cloche_server.core.previews import bare_host


@dataclass(frozen=True, slots=True)
class Told:
    """A whole answer."""

    status: int
    reason: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""


class Door:
    """`answer`: what is to be seen under a name and token, while an order is under way; `knows`: whether a name leads
    to something here; `port`: where TLS is, None for 443."""

    def __init__(
        self, answer: Callable[[str, str], bytes | None], knows: Callable[[str], bool], port: int | None
    ) -> None:
        self._answer = answer
        self._knows = knows
        self._suffix = "" if port in (None, 443) else f":{port}"

    def proof(self, head: RequestHead) -> Told | None:
        """The answer for an authority; None: it is none that asks, or there is nothing to prove now."""
        token = challenge_token(head.target)
        if token is None or head.method not in (b"GET", b"HEAD"):
            return None
        value = self._answer(bare_host(head.host.decode("latin-1")), token)
        if value is None:
            return None
        headers = [(b"Content-Type", b"application/octet-stream"), (b"Cache-Control", b"no-store")]
        return Told(200, b"OK", headers, value)

    def plain(self, head: RequestHead) -> Told:
        """Without TLS nothing else is served, and nothing reaches a guest. Raises `sandbox.not_found`."""
        if (proof := self.proof(head)) is not None:
            return proof
        host = bare_host(head.host.decode("latin-1"))
        # A guest must never be the one who answers an authority: that would give it a certificate for the name.
        if challenge_token(head.target) is not None or not head.target.startswith(b"/") or not self._knows(host):
            raise ClocheError("sandbox.not_found", "there is no preview at this address")
        location = f"https://{host}{self._suffix}".encode("latin-1") + head.target
        return Told(308, b"Permanent Redirect", [(b"Location", location), (b"Cache-Control", b"no-store")])
