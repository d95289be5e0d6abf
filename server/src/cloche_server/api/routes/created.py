"""Creates with services: what the body says of them, and how they are doing when the create answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.responses import Response

from cloche_server.api import present
from cloche_server.api.present import without_none
from cloche_server.api.respond import json_response
from cloche_server.api.routes.sandbox_services import spec_of
from cloche_server.api.wire_create import CreateBody
from cloche_server.app.create import CreateRequest
from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import Sandbox
from cloche_server.core.services import ServiceSpec, in_order


def services_of(body: CreateBody) -> tuple[tuple[str, ServiceSpec], ...]:
    """Raises `request.invalid`."""
    return in_order([(one.name, spec_of(one, one.name)) for one in body.services])


async def created(
    services: Services, body: CreateBody, wanted: CreateRequest, work: Awaitable[tuple[Sandbox, bool]]
) -> Response:
    """The answer to a create with services, after the wait that the body asks for. Whoever hangs up meanwhile does not
    learn of the sandbox, and it is deleted."""
    record, made = await work
    answer = present.sandbox(record)
    if made and record.status is Status.RUNNING:
        names = [name for name, _ in wanted.services]
        try:
            found = await services.units.settle(wanted.workspace, record.id, names, body.wait_for_services_seconds)
        except ClocheError:
            found = []  # it is there all the same, and what has become of it is told to whoever asks
        except asyncio.CancelledError:
            await asyncio.shield(services.lifecycle.delete(wanted.workspace, record.id))
            raise
        shown = [{"name": one.name, "state": one.state, "detail": one.detail or None} for one in found]
        if shown:
            answer["services"] = [without_none(one) for one in shown]
    return json_response(answer, 201 if made else 200, {"Location": f"/v1/sandboxes/{record.id}"})
