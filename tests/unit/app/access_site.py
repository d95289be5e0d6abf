"""A whole front over a host in memory, for two workspaces that have one of everything each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import uvicorn
from app_host import Crew, Host
from archive_site import Site
from run_kit import Guests, jobs_on, runs_on

from cloche_server.api.app import bare_app, build_app
from cloche_server.api.openapi import build_document
from cloche_server.api.protocol import protocol_for
from cloche_server.app.archive_import import Importer
from cloche_server.app.audit import Audit
from cloche_server.app.broker import Broker
from cloche_server.app.code import Codes
from cloche_server.app.events import Events
from cloche_server.app.exec import Execs
from cloche_server.app.export import Exporter
from cloche_server.app.filelinks import FileLinks
from cloche_server.app.files import Files
from cloche_server.app.filetools import FileTools
from cloche_server.app.git import Git
from cloche_server.app.logs import Logs
from cloche_server.app.names import NamedCreates
from cloche_server.app.network import NetworkVerbs
from cloche_server.app.ports import Ports
from cloche_server.app.processes import Processes
from cloche_server.app.promote_template import Promoter
from cloche_server.app.sandbox_services import SandboxServices
from cloche_server.app.secrets import Secrets
from cloche_server.app.selftest import SelfTests
from cloche_server.app.services import Services
from cloche_server.app.sshkeys import SshKeys
from cloche_server.app.template_keeper import TemplateKeeper
from cloche_server.app.templates import Templates
from cloche_server.app.terminal import Terminals
from cloche_server.app.tokens import Tokens, insert
from cloche_server.app.webhooks import Webhooks
from cloche_server.core.errors import ClocheError
from cloche_server.core.previews import PortAccess
from cloche_server.core.records import Isolation, TokenInfo
from cloche_server.host.append import AppendLog
from cloche_server.host.outbound import Sender
from cloche_server.settings import Settings
from cloche_server.store.ports import PortStore
from cloche_server.store.secrets import SecretStore
from cloche_server.store.sshkeys import SshKeyStore
from cloche_server.store.tokens import TokenStore
from cloche_server.store.webhooks import WebhookStore
from kit.fake_engine import FakeGuest

#: What the same answer may differ in.
PASSING = {"x-request-id", "x-ratelimit-remaining", "x-ratelimit-reset"}
#: Enough for every request to be valid; what a route does not know is ignored.
BODY: dict[str, Any] = {
    "cmd": "id", "path": "/x", "from": "/x", "to": "/y", "cpu_seconds": 1000, "scope": "read",
    "url": "http://127.0.0.1:1/", "name": "n1", "count": 1, "value": "v", "port": 8080,
    "pattern": "x", "replacement": "y", "paths": ["/x"], "target": "/y", "message": "m", "ref": "x", "owner": "root",
    "code": "1", "text": "x",
}  # fmt: skip
#: Where one name means something else.
BODIES: dict[str, dict[str, Any]] = {
    "network_put": {"mode": "none"},
    "processes_signal": {"signal": "TERM", "target": "process"},
    "processes_resize": {"cols": 80, "rows": 24},
}

PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f of-nobody"


class TalkingGuest(FakeGuest):
    """An agent that is there and can do nothing. Whoever asks it for something is in `World.calls`."""

    #: Commands go on until they are closed; how many do.
    endless: ClassVar[bool] = False
    running: ClassVar[set[Any]] = set()

    def exec(self, request: Any) -> Any:
        return _Call(self.world)

    def exec_output(self, *_: Any) -> Any:
        return _Call(self.world)

    def service_output(self, *_: Any) -> Any:
        return _Call(self.world)

    async def _stream(self, name: str) -> AsyncIterator[Any]:
        await self.world.pass_by(f"Guest.{name}")
        raise ClocheError("guest.error", "the agent of this test does nothing")
        yield

    def glob(self, *_: Any, **__: Any) -> Any:
        return self._stream("glob")

    def grep(self, *_: Any, **__: Any) -> Any:
        return self._stream("grep")

    def watch(self, *_: Any, **__: Any) -> Any:
        return self._stream("watch")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._refusal(name)

    def __getattribute__(self, name: str) -> Any:
        # What the agent of other tests can do with files, this one cannot.
        if name in {"mkdir", "write_file", "delete"}:
            return self._refusal(name)
        return super().__getattribute__(name)

    def _refusal(self, name: str) -> Any:
        async def call(*_: Any, **__: Any) -> Any:
            await self.world.pass_by(f"Guest.{name}")
            raise ClocheError("guest.error", "the agent of this test does nothing")

        return call


class _Call:
    def __init__(self, world: Any) -> None:
        self._world = world

    async def __aenter__(self) -> Any:
        await self._world.pass_by("Guest.exec")
        if not TalkingGuest.endless:
            raise ClocheError("guest.error", "the agent of this test does nothing")
        TalkingGuest.running.add(self)
        return self

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        await asyncio.Event().wait()

    async def __aexit__(self, *_: object) -> None:
        TalkingGuest.running.discard(self)


@dataclass(frozen=True)
class Operation:
    """One of the OpenAPI document."""

    id: str
    method: str
    path: str
    scope: str
    reach: str
    #: The collection below `/v1` that the first parameter of the path is in; empty without one.
    kind: str

    def target(self, one: str) -> str:
        """Where it is called for the object `one`."""
        found = self.path
        for number, part in enumerate(part for part in self.path.split("/") if part.startswith("{")):
            found = found.replace(part, one if number == 0 else "1")
        return found + "?path=/etc/hostname&host=a.test"


def operations() -> list[Operation]:
    found = []
    for path, methods in build_document(bare_app(), Settings())["paths"].items():
        for method, about in methods.items():
            # A signed link needs no token; HEAD is the route of a read, without a body to compare.
            if path.startswith("/v1/") and "x-scope" in about and method != "head":
                kind = path.split("/")[2] if path.split("/")[3:4] and path.split("/")[3].startswith("{") else ""
                found.append(
                    Operation(about["operationId"], method.upper(), path, about["x-scope"], about["x-reach"], kind)
                )
    assert len(found) > 60
    return found


@dataclass
class Belongings:
    """What a workspace has, by the collection that it is in."""

    workspace: str
    client: httpx.AsyncClient
    info: TokenInfo
    ids: dict[str, str] = field(default_factory=dict)
    #: As above, of things that are not there any more.
    gone: dict[str, str] = field(default_factory=dict)


@dataclass
class AccessSite:
    host: Host
    services: Services
    app: Any
    store: TokenStore
    own: Belongings
    other: Belongings

    def client(self, token: str | None, **headers: str) -> httpx.AsyncClient:
        sent = {"Authorization": f"Bearer {token}"} if token else {}
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers={**sent, **headers}, timeout=20
        )

    async def token(self, workspace: str, **fields: Any) -> tuple[str, TokenInfo]:
        return await insert(self.store, TokenInfo("", "t", workspace, self.host.clock.now(), **fields))

    def touched(self) -> list[str]:
        """What guests and machines were asked for so far."""
        return [name for name in self.host.world.calls if name.startswith(("Guest.", "Machine.", "Engine."))]

    def state(self, workspace: str) -> Any:
        """All that a workspace has."""
        return (
            self.host.access.list(workspace),
            [one.id for one in self.host.snapshots.list(workspace)],
            # Without how far each has read in the journal, which goes on by itself.
            [replace(one, position=0) for one in self.services.webhooks.list(workspace)],
            [(family.name, len(family.shapes)) for family in self.services.templates.list(workspace)],
        )


async def call(client: httpx.AsyncClient, operation: Operation, one: str, **fields: Any) -> httpx.Response:
    body = None if operation.method in {"GET", "DELETE"} else {**BODY, **BODIES.get(operation.id, {}), **fields}
    return await client.request(operation.method, operation.target(one), json=body)


def answer(response: httpx.Response, one: str) -> tuple[int, Any, Any]:
    """What can be seen of an answer about `one`, without what differs between any two answers."""
    body = response.text
    with contextlib.suppress(ValueError):
        told = json.loads(body)
        if isinstance(told, dict):
            told.pop("request_id", None)
        body = json.dumps(told)
    headers = [(name, value) for name, value in response.headers.items() if name not in PASSING]
    return response.status_code, body.replace(one, "ID"), headers


def unknown_like(known: str) -> str:
    """An id that nobody has, of the same form."""
    if known.startswith("ssh_"):
        return "ssh_" + "f" * 16
    return "pds_" + "f" * 8 if known.startswith("pds_") else "z" * len(known)


def services_of(host: Host, crew: Crew, site: Site, chosen: Settings, audit: Path | None = None) -> Services:
    group: Any = crew
    make = lambda: Sender(private=True)  # noqa: E731
    webhooks = Webhooks(WebhookStore(host.database), host.supervisor.journal, host.clock, group, make, private=True)
    keeper = TemplateKeeper(site.templates, host.catalog, host.store, host.pools)
    parts = (host.machines, site.templates, host.catalog)
    kept = Secrets(SecretStore(host.database), host.root.parent, None, host.clock, host.supervisor.journal)
    trust = Broker(kept, host.supervisor, host.machines.network)
    ports = Ports(host.access, PortStore(host.database), host.clock, b"k" * 32, PortAccess.PUBLIC, None)
    runs, processes = runs_on(host, Guests(), chosen), Processes(host.access)
    units = SandboxServices(host.access)
    tokens = Tokens(TokenStore(host.database), host.clock)
    return Services(
        settings=chosen, clock=host.clock, isolation=Isolation(), access=host.access, creator=host.creator,
        creates=NamedCreates(host.creates, host.access, host.lifecycle), lifecycle=host.lifecycle, sleep=host.sleep,
        power=host.power, forks=host.forks, snapshots=host.snapshots, restores=host.restores,
        promoter=Promoter(chosen, *parts, host.clock, site.tool), exporter=Exporter(*parts),
        importer=Importer(chosen, *parts, host.clock, site.tool), execs=Execs(host.access), files=Files(host.access),
        file_tools=FileTools(host.access), processes=processes, terminals=Terminals(processes),
        file_links=FileLinks(host.access, host.clock, b"k" * 32), git=Git(host.access, Execs(host.access)),
        codes=Codes(host.access),
        logs=Logs(host.access, host.root, processes, units), units=units, templates=Templates(site.templates, keeper),
        tokens=tokens, ssh_keys=SshKeys(SshKeyStore(host.database), host.access, tokens, host.clock),
        meters=host.meters, budgets=host.spending,
        events=Events(host.access, host.supervisor), webhooks=webhooks, secrets=kept, ports=ports,
        network=NetworkVerbs(host.access, host.supervisor, host.machines.network, trust, host.groups),
        selftests=SelfTests(host.access, host.machines, site.templates), runs=runs,
        run_jobs=jobs_on(host, runs, group),
        audit=None if audit is None else Audit(AppendLog(audit, 1 << 20, 2)),
    )  # fmt: skip


async def _done(client: httpx.AsyncClient, run: str) -> None:
    """So that it changes nothing any more."""
    for _ in range(2000):
        if (await client.get(f"/v1/run/{run}")).json()["state"] == "done":
            return
        await asyncio.sleep(0.002)
    raise AssertionError


async def furnish(site: AccessSite, templates: Site, what: Belongings) -> None:
    """One of everything, and one of everything that is gone again."""
    client = what.client

    async def made(path: str, **body: Any) -> str:
        response = await client.post(f"/v1/{path}", json=body)
        assert response.status_code == 201, response.text
        return str(response.json().get("id") or response.json()["prefix"])

    what.ids["sandboxes"] = await made("sandboxes", name=f"box-{what.workspace}", metadata={"of": what.workspace})
    what.ids["snapshots"] = await made(f"sandboxes/{what.ids['sandboxes']}/snapshots")
    what.gone["snapshots"] = await made(f"sandboxes/{what.ids['sandboxes']}/snapshots")
    what.gone["sandboxes"] = await made("sandboxes")
    for place in (what.ids, what.gone):
        # Nobody is there. It waits for what does not happen here: tries to send would change it meanwhile.
        place["webhooks"] = await made("webhooks", url="http://127.0.0.1:1/", types=["budget.exceeded"])
        place["tokens"] = await made("tokens", scope="read")
        place["ssh-keys"] = await made("ssh-keys", public_key=PUBLIC_KEY)
        place["secrets"] = f"{'made' if place is what.ids else 'gone'}-by-{what.workspace}"
        assert (await client.put(f"/v1/secrets/{place['secrets']}", json={"value": "v"})).status_code in {200, 201}
        run = await client.post("/v1/run", json={"language": "python", "source": "", "wait": False})
        assert run.status_code == 202
        place["run"] = run.json()["id"]
        await _done(client, place["run"])
    for name, value in what.gone.items():
        assert (await client.delete(f"/v1/{name}/{value}")).status_code == 204
    what.ids["templates"] = f"made-by-{what.workspace}"
    what.gone["templates"] = f"gone-by-{what.workspace}"
    templates.bake(what.ids["templates"], workspace=what.workspace)


@contextlib.asynccontextmanager
async def build(host: Host, crew: Crew, templates: Site, chosen: Settings, audit: Path | None = None) -> Any:
    services = services_of(host, crew, templates, chosen, audit)
    services.ready.set()
    await services.webhooks.start()
    await services.secrets.start()
    nobody: Any = None
    site = AccessSite(host, services, build_app(services), TokenStore(host.database), nobody, nobody)
    async with contextlib.AsyncExitStack() as stack:
        for name, workspace in (("own", "w"), ("other", "x")):
            text, info = await site.token(workspace)
            what = Belongings(workspace, await stack.enter_async_context(site.client(text)), info)
            await furnish(site, templates, what)
            setattr(site, name, what)
        yield site
        await services.webhooks.close()
        await services.run_jobs.close()
        await services.runs.close()
        if services.audit is not None:
            await services.audit.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def served(site: AccessSite) -> AsyncIterator[str]:
    """The front over a real socket; its URL."""
    config = uvicorn.Config(
        site.app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1,
        http=protocol_for(site.services.settings),
    )  # fmt: skip
    server = _Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            site.services.stopping.set()
            server.should_exit = True
            await serving
