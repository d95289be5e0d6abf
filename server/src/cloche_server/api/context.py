"""What a route needs of its request: the services, and who asks."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, cast

from fastapi import Depends, Query, Request

from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import TokenInfo


def services_of(request: Request) -> Services:
    return cast("Services", request.app.state.services)


def token_of(request: Request) -> TokenInfo:
    """Set by the authentication middleware on every `/v1` request."""
    return cast("TokenInfo", request.scope["cloche.token"])


def workspace_of(request: Request) -> str:
    return token_of(request).workspace


ServicesDep = Annotated[Services, Depends(services_of)]
Workspace = Annotated[str, Depends(workspace_of)]

PathQuery = Annotated[str | None, Query(description="Absolute path in the sandbox, UTF-8.")]
PathB64Query = Annotated[str | None, Query(description="Instead of `path`: base64url of the raw bytes.")]
UserQuery = Annotated[str | None, Query(description="Whose rights apply; default: the sandbox's user.", max_length=256)]


def guest_path(path: str | None, path_b64: str | None, default: str | None = None) -> str | bytes:
    """The path of a request. Raises `request.invalid` unless it is absolute and can be a path."""
    chosen: str | bytes | None = path if path is not None else default
    if path_b64 is not None:
        try:
            chosen = base64.urlsafe_b64decode(path_b64 + "=" * (-len(path_b64) % 4))
        except (binascii.Error, ValueError):
            raise _bad_path("path_b64 is not base64url") from None
    if chosen is None:
        raise _bad_path("path is required")
    raw = chosen.encode("utf-8", "surrogateescape") if isinstance(chosen, str) else chosen
    if not raw.startswith(b"/"):
        raise _bad_path("path must be absolute")
    if b"\0" in raw:
        raise _bad_path("path holds a NUL byte")
    if len(raw) > 4095:
        raise ClocheError(
            "file.name_too_long",
            "the path is longer than 4095 bytes",
            details={"field": "path", "limit_bytes": 4095},
        )
    return chosen


def _bad_path(message: str) -> ClocheError:
    return ClocheError("request.invalid", message, details={"field": "path"})


def flag(value: str | None, default: bool, name: str) -> bool:
    """`1`, `true`, `0`, `false` in any case; absent is the default."""
    if value is None:
        return default
    lowered = value.lower()
    if lowered in {"1", "true"}:
        return True
    if lowered in {"0", "false", ""}:
        return False
    raise ClocheError("request.invalid", f"{name} must be 1, true, 0 or false", details={"field": name})


def body_schema(model: Any) -> dict[str, Any]:
    """The OpenAPI request body of a model, not required: an absent body is `{}`."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return {"requestBody": {"required": False, "content": {"application/json": {"schema": schema}}}}
