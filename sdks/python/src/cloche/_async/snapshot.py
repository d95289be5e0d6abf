"""A snapshot: find it, make a template or an archive of it, delete it. `AsyncSandbox.snapshot` takes one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, BinaryIO, Self

from .. import _call, _wire
from .._call import SLOW, Call
from ..errors import SnapshotNotFound
from ..models import SnapshotInfo, SnapshotLineage, Template
from .client import AsyncClient, transport_for
from .files import CHUNK, AsyncFileStream, save
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

    async def promote(self, name: str, *, aliases: Sequence[str] = (), description: str = "") -> Template:
        """Make a template of it: `AsyncSandbox.create(name)` then continues from this moment, as often as wanted.

        Only this workspace sees it. The same name again makes its newest version; a name that all workspaces use raises
        `ConflictError`. The snapshot may be deleted afterwards.
        """
        body: dict[str, Any] = {"name": name, "aliases": [*aliases], "description": description}
        data = await self._transport.json(Call("POST", f"{self._path}/promote", json=body, silence=SLOW))
        return _wire.template(_wire.record(data))

    async def export(self, local: str | os.PathLike[str] | BinaryIO, *, template: bool = True) -> int:
        """Write it to a local file as one archive, which `AsyncClient.import_snapshot` takes, here or elsewhere.

        Returns its size. A file given by its path is replaced in one step when all has come; a failure leaves it as it
        was. Without `template` the archive is smaller, and needs a server that has the template below the snapshot. An
        archive holds the memory of the sandbox, with every secret that was in it.
        """
        query = _call.params(template=template)
        call = Call("GET", f"{self._path}/export", params=query, kind="safe", accept="*/*", silence=SLOW)
        return await save(AsyncFileStream(self._transport, call, CHUNK), local)

    async def delete(self) -> None:
        """Delete it for good; sandboxes that started from it go on. One that is gone already is fine."""
        try:
            await self._transport.json(Call("DELETE", self._path, kind="safe", silence=SLOW))
        except SnapshotNotFound:
            return

    def __repr__(self) -> str:
        return f"<AsyncSnapshot {self.id} of {self.sandbox_id}>"
