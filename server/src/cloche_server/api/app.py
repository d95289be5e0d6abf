"""The ASGI application: routes, errors, and an OpenAPI document that is true."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from cloche_server import __version__
from cloche_server.api.errors import error_response, internal_error
from cloche_server.api.middleware import RequestMiddleware
from cloche_server.api.openapi import build_document
from cloche_server.api.respond import ClientGone, dump, invalid_fields
from cloche_server.api.routes import (
    archive,
    code,
    events,
    filelinks,
    files,
    filestreams,
    filetools,
    git,
    later,
    lineage,
    logs,
    network,
    ports,
    processes,
    repl,
    runs,
    sandbox_services,
    sandboxes,
    secrets,
    selftest,
    service,
    snapshots,
    sshkeys,
    templates,
    terminal,
    tokens,
    usage,
    webhooks,
)
from cloche_server.api.routes import exec as exec_routes
from cloche_server.api.scopes import authorize, operation_id
from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError
from cloche_server.settings import Settings

_DESCRIPTION = """\
Sandboxes for AI agents: each is a microVM with its own kernel, restored from a snapshot.

Errors are JSON: `error` is one sentence, `code` is stable, `retryable` says whether the same request may be
sent again, `details` is data. Unknown fields in requests are ignored."""


_METHODS: Final = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
#: What FastAPI puts before the name of a field.
_PLACES: Final = frozenset({"body", "query", "path", "header"})


def build_app(services: Services) -> ASGIApp:
    """The application over `services`."""
    app = bare_app()
    app.state.services = services
    _add_openapi(app, services.settings)
    _add_errors(app)
    return RequestMiddleware(app, services)


def bare_app() -> FastAPI:
    """The routes alone."""
    app = FastAPI(
        title="Cloche",
        version=__version__,
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
    )
    # The first match wins: what is called most stands first.
    # Routes that exist but answer 501 stand before `/templates/{name}`, which would take their place.
    for router in (
        exec_routes.router,
        processes.router,
        sandbox_services.router,
        logs.router,
        terminal.router,
        code.router,
        repl.router,
        files.router,
        sandboxes.router,
        usage.router,
        ports.router,
        service.router,
        runs.router,
        archive.router,
        lineage.router,
        network.router,
        selftest.router,
        snapshots.router,
        events.router,
        webhooks.router,
        secrets.router,
        tokens.router,
        sshkeys.router,
        later.router,
        templates.router,
        filetools.router,
        filestreams.router,
        git.router,
    ):
        app.include_router(router, prefix="/v1", dependencies=[Depends(authorize)])
    app.include_router(service.public)
    app.include_router(filelinks.public, prefix="/v1")
    _build_routes(app)
    return app


def _build_routes(app: FastAPI) -> None:
    """Now: FastAPI would do so at the first request, which all that come with it would wait for."""
    for _ in iter_route_contexts(app.routes):
        pass


def _methods_at(app: FastAPI, scope: Scope) -> list[str]:
    """All methods of a path: Starlette tells those of the first route only."""
    return [
        method
        for method in _METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in app.routes)
    ]


def _add_errors(app: FastAPI) -> None:
    async def cloche_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ClocheError)
        request.scope["cloche.code"] = error.code
        return error_response(error, request.scope["cloche.request_id"])

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await cloche_error(request, invalid_fields(error.errors(), _PLACES))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            told = ClocheError("request.method_not_allowed", "this route does not know the method")
        elif error.status_code == 404:
            told = ClocheError("request.not_found", "there is no such route")
        else:
            told = ClocheError("request.invalid", "the request cannot be understood")
        response = await cloche_error(request, told)
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods_at(app, request.scope))
        return response

    async def client_gone(request: Request, _error: Exception) -> Response:
        request.scope["cloche.code"] = "client gone"
        return Response(status_code=499)  # for the log and the metrics: nobody is there to read it

    async def crash(request: Request, _error: Exception) -> Response:
        return error_response(internal_error(), request.scope["cloche.request_id"])

    app.add_exception_handler(ClocheError, cloche_error)
    app.add_exception_handler(ClientGone, client_gone)
    app.add_exception_handler(Exception, crash)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)


def _add_openapi(app: FastAPI, settings: Settings) -> None:
    made: list[bytes] = []

    @app.get("/openapi.json", tags=["service"], response_model=dict[str, Any], summary="This document")
    async def openapi() -> Response:
        if not made:
            made.append(await asyncio.to_thread(lambda: dump(build_document(app, settings))))
        return Response(made[0], media_type="application/json")
