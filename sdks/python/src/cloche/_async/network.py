"""The network of a sandbox: its policy, what was decided by it, and why. And the secrets of the workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from .. import _call, _wire, _wire_network
from .._call import Call
from ..models import SandboxInfo
from ..network import Decision, Explanation, NetworkPolicy, Secret
from .transport import AsyncTransport


class AsyncNetwork:
    """What `AsyncSandbox` can do about its network. Not for direct use."""

    _transport: AsyncTransport
    _path: str
    info: SandboxInfo

    async def network(self) -> NetworkPolicy:
        """What it may reach."""
        data = await self._transport.json(Call("GET", f"{self._path}/network", kind="safe"))
        return _wire_network.policy(_wire.record(data))

    async def set_network(self, policy: NetworkPolicy | Mapping[str, Any] | str) -> NetworkPolicy:
        """Another policy, or a mode alone; in force when this returns. What it does not allow is cut off: `cut`."""
        body = _wire_network.policy_body(policy)
        data = await self._transport.json(Call("PUT", f"{self._path}/network", json=body))
        return _wire_network.policy(_wire.record(data))

    async def set_network_group(self, group: str | None) -> Self:
        """Put it into another network group of the workspace; None: into none. What is open with the old one is cut."""
        body = {"network_group": group or ""}
        self.info = _wire.sandbox_info(_wire.record(await self._transport.json(Call("PATCH", self._path, json=body))))
        return self

    async def network_log(self, *, after: int = 0, limit: int = 100) -> Sequence[Decision]:
        """What was decided since its machine was started, after the entry with this `seq`."""
        query = _call.params(after=after, limit=limit)
        data = await self._transport.json(Call("GET", f"{self._path}/network/log", params=query, kind="safe"))
        return [_wire_network.decision(one) for one in _wire.records(_wire.required(_wire.record(data), "entries"))]

    async def explain_network(
        self,
        host: str,
        *,
        port: int = 443,
        protocol: Literal["tcp", "udp"] = "tcp",
        method: str | None = None,
        path: str | None = None,
    ) -> Explanation:
        """Whether its policy allows a destination, and why. Nothing is sent for it."""
        query = _call.params(host=host, port=port, protocol=protocol, method=method, path=path)
        data = await self._transport.json(Call("GET", f"{self._path}/network/explain", params=query, kind="safe"))
        return _wire_network.explanation(_wire.record(data))

    async def propose_network(self) -> NetworkPolicy:
        """The smallest policy that allows what it asked for while its policy had `learn`."""
        data = await self._transport.json(Call("GET", f"{self._path}/network/proposal", kind="safe"))
        return _wire_network.policy(_wire.record(data))


class AsyncSecrets:
    """The secrets of the workspace: written and deleted, and read by no call."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def put(self, name: str, value: str, *, description: str | None = None) -> Secret:
        """Make or rotate a secret. Sandboxes that may use it use the new value from the next request on."""
        body = _wire.given(value=value, description=description)
        data = await self._transport.json(Call("PUT", _call.path("secrets", name), json=body))
        return _wire_network.secret(_wire.record(data))

    async def list(self) -> Sequence[Secret]:
        """All of them, without their values."""
        data = await self._transport.json(Call("GET", _call.path("secrets"), kind="safe"))
        return [_wire_network.secret(one) for one in _wire.records(_wire.required(_wire.record(data), "secrets"))]

    async def get(self, name: str) -> Secret:
        """One of them, without its value."""
        data = await self._transport.json(Call("GET", _call.path("secrets", name), kind="safe"))
        return _wire_network.secret(_wire.record(data))

    async def delete(self, name: str) -> None:
        """Requests that would need it are refused from now on."""
        await self._transport.json(Call("DELETE", _call.path("secrets", name)))
