"""Self-tests: does the wall around a sandbox hold?"""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Request
from starlette.responses import Response

from cloche_server.api.context import SandboxId, ServicesDep, Workspace
from cloche_server.api.docs import answers
from cloche_server.api.respond import json_response, while_connected
from cloche_server.api.wire_probe import SelfTestAnswer
from cloche_server.core.probes import Probe, Skipped

router = APIRouter(tags=["sandboxes"])


@router.post(
    "/sandboxes/{sandbox_id}/selftest",
    response_model=SelfTestAnswer,
    responses=answers(402, 404, 409, 500, 502, 503),
    name="selftest",
    summary="Try to get out of a running sandbox, and say what held",
)
async def selftest(sandbox_id: SandboxId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Every probe is really tried, from the host and from inside; nothing is changed by it. What the sandbox's own
    policy opens is no failure. Nothing is sent to a foreign machine: networks of others are only asked about."""
    found = await while_connected(request, services.selftests.run(workspace, sandbox_id))
    probes = [asdict(one) for one in found if isinstance(one, Probe)]
    return json_response({"probes": probes, "skipped": [asdict(one) for one in found if isinstance(one, Skipped)]})
