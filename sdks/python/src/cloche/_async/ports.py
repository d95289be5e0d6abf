"""Ports of a sandbox: what listens, who may come in, and signed links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .. import _wire, _wire_ports
from .._call import Call
from ..models import SandboxInfo
from ..ports import Port, PreviewToken
from .transport import AsyncTransport


class AsyncPorts:
    """What `AsyncSandbox` can do about its ports. Not for direct use."""

    _transport: AsyncTransport
    _path: str
    info: SandboxInfo

    async def ports(self) -> Sequence[Port]:
        """Ports on which something listens, and those about which something was said. This wakes nothing."""
        data = await self._transport.json(Call("GET", f"{self._path}/ports", kind="safe"))
        return [_wire_ports.port(item, self._transport.settings.api_url) for item in _wire.records(data)]

    async def port(self, port: int) -> Port:
        """One port, also when nothing listens there yet."""
        data = await self._transport.json(Call("GET", f"{self._path}/ports/{port:d}", kind="safe"))
        return _wire_ports.port(_wire.record(data), self._transport.settings.api_url)

    async def preview_url(self, port: int) -> str:
        """Where a server on a port of the sandbox is reached by whoever may."""
        return (await self.port(port)).url

    async def expose(
        self,
        port: int,
        *,
        access: Literal["public", "token", "basic"] | None = None,
        label: str | None = None,
        domain: str | None = None,
        username: str | None = None,
        password: str | None = None,
        host: Literal["public", "localhost"] | None = None,
    ) -> Port:
        """Say something about a port, in place of what was said before.

        `access`: who may come in by its address. `domain`: a name of your own that leads to the server.
        `host="localhost"` is for servers that refuse other names. Who may not come in any more is cut off.
        """
        body = _wire.given(port=port, access=access, label=label, domain=domain, host=host)
        body |= _wire.given(username=username, password=password)
        data = await self._transport.json(Call("POST", f"{self._path}/ports", json=body))
        return _wire_ports.port(_wire.record(data), self._transport.settings.api_url)

    async def unexpose(self, port: int) -> None:
        """Take back what was said about a port; who came in by it is cut off. The port is as any other then."""
        await self._transport.json(Call("DELETE", f"{self._path}/ports/{port:d}"))

    async def preview_token(
        self, port: int, *, ttl_seconds: int | None = None, paths: Sequence[str] | None = None
    ) -> PreviewToken:
        """A link to a port for somebody who has no token of the API. `paths`: only what lies below one of these."""
        body = _wire.given(port=port, ttl_seconds=ttl_seconds, paths=list(paths) if paths is not None else None)
        data = await self._transport.json(Call("POST", f"{self._path}/preview-token", json=body))
        return _wire_ports.preview_token(_wire.record(data), self._transport.settings.api_url)
