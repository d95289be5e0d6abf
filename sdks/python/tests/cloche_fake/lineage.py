"""The states of a sandbox, its children and snapshots, in the fake."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from .http import Reply, Request

if TYPE_CHECKING:
    from .api import FakeCloche

Json = dict[str, Any]

#: What a verb makes of a sandbox, and how it answers.
MOVES = {
    "pause": ("paused", 204),
    "resume": ("running", 204),
    "hibernate": ("hibernated", 200),
    "wake": ("running", 200),
    "stop": ("stopped", 200),
    "start": ("running", 200),
    "restart": ("running", 200),
}
VERBS = {*MOVES, "fork-tree", "promote", "restore", "snapshots", "wait"}


class Lineage:
    """`failing` are the numbers of children that do not come to life."""

    def __init__(self, server: FakeCloche) -> None:
        self._server = server
        self._numbers = itertools.count(1)
        self.snapshots: dict[str, Json] = {}
        self.templates: dict[str, Json] = {}
        #: What came in with imports.
        self.imported: list[bytes] = []
        self.failing: set[int] = set()

    async def handle(self, sandbox: Json, verb: str, request: Request, reply: Reply) -> None:
        """A call below a sandbox."""
        body = await request.json()
        self._server.bodies.append(body)
        if verb in MOVES:
            sandbox["status"], status = MOVES[verb]
            sandbox["status_reason"] = "asked"
            await (reply.send(204) if status == 204 else reply.json(200, {"status": sandbox["status"]}))
        elif verb == "wait":
            await self._wait(sandbox, request, reply)
        elif verb == "fork-tree":
            await reply.json(201, self._fork(sandbox, body))
        elif verb == "promote":
            await self._promote(sandbox, body, reply)
        elif verb == "restore":
            sandbox["checkpoint_id"] = body.get("snapshot_id") or next(reversed(self.snapshots))
            await reply.json(200, sandbox)
        else:
            await reply.json(201, self._take(sandbox, body))

    async def snapshot(self, parts: list[str], request: Request, reply: Reply) -> None:
        """A call below `/v1/snapshots`."""
        if not parts:
            wanted = request.query.get("sandbox_id")
            found = [one for one in self.snapshots.values() if wanted in (None, one["sandbox_id"])]
            await reply.json(200, {"snapshots": found[::-1]})
        elif parts == ["import"]:
            self.imported.append(await request.body())
            source = next(iter(self.snapshots.values()))
            made = {**source, "id": f"sn{next(self._numbers)}", "name": request.query.get("name", "as it was")}
            self.snapshots[made["id"]] = made
            await reply.json(201, made)
        elif parts[0] not in self.snapshots:
            await reply.error(404, "snapshot.not_found", "there is no such snapshot")
        elif parts[1:] == ["verify"]:
            await reply.json(200, {"id": parts[0], "ok": False, "problems": ["its file dev has changed"]})
        elif parts[1:] == ["lineage"]:
            others = [one for name, one in self.snapshots.items() if name != parts[0]]
            shown = {"snapshot": self.snapshots[parts[0]], "ancestors": others, "children": [], "sandboxes": ["a"]}
            await reply.json(200, {**shown, "missing_ancestor_id": "gone"})
        elif parts[1:] == ["promote"]:
            body = await request.json()
            self._server.bodies.append(body)
            self.templates[body["name"]] = {**body, "state": "ready", "is_global": False, "from_snapshot": parts[0]}
            await reply.json(201, self.templates[body["name"]])
        elif parts[1:] == ["export"]:
            await reply.begin(200, "application/zstd")
            for _ in range(3):
                await reply.chunk(b"archive " * 5000 + request.query.get("template", "").encode())
            await reply.end()
        elif request.method == "DELETE":
            del self.snapshots[parts[0]]
            await reply.send(204)
        else:
            await reply.json(200, self.snapshots[parts[0]])

    async def _wait(self, sandbox: Json, request: Request, reply: Reply) -> None:
        wanted = {*request.query["status"].split(","), "failed"}
        loop = asyncio.get_running_loop()
        until = loop.time() + float(request.query["timeout"])
        while sandbox["status"] not in wanted and loop.time() < until and not reply.gone():  # noqa: ASYNC110 - it polls
            await asyncio.sleep(0.02)
        await reply.json(200, sandbox)

    def _fork(self, parent: Json, body: Json) -> Json:
        tree = f"tree{next(self._numbers)}"
        children = []
        for number in range(body.get("count", 2)):
            if number in self.failing:
                continue
            child = self._server.make(
                {**parent, **body, "metadata": {**parent["metadata"], **body.get("metadata", {})}}
            )
            child |= {"parent_id": parent["id"], "fork_tree_id": tree, "boot_mode": "fork", "name": body.get("name")}
            children.append(child)
        answer = {"tree_id": tree, "parent_id": parent["id"], "at": "", "pause_ms": 7.5, "children": children}
        errors = [{"index": n, "err": "no room", "code": "capacity.unavailable"} for n in sorted(self.failing)]
        return {**answer, "errors": errors} if errors else answer

    async def _promote(self, winner: Json, body: Json, reply: Reply) -> None:
        if "fork_tree_id" not in winner:
            await reply.error(400, "request.invalid", "the sandbox is no child of a fork")
            return
        tree, family = winner["fork_tree_id"], self._server.sandboxes
        siblings = [one for one in family if family[one].get("fork_tree_id") == tree and one != winner["id"]]
        gone = siblings if body["cleanup_siblings"] else []
        for one in gone:
            del family[one]
        await reply.json(200, {"winner": winner["id"], "tree_id": tree, "deleted": gone, "failures": {}})

    def _take(self, sandbox: Json, body: Json) -> Json:
        kept = ("template", "template_resolved", "template_id", "cpus", "memory_mb", "disk_mb", "metadata")
        made = {
            "id": f"sn{next(self._numbers)}",
            "sandbox_id": sandbox["id"],
            "memory": True,
            **body,
            **{name: sandbox[name] for name in kept},
            "size_bytes": 1000,
            "disk_bytes": 2000,
            "created_at": "2025-01-02T03:04:05Z",
            "a_field_of_the_future": 1,
        }
        self.snapshots[made["id"]] = made
        return made
