"""The routes of the fake: sandboxes and files in memory, commands from a small table."""

from __future__ import annotations

import itertools
from typing import Any

from .events import Events
from .execs import Execs
from .files import Files
from .http import Handler, Reply, Request, Server
from .lineage import VERBS, Lineage

KEY = "pds_00112233445566778899aabbccddeeff"


USAGE = {
    "wall_seconds": {"running": 10.5, "paused": 2},
    "cpu_seconds": 1.25,
    "memory_provisioned_mib_seconds": 2688,
    "exec_count": 3,
    "bytes_out": 99,
    "starts": 1,
    "first_started_at": "2025-01-02T03:04:05Z",
    "cost": {"currency": "EUR", "cpu": 0.1, "memory": 0.2, "disk": 0, "total": 0.3},
    "a_field_of_the_future": 1,
}


class FakeCloche(Server):
    """`requests` records what came; `on` puts a handler of the test in front of a route."""

    def __init__(self) -> None:
        super().__init__()
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.requests: list[Request] = []
        self.bodies: list[Any] = []
        self.files = Files()
        self.execs = Execs()
        self.lineage = Lineage(self)
        self.events = Events(self)
        self._numbers = itertools.count(1)
        self._hooks: list[list[Any]] = []

    def on(self, method: str, suffix: str, handler: Handler, times: int = 1) -> None:
        """Let `handler` answer the next `times` requests of this kind."""
        self._hooks.append([method, suffix, handler, times])

    def count(self, method: str, suffix: str) -> int:
        """How many requests of this kind have come."""
        return sum(r.method == method and r.path.endswith(suffix) for r in self.requests)

    async def handle(self, request: Request, reply: Reply) -> None:
        self.requests.append(request)
        for hook in self._hooks:
            if hook[0] == request.method and request.path.endswith(hook[1]) and hook[3] > 0:
                hook[3] -= 1
                await hook[2](request, reply)
                return
        if request.headers.get("authorization") != f"Bearer {KEY}":
            await reply.error(401, "auth.invalid_token", "unauthorized", detail="the token is unknown")
            return
        await self._route(request, reply)

    async def _route(self, request: Request, reply: Reply) -> None:
        parts = request.path.strip("/").split("/")
        if parts == ["v1", "templates"]:
            base = {"name": "base", "aliases": ["ubuntu-24.04"], "state": "ready", "cpu": 1, "is_global": True}
            await reply.json(200, [base, *self.lineage.templates.values()])
        elif parts[:2] == ["v1", "templates"]:
            found = self.lineage.templates.pop(parts[2], None)
            await (reply.send(204) if found else reply.error(404, "template.not_found", "there is none"))
        elif parts == ["version"]:
            await reply.json(200, {"version": "0.1.0"})
        elif parts == ["v1", "sandboxes"]:
            await self._collection(request, reply)
        elif parts[:2] == ["v1", "snapshots"]:
            await self.lineage.snapshot(parts[2:], request, reply)
        elif parts == ["v1", "events"]:
            await self.events.read(request, reply)
        elif parts[:2] == ["v1", "webhooks"]:
            await self.events.webhook(parts[2:], request, reply)
        elif parts[3:] == ["events"]:
            await self.events.read(request, reply, parts[2])
        elif parts == ["v1", "usage"]:
            group = {"value": "a", "count": 1, "usage": USAGE}
            await reply.json(200, {"count": 2, "usage": USAGE, "groups": [group, {"count": 1, "usage": USAGE}]})
        elif parts[:2] != ["v1", "sandboxes"]:
            await reply.error(404, "request.not_found")
        elif parts[2] not in self.sandboxes:
            await reply.error(404, "sandbox.not_found", "there is no such sandbox")
        elif len(parts) == 3:
            await self._one(parts[2], request, reply)
        elif parts[3] == "fs":
            await self.files.handle(parts[4:], request, reply)
        elif parts[3] == "exec":
            body = await request.json()
            self.bodies.append(body)
            await self.execs.handle(parts[4:], body, request, reply)
        else:
            await self._rest(self.sandboxes[parts[2]], parts[3], request, reply)

    async def _collection(self, request: Request, reply: Reply) -> None:
        if request.method == "GET":
            wanted = {k.removeprefix("metadata."): v for k, v in request.query.items() if k.startswith("metadata.")}
            found = [s for s in self.sandboxes.values() if wanted.items() <= s["metadata"].items()]
            found = [s for s in found if request.query.get("name") in (None, s["name"])]
            await reply.json(200, found)
            return
        body = await request.json()
        self.bodies.append(body)
        key = request.headers.get("idempotency-key", "")
        if key in self.keys:
            await reply.json(201, self.sandboxes[self.keys[key]])
            return
        if body.get("template") == "nope":
            await reply.error(404, "template.not_found", "there is no template nope")
            return
        if body.get("from_snapshot", "") and body["from_snapshot"] not in self.lineage.snapshots:
            await reply.error(404, "snapshot.not_found", "there is no such snapshot")
            return
        if not await self._named(body, reply):
            sandbox = self.make(body)
            self.keys[key] = sandbox["id"]
            await reply.json(201, sandbox)

    async def _named(self, body: dict[str, Any], reply: Reply) -> bool:
        """Answers when the name is in use, unless that one is to be replaced."""
        has_it = [s for s in self.sandboxes.values() if s["name"] == body.get("name", "")]
        choice = body.get("if_exists", "error")
        if not has_it:
            return False
        if choice == "error":
            details = {"id": has_it[0]["id"], "name": body["name"]}
            await reply.error(409, "sandbox.name_taken", "the name is taken", details=details)
        elif choice == "connect":
            await reply.json(200, has_it[0])
        else:
            del self.sandboxes[has_it[0]["id"]]
        return choice != "replace"

    def make(self, body: dict[str, Any]) -> dict[str, Any]:
        """A new sandbox."""
        number = next(self._numbers)
        sandbox = {
            "id": f"sb{number}",
            "name": body.get("name"),
            "template": body.get("template", "base"),
            "template_resolved": "base",
            "template_id": "tpl1",
            "status": "running",
            "cpu": 1,
            "cpus": body.get("cpus", 1),
            "memory_mb": body.get("memory_mb", 256),
            "disk_mb": 4096,
            "metadata": body.get("metadata", {}),
            "env_keys": sorted(body.get("env", {})),
            "created_at": "2025-01-02T03:04:05.678Z",
            "ttl_seconds": body.get("ttl_seconds", 0),
            "persistent": body.get("persistent", False),
            "max_lifetime_seconds": body.get("max_lifetime_seconds", 0),
            "ends_at": "2025-01-02T04:04:05Z" if body.get("max_lifetime_seconds") else None,
            "budget": body.get("budget"),
            "idle_seconds": body.get("idle_seconds", 0),
            "idle_action": body.get("idle_action", "hibernate"),
            "from_snapshot": body.get("from_snapshot"),
            "boot_ms": 12,
            "boot_mode": "warm",
            "isolation": {"boundary": "microvm", "vmm": "qemu", "accel": "tcg"},
            "workspace": "default",
            "generation": 1,
            "a_field_of_the_future": {"x": 1},
        }
        self.sandboxes[str(sandbox["id"])] = sandbox
        return sandbox

    async def _one(self, sandbox_id: str, request: Request, reply: Reply) -> None:
        if request.method == "DELETE":
            del self.sandboxes[sandbox_id]
            await reply.send(204)
            return
        if request.method == "PATCH":
            body = await request.json()
            self.sandboxes[sandbox_id] |= {k: v for k, v in body.items() if k.startswith("idle_")}
            for key, value in body.get("metadata", {}).items():
                self.sandboxes[sandbox_id]["metadata"].pop(key, None)
                if value is not None:
                    self.sandboxes[sandbox_id]["metadata"][key] = value
        await reply.json(200, self.sandboxes[sandbox_id])

    async def _budget(self, sandbox: dict[str, Any], request: Request, reply: Reply) -> None:
        if request.method == "PUT":
            self.bodies.append(await request.json())
            sandbox["budget"] = self.bodies[-1]
        elif request.method == "DELETE":
            sandbox["budget"] = None
            await reply.send(204)
            return
        if not sandbox.get("budget"):
            await reply.error(404, "budget.not_found", "the sandbox has no budget")
            return
        used = {"cpu_seconds": 1.5, "wall_seconds": 2, "exec_count": 3, "bytes_out": 4}
        found = {"id": "acc1", "warn_at": 0.8, "grace_seconds": 60, **sandbox["budget"], "used": used, "left": {}}
        await reply.json(200, {**found, "status": "ok", "sandboxes": [sandbox["id"]], "a_field_of_the_future": 1})

    async def _rest(self, sandbox: dict[str, Any], name: str, request: Request, reply: Reply) -> None:
        if name == "lifecycle":
            sandbox["ttl_seconds"] = (await request.json()).get("ttl_seconds", sandbox["ttl_seconds"])
            await reply.json(200, {"ttl_seconds": sandbox["ttl_seconds"], "persistent": False, "idle_seconds": 1})
        elif name == "load":
            await reply.json(200, {"cpu_ms": 5, "memory_bytes": 1000, "processes": 3})
        elif name == "usage":
            await reply.json(200, USAGE)
        elif name == "budget":
            await self._budget(sandbox, request, reply)
        elif name == "logs":
            await reply.send(200, "boot é\n".encode(), kind="text/plain; charset=utf-8")
        elif name in VERBS:
            await self.lineage.handle(sandbox, name, request, reply)
        else:
            await reply.error(501, "not_implemented", "this server release does not have the feature yet")
