"""Events and webhooks, in the fake."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .http import Abort, Reply, Request

if TYPE_CHECKING:
    from .api import FakeCloche

Json = dict[str, Any]


class Events:
    """`journal` is what happened; a stream breaks off after `breaks` events, each time it is connected to."""

    def __init__(self, server: FakeCloche) -> None:
        self._server = server
        self.journal: list[Json] = []
        self.breaks = 0
        self.hooks: dict[str, Json] = {}

    def happen(self, kind: str, sandbox_id: str = "sb1", **payload: Any) -> None:
        number = len(self.journal) + 1
        self.journal.append(
            {"id": str(number), "time": "2025-01-02T03:04:05.678Z", "sandbox_id": sandbox_id, "type": kind,
             "payload": payload, "a_field_of_the_future": 1}
        )  # fmt: skip

    async def read(self, request: Request, reply: Reply, sandbox_id: str | None = None) -> None:
        query = request.query
        wanted = [e for e in self.journal if (sandbox_id or query.get("sandbox_id")) in (None, e["sandbox_id"])]
        wanted = [e for e in wanted if "type" not in query or e["type"] in query["type"].split(",")]
        tail = int(query.get("tail", "50"))
        found = [e for e in wanted if int(e["id"]) > int(query.get("since", "0"))]
        if query.get("follow") != "1":
            await reply.json(200, {"events": found[:tail] if "since" in query else found[-tail:]})
            return
        found = found if "since" in query else found[-tail:]
        begin = query.get("since") or str(int(found[0]["id"]) - 1 if found else len(self.journal))
        await reply.begin(200, kind="text/event-stream; charset=utf-8", **{"X-Events-After": begin})
        for number, event in enumerate(found):
            if self.breaks and number == self.breaks:
                raise Abort
            await reply.chunk(f"id: {event['id']}\nevent: event\ndata: {json.dumps(event)}\n\n".encode())
            if sandbox_id or event["type"] == "sandbox.deleted":
                await reply.chunk(b'event: end\ndata: {"sandbox_id": "sb1"}\n\n')
                break
        await reply.end()

    async def webhook(self, parts: list[str], request: Request, reply: Reply) -> None:
        body = await request.json()
        self._server.bodies.append(body)
        if not parts and request.method == "POST":
            hook = {"id": f"wh{len(self.hooks) + 1}", "types": [], "enabled": True, **body, "state": {"lag": 2}}
            self.hooks[hook["id"]] = hook
            await reply.json(201, {**hook, "secret": "whsec_c2VjcmV0"})
        elif not parts:
            await reply.json(200, {"webhooks": list(self.hooks.values())})
        elif parts[0] not in self.hooks:
            await reply.error(404, "webhook.not_found", "there is no webhook with this id")
        elif parts[1:] == ["test"]:
            await reply.json(200, {"delivered": False, "status": 500, "error": "it answered 500", "duration_ms": 3})
        elif request.method == "DELETE":
            del self.hooks[parts[0]]
            await reply.send(204)
        else:
            self.hooks[parts[0]] |= body
            await reply.json(200, self.hooks[parts[0]])
