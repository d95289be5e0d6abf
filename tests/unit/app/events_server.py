"""The real HTTP front over a host in memory, for one test: events, webhooks and whatever needs no machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from app_host import Crew, Host, settings
from services_kit import services_on

from cloche_server.api.app import build_app
from cloche_server.api.protocol import HttpProtocol
from cloche_server.app.events import Events
from cloche_server.app.secrets import Secrets
from cloche_server.app.services import Services
from cloche_server.app.tokens import Tokens
from cloche_server.app.webhooks import Webhooks
from cloche_server.core.records import Isolation
from cloche_server.host.outbound import Sender
from cloche_server.store.secrets import SecretStore
from cloche_server.store.tokens import TokenStore
from cloche_server.store.webhooks import WebhookStore


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@dataclass
class Front:
    """`http` speaks for the workspace `w`, `other` for another one."""

    host: Host
    services: Services
    webhooks: Webhooks
    http: httpx.AsyncClient
    other: httpx.AsyncClient

    async def get(self, path: str, **options: Any) -> Any:
        response = await self.http.get(path, **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, path: str, **options: Any) -> str:
        response = await self.http.get(path, **options)
        assert response.status_code == 400, response.text
        return str(response.json()["error"])


@contextlib.asynccontextmanager
async def serve(host: Host, crew: Crew, *, private: bool = False, sender: Any = None) -> AsyncIterator[Front]:
    """`sender` makes what webhooks send with, in place of the real one."""
    tokens = TokenStore(host.database)
    texts = [await tokens.create("t", name, secrets.token_bytes(16), 0.0) for name in ("w", "foreign")]
    make = sender or (lambda: Sender(private=private))
    group: Any = crew
    webhooks = Webhooks(WebhookStore(host.database), host.supervisor.journal, host.clock, group, make, private=private)
    kept = Secrets(SecretStore(host.database), host.root.parent, None, host.clock, host.supervisor.journal)
    await kept.start()
    services = services_on(
        host, settings=settings(host.root.parent), isolation=Isolation(), tokens=Tokens(tokens, host.clock),
        events=Events(host.access, host.supervisor), webhooks=webhooks, secrets=kept,
    )  # fmt: skip
    services.ready.set()
    await webhooks.start()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        build_app(services), log_config=None, access_log=False, lifespan="off", http=HttpProtocol, ws="none",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    clients = [
        httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {text}"}, timeout=20, trust_env=False)
        for text in texts
    ]
    try:
        yield Front(host, services, webhooks, *clients)
    finally:
        for client in clients:
            await client.aclose()
        services.stopping.set()
        server.should_exit = True
        await serving
        await webhooks.close()
        listener.close()


@dataclass
class Message:
    event: str
    data: Any
    id: str | None


class Stream:
    """A stream that is read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def next(self) -> Message | None:
        """The next event; None at the end of the answer."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(20):
            async for line in self._lines:
                if line and not line.startswith(":"):
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif not line and fields:
                    return Message(fields["event"], json.loads(fields["data"]), fields.get("id"))
        return None

    async def take(self, count: int) -> list[Message]:
        found = []
        for _ in range(count):
            message = await self.next()
            assert message is not None, found
            found.append(message)
        return found


@contextlib.asynccontextmanager
async def stream(client: httpx.AsyncClient, path: str, last: str | None = None, **query: Any) -> AsyncIterator[Stream]:
    headers = {"Last-Event-ID": last} if last is not None else {}
    params = {"follow": "1", **query}
    async with client.stream("GET", path, params=params, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response)


async def tell(host: Host, count: int, sandbox_id: str = "abcdefgh12", workspace: str = "w") -> None:
    for number in range(count):
        await host.supervisor.journal.tell("snapshot.created", workspace, sandbox_id, {"snapshot_id": str(number)})


async def hook(front: Front, url: str, **options: Any) -> dict[str, Any]:
    response = await front.http.post("/v1/webhooks", json={"url": url, **options})
    assert response.status_code == 201, response.text
    assert response.headers["location"] == f"/v1/webhooks/{response.json()['id']}"
    return dict(response.json())
