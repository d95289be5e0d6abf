"""A snapshot: find it, delete it. `AsyncSandbox.snapshot` takes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from .. import _call, _wire
from .._call import SLOW, Call
from ..errors import SnapshotNotFound
from ..models import SnapshotInfo, SnapshotLineage
from .client import AsyncClient, transport_for
from .transport import AsyncTransport


class AsyncSnapshot:
    """A sandbox as it was at one moment, on disk until it is deleted.

    Any number of sandboxes can start from it: `AsyncSandbox.create(from_snapshot=snapshot)`.
    """

    def __init__(self, transport: AsyncTransport, info: SnapshotInfo) -> None:
        """Not for direct use: `AsyncSandbox.snapshot`, `get` and `list` make them."""
        self._transport = transport
        self._path = _call.path("snapshots", info.id)
        self.info = info

    @classmethod
    async def get(
        cls,
        snapshot_id: str,
        *,
        client: AsyncClient | None = None,
        api_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Find a snapshot by its id."""
        transport = transport_for(client, api_url, api_key, timeout)
        call = Call("GET", _call.path("snapshots", snapshot_id), kind="safe")
        return cls(transport, _wire.snapshot_info(_wire.record(await transport.json(call))))

    @classmethod
    async def list(
        cls,
        *,
        sandbox_id: str | None = None,
        client: AsyncClient | None = None,
        api_url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> Sequence[Self]:
        """Snapshots, newest first; with `sandbox_id` those of one sandbox, which need not live any more."""
        transport = transport_for(client, api_url, api_key, timeout)
        query = _call.params(sandbox_id=sandbox_id)
        data = _wire.record(await transport.json(Call("GET", _call.path("snapshots"), params=query, kind="safe")))
        return [cls(transport, _wire.snapshot_info(item)) for item in _wire.records(_wire.required(data, "snapshots"))]

    @property
    def id(self) -> str:
        """The id."""
        return self.info.id

    @property
    def name(self) -> str | None:
        """The name it was given; it need not be unique."""
        return self.info.name

    @property
    def sandbox_id(self) -> str:
        """The sandbox it was taken of."""
        return self.info.sandbox_id

    async def verify(self) -> Sequence[str]:
        """Have the server read all of it. What is not as it was written, as sentences; empty when all is well."""
        data = _wire.record(await self._transport.json(Call("POST", f"{self._path}/verify", kind="safe", silence=SLOW)))
        return [str(problem) for problem in data.get("problems") or ()]

    async def lineage(self) -> SnapshotLineage:
        """Where it comes from, and what came of it."""
        data = _wire.record(await self._transport.json(Call("GET", f"{self._path}/lineage", kind="safe")))
        return _wire.lineage(data)

    async def delete(self) -> None:
        """Delete it for good; sandboxes that started from it go on. One that is gone already is fine."""
        try:
            await self._transport.json(Call("DELETE", self._path, kind="safe", silence=SLOW))
        except SnapshotNotFound:
            return

    def __repr__(self) -> str:
        return f"<AsyncSnapshot {self.id} of {self.sandbox_id}>"
