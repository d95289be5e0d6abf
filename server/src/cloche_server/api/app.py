"""The ASGI application: routes, errors, and an OpenAPI document that is true."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from cloche_server import __version__
from cloche_server.api.docs import answers
from cloche_server.api.errors import error_response
from cloche_server.api.middleware import RequestMiddleware
from cloche_server.api.respond import invalid_fields
from cloche_server.api.routes import exec as exec_routes
from cloche_server.api.routes import files, later, sandboxes, service, templates
from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError

_DESCRIPTION = """\
Sandboxes for AI agents: each is a microVM with its own kernel, restored from a snapshot.

Errors are JSON: `error` is one sentence, `code` is stable, `retryable` says whether the same request may be
sent again, `details` is data. Unknown fields in requests are ignored."""


def build_app(services: Services) -> ASGIApp:
    """The application over `services`."""
    app = FastAPI(
        title="Cloche",
        version=__version__,
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = services
    app.include_router(service.public)
    # Routes that exist but answer 501 stand before `/templates/{name}`, which would take their place.
    for router in (
        service.router,
        sandboxes.router,
        exec_routes.router,
        files.router,
        later.router,
        templates.router,
    ):
        app.include_router(router, prefix="/v1")
    _add_openapi(app)
    _add_errors(app)
    return RequestMiddleware(app, services)


def _add_errors(app: FastAPI) -> None:
    async def cloche_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ClocheError)
        request.scope["cloche.code"] = error.code
        return error_response(error, request.scope["cloche.request_id"])

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await cloche_error(request, invalid_fields(error.errors()))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            told = ClocheError("request.method_not_allowed", "this route does not know the method")
        elif error.status_code == 404:
            told = ClocheError("request.not_found", "there is no such route")
        else:
            told = ClocheError("request.invalid", "the request cannot be understood")
        response = await cloche_error(request, told)
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    app.add_exception_handler(ClocheError, cloche_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)


def _add_openapi(app: FastAPI) -> None:
    @app.get("/openapi.json", tags=["service"], responses=answers(), summary="This document")
    async def openapi() -> dict[str, Any]:
        return openapi_document(app)


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with what it cannot know: the security scheme, and no answers that never come."""
    if app.openapi_schema:
        return app.openapi_schema
    from fastapi.openapi.utils import get_openapi

    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        openapi_version="3.1.0",
    )
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # Validation errors are 400 here, and documented as such.
            operation["responses"].pop("422", None) if not _keeps_422(operation) else None
            if path.startswith("/v1"):
                operation["security"] = [{"token": []}]
                if operation.get("parameters"):
                    operation["responses"].setdefault("400", operation["responses"].get("401"))
            else:
                operation["responses"].pop("401", None)
                operation["responses"].pop("405", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    app.openapi_schema = document
    return document


def _keeps_422(operation: dict[str, Any]) -> bool:
    """Our own 422 refers to our error type, FastAPI's to its own."""
    content = operation["responses"].get("422", {}).get("content", {})
    return "ErrorAnswer" in str(content)
