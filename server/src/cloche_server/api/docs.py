"""Pieces of the OpenAPI document that every route shares."""

from __future__ import annotations

from typing import Any

from cloche_server.api.wire import ErrorAnswer

_TEXT = {
    400: "The request is not valid",
    401: "No token, or a wrong one",
    403: "The user in the sandbox may not do this",
    404: "Not found",
    405: "The route does not know this method",
    409: "Not possible in the present state",
    413: "Too large",
    422: "The host cannot keep the boundary that was asked for",
    500: "A failure of the server or inside the sandbox",
    501: "Not available in this release",
    502: "The sandbox does not answer, or went away",
    503: "No capacity now; nothing was made",
    504: "The command ran into its timeout",
    507: "A disk is full",
}


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error answers of a route; 401 and 405 are possible everywhere below `/v1`."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted({401, 405, *statuses}):
        found[status] = {"model": ErrorAnswer, "description": _TEXT[status]}
        if status == 503:
            found[status]["headers"] = {"Retry-After": {"description": "Seconds to wait", "schema": {"type": "string"}}}
    return found
