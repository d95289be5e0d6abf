"""The client: where the server is, and the connections to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from .. import _aio, _call, _config, _wire, _wire_usage
from .._call import SLOW, Call
from ..models import Template
from ..usage import UsageSum
from .events import AsyncEventStream, AsyncWebhooks, event_stream
from .network import AsyncSecrets
from .runs import AsyncRuns
from .ssh import AsyncSshKeys
from .transport import AsyncTransport

if TYPE_CHECKING:
    from .snapshot import AsyncSnapshot


class AsyncClient:
    """Connection settings and a connection pool of its own.

    Most programs need none: without a client, sandboxes share one pool and take the settings from their
    arguments or from `CLOCHE_API_URL` and `CLOCHE_API_KEY`. Make a client to talk to several servers, to
    limit the connections, or to decide when they are closed.

    `timeout`: seconds the server may be silent before a call fails. `max_retry_seconds`: how long `create`
    goes on asking a server that has no room; 0 to fail at once.
    """

    def __init__(
        self,
        api_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float | None = None,
        max_retry_seconds: float | None = None,
        max_connections: int | None = None,
    ) -> None:
        settings = _config.resolve(api_url, api_key, timeout, max_retry_seconds)
        self.transport = AsyncTransport(settings, _aio.Pool(max_connections))
        #: Receivers that events are sent to.
        self.webhooks = AsyncWebhooks(self.transport)
        #: What sandboxes may use without knowing it.
        self.secrets = AsyncSecrets(self.transport)
        #: Programs that run once, each in a sandbox of its own.
        self.runs = AsyncRuns(self.transport)
        #: Keys that sandboxes are opened with over SSH.
        self.ssh_keys = AsyncSshKeys(self.transport)

    @property
    def api_url(self) -> str:
        """The address of the server."""
        return self.transport.settings.api_url

    async def templates(self) -> list[Template]:
        """What sandboxes can be made from."""
        data = await self.transport.json(Call("GET", _call.path("templates"), kind="safe"))
        return [_wire.template(item) for item in _wire.records(data)]

    async def delete_template(self, name: str) -> None:
        """Delete a template that this workspace has promoted, with all its versions.

        While sandboxes or snapshots lie over one of them it raises `ConflictError`.
        """
        await self.transport.json(Call("DELETE", _call.path("templates", name), silence=SLOW))

    async def import_snapshot(
        self, source: str | os.PathLike[str] | IO[bytes], *, name: str | None = None
    ) -> AsyncSnapshot:
        """Make a snapshot of an archive that `AsyncSnapshot.export` has written: a path, or an open binary file.

        It has a new id, and the name it had unless `name` is given. `SnapshotIncompatible`: it was taken under another
        QEMU or CPU model. Import only what you trust.
        """
        from .files import LocalFile, pieces
        from .snapshot import AsyncSnapshot

        query, path = _call.params(name=name), _call.path("snapshots", "import")
        async with LocalFile(source) as file:
            call = Call("POST", path, params=query, content=pieces(file), silence=SLOW)
            made = await self.transport.json(call)
        return AsyncSnapshot(self.transport, _wire.snapshot_info(_wire.record(made)))

    def events(
        self,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        types: Sequence[str] | None = None,
        sandbox_id: str | None = None,
    ) -> AsyncEventStream:
        """What has happened, to iterate over: the newest `tail` events, or all that came after the id `since`.

        With `follow` it goes on with what comes. `types`: only these, such as `"sandbox.failed"` or `"sandbox.*"`.
        """
        return event_stream(self.transport, follow=follow, since=since, tail=tail, types=types, sandbox_id=sandbox_id)

    async def usage(
        self,
        *,
        group_by: str | None = None,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
        sandbox_id: str | None = None,
    ) -> UsageSum:
        """What the sandboxes of the workspace have used, living and ended ones; `group_by` a label, also by its values.

        `since` and `until` choose sandboxes that lived at some time between the two; what is summed is their whole
        usage, not the part in between.
        """
        query = _call.params(since=_wire_usage.moment(since), until=_wire_usage.moment(until))
        query |= _call.params(group_by=group_by, sandbox_id=sandbox_id)
        data = await self.transport.json(Call("GET", _call.path("usage"), params=query, kind="safe"))
        return _wire_usage.usage_sum(_wire.record(data))

    async def version(self) -> dict[str, Any]:
        """The release of the server."""
        return dict(_wire.record(await self.transport.json(Call("GET", "/version", kind="safe"))))

    async def aclose(self) -> None:
        """Close the connections. Sandboxes go on living; a later call opens new connections."""
        await self.transport.pool.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"AsyncClient({self.api_url!r})"


def transport_for(
    client: AsyncClient | None,
    api_url: str | None = None,
    api_key: str | None = None,
    timeout: float | None = None,
) -> AsyncTransport:
    """The transport of `client`, or one with these settings over the connections that all share."""
    if client is None:
        return AsyncTransport(_config.resolve(api_url, api_key, timeout), _aio.default_pool)
    if api_url is not None or api_key is not None or timeout is not None:
        raise TypeError("give either client or api_url, api_key and timeout, not both")
    return client.transport
