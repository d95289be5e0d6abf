"""The service itself: health, version, metrics, who am I."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from cloche_server import __version__
from cloche_server.api.context import ServicesDep, token_of
from cloche_server.api.docs import answers
from cloche_server.api.present import rfc3339, without_none
from cloche_server.api.respond import json_response
from cloche_server.api.wire_service import HealthAnswer, MeAnswer, VersionAnswer
from cloche_server.telemetry import metrics

public = APIRouter(tags=["service"])
router = APIRouter(tags=["service"])


@public.get("/healthz", response_model=HealthAnswer, summary="The process answers")
async def healthz(services: ServicesDep) -> Response:
    return json_response({"status": "stopping" if services.stopping.is_set() else "ok"})


@public.get(
    "/readyz",
    response_model=HealthAnswer,
    responses={503: {"model": HealthAnswer, "description": "Not yet, or not any more"}},
    summary="Sandboxes can be created",
)
async def readyz(services: ServicesDep) -> Response:
    if services.stopping.is_set():
        return json_response({"status": "stopping"}, 503)
    if not services.ready.is_set():
        return json_response({"status": "starting"}, 503)
    return json_response({"status": "ok"})


@public.get("/version", response_model=VersionAnswer, summary="Version")
async def version(services: ServicesDep) -> Response:
    return json_response(
        {"service": "cloche-server", "semver": __version__, "api": "v1", "accel": services.isolation.accel}
    )


@public.get(
    "/metrics",
    responses={200: {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}},
    response_class=Response,
    name="metrics",
    summary="Metrics",
)
async def prometheus() -> Response:
    return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/me", response_model=MeAnswer, responses=answers(), summary="Who this token belongs to")
async def me(request: Request) -> Response:
    token = token_of(request)
    return json_response(
        without_none(
            {
                "user_id": token.workspace,
                "email": "",
                "orgs": [],
                "auth_method": "token",
                "workspace": token.workspace,
                "token_prefix": token.prefix,
                "scope": token.scope.value,
                "sandbox_id": token.sandbox_id,
                "expires_at": None if token.expires_at is None else rfc3339(token.expires_at),
            }
        )
    )
