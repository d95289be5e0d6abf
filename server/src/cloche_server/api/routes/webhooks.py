"""Webhooks: receivers that events are sent to."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from cloche_server.api.context import ServicesDep, Workspace
from cloche_server.api.docs import answers, header, json_body
from cloche_server.api.present import rfc3339, without_none
from cloche_server.api.respond import json_response, read_model, while_connected
from cloche_server.api.wire_events import (
    WebhookAnswer,
    WebhookBody,
    WebhookList,
    WebhookMade,
    WebhookPatch,
    WebhookTest,
)
from cloche_server.core.webhooks import Webhook

router = APIRouter(tags=["webhooks"])

WebhookId = Annotated[str, Path(description="Id of a webhook.")]


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else rfc3339(seconds)


def _shown(hook: Webhook, lag: int) -> dict[str, Any]:
    state = {
        "position": str(hook.position),
        "lag": lag,
        "delivered": hook.delivered,
        "given_up": hook.given_up,
        "missed": hook.missed,
        "failures": hook.failures,
        "failing_since": _time(hook.failing_since),
        "last_attempt_at": _time(hook.last_attempt_at),
        "last_success_at": _time(hook.last_success_at),
        "last_error": hook.last_error,
    }
    return without_none(
        {
            "id": hook.id,
            "url": hook.url,
            "types": list(hook.types),
            "sandbox_id": hook.sandbox_id,
            "description": hook.description,
            "enabled": hook.enabled,
            "disabled_reason": hook.disabled_reason,
            "created_at": rfc3339(hook.created_at),
            "state": without_none(state),
        }
    )


@router.post(
    "/webhooks",
    status_code=201,
    response_model=WebhookMade,
    responses={
        201: {"description": "It is sent what happens from now on", "headers": {"Location": header("Its path")}},
        **answers(400, 404, 409, 413, 507),
    },
    openapi_extra=json_body(WebhookBody),
    summary="Have events sent to a receiver",
)
async def create(request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Each event is a signed POST (Standard Webhooks) of the same object as in `GET /v1/events`, at least once and in
    order; what is not answered with 2xx is sent again for 24 hours. 410 disables the webhook."""
    body = await read_model(request, WebhookBody)
    if body.sandbox_id is not None:
        await services.events.check(workspace, body.sandbox_id)
    hook = await services.webhooks.create(workspace, body.url, body.types, body.sandbox_id, body.description)
    shown = {**_shown(hook, 0), "secret": hook.secret}
    return json_response(shown, 201, {"Location": f"/v1/webhooks/{hook.id}"})


@router.get("/webhooks", response_model=WebhookList, summary="List webhooks, oldest first", name="list")
async def list_all(services: ServicesDep, workspace: Workspace) -> Response:
    found = services.webhooks.list(workspace)
    return json_response({"webhooks": [_shown(hook, await services.webhooks.lag(hook)) for hook in found]})


@router.get(
    "/webhooks/{webhook_id}", response_model=WebhookAnswer, responses=answers(404), summary="Get a webhook", name="get"
)
async def get(webhook_id: WebhookId, services: ServicesDep, workspace: Workspace) -> Response:
    hook = services.webhooks.get(workspace, webhook_id)
    return json_response(_shown(hook, await services.webhooks.lag(hook)))


@router.patch(
    "/webhooks/{webhook_id}",
    response_model=WebhookAnswer,
    responses=answers(400, 404, 413, 507),
    openapi_extra=json_body(WebhookPatch),
    summary="Change a webhook",
)
async def patch(webhook_id: WebhookId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """What is not given stays as it is."""
    body = await read_model(request, WebhookPatch)
    changes = {k: v for k, v in body.model_dump(exclude_unset=True).items() if v is not None}
    if "types" in changes:
        changes["types"] = tuple(dict.fromkeys(changes["types"]))
    hook = await services.webhooks.change(workspace, webhook_id, changes)
    return json_response(_shown(hook, await services.webhooks.lag(hook)))


@router.delete("/webhooks/{webhook_id}", status_code=204, responses=answers(404, 507), summary="Delete a webhook")
async def delete(webhook_id: WebhookId, services: ServicesDep, workspace: Workspace) -> Response:
    await services.webhooks.delete(workspace, webhook_id)
    return Response(status_code=204)


@router.post(
    "/webhooks/{webhook_id}/test",
    response_model=WebhookTest,
    responses=answers(404),
    name="try",
    summary="Send a test event now",
)
async def try_out(webhook_id: WebhookId, request: Request, services: ServicesDep, workspace: Workspace) -> Response:
    """Answers what the receiver said, within about ten seconds; nothing is sent again."""
    tried = await while_connected(request, services.webhooks.test(workspace, webhook_id))
    found = {
        "delivered": tried.delivered,
        "status": tried.status or None,
        "body": tried.body if tried.status else None,
        "error": tried.error,
        "duration_ms": round(tried.seconds * 1000),
    }
    return json_response(without_none(found))
