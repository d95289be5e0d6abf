"""Pieces of the OpenAPI document that routes share."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from cloche_server.api.wire import ErrorAnswer

_TEXT: Final = {
    400: "The request is not valid",
    401: "No token, or a wrong one",
    402: "The budget of the sandbox is used up",
    403: "Not allowed: to this token, to the user in the sandbox, or by the operator of this server",
    404: "Not found",
    405: "The route does not know this method",
    408: "The request body did not come in time",
    409: "Not possible in the present state",
    412: "Not as the condition of the request says; nothing was written",
    413: "Too large",
    416: "There is no such part",
    421: "The server does not answer under this name",
    422: "The host cannot keep the boundary that was asked for",
    429: "Too many requests; this one was not carried out",
    431: "Request line and headers are too large",
    500: "A failure of the server or inside the sandbox",
    501: "Not available in this release",
    502: "The sandbox does not answer, or went away",
    503: "No capacity now, or the server is shutting down; nothing was made",
    504: "The command ran into its timeout",
    507: "A disk is full",
}


def header(description: str, kind: str = "string") -> dict[str, Any]:
    """A header of an answer."""
    return {"description": description, "schema": {"type": kind}}


_HEADERS: Final[dict[int, dict[str, Any]]] = {
    401: {"WWW-Authenticate": header("`Bearer`")},
    405: {"Allow": header("The methods of the route")},
    429: {"Retry-After": header("Seconds to wait; whole")},
    503: {"Retry-After": header("Seconds to wait; decimal")},
    507: {"Retry-After": header("Seconds to wait, where that helps; decimal")},
}


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error answers of a route. What is possible on every one is added in `openapi.py`."""
    return {status: error_answer(status) for status in sorted(statuses)}


def error_answer(status: int) -> dict[str, Any]:
    # By reference: given as a model, FastAPI would compile it anew for each status of each route, which was two fifths
    # of what the server computed before it could serve.
    schema = {"$ref": f"#/components/schemas/{ErrorAnswer.__name__}"}
    found: dict[str, Any] = {"content": {"application/json": {"schema": schema}}, "description": _TEXT[status]}
    if status in _HEADERS:
        found["headers"] = dict(_HEADERS[status])
    return found


#: No field is required, but one of several is.
_ONE_OF: Final = frozenset({"ExecBody", "BudgetBody"})


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """The request body of a route. An absent one is the same as `{}`."""
    required = any(field.is_required() for field in model.model_fields.values()) or model.__name__ in _ONE_OF
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def sse(description: str, events: dict[str, type[BaseModel]], headers: dict[str, Any] | None = None) -> dict[str, Any]:
    """An answer of server-sent events: the schema is that of one event, by its name."""
    return {
        "description": description,
        "headers": headers or {},
        "content": {"text/event-stream": {"schema": {"oneOf": [_event(*item) for item in events.items()]}}},
    }


def _event(name: str, model: type[BaseModel]) -> dict[str, Any]:
    data = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {
        "type": "object",
        "required": ["event", "data"],
        "properties": {
            "event": {"const": name},
            "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": data},
            "id": {"type": "string"},
        },
    }
