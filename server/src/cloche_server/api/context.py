"""What a route needs of its request: the services, who asks, and parameters that more than one route has."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, cast
from urllib.parse import unquote_to_bytes

from fastapi import Depends, Path, Query, Request
from starlette.requests import HTTPConnection

from cloche_server.app.services import Services
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import TokenInfo

# Dependencies are `async` although they never wait: FastAPI runs others on a thread, which costs more than they do.


async def services_of(request: HTTPConnection) -> Services:
    return cast("Services", request.app.state.services)


def token_of(request: HTTPConnection) -> TokenInfo:
    """Set by the authentication middleware on every `/v1` request."""
    return cast("TokenInfo", request.scope["cloche.token"])


async def workspace_of(request: HTTPConnection) -> str:
    """Whose sandboxes exist for this request; `scopes.py` may have said that none do."""
    return cast("str", request.scope.get("cloche.workspace")) or token_of(request).workspace


async def token_dep(request: HTTPConnection) -> TokenInfo:
    return token_of(request)


async def only_of(request: HTTPConnection) -> str | None:
    return token_of(request).sandbox_id


ServicesDep = Annotated[Services, Depends(services_of)]
Workspace = Annotated[str, Depends(workspace_of)]
Caller = Annotated[TokenInfo, Depends(token_dep)]
#: The one sandbox that exists for the token, when it is a token of one sandbox.
OnlySandbox = Annotated[str | None, Depends(only_of)]

_PATH_DOC: dict[str, Any] = {"pattern": "^/[^\\u0000]*$", "maxLength": 4095}
_FLAG = r"^(|0|1|[Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee])$"

SandboxId = Annotated[str, Path(description="Id of a sandbox.")]
ExecId = Annotated[str, Path(description="Id of a command.")]
PathQuery = Annotated[
    str | None,
    Query(description="Absolute path in the sandbox. One of `path` and `path_b64`.", json_schema_extra=_PATH_DOC),
]
PathB64Query = Annotated[
    str | None, Query(description="Instead of `path`: base64url of the raw bytes.", max_length=8192)
]
UserQuery = Annotated[
    str | None, Query(description="Whose rights apply: name or number; default: the sandbox's user.", max_length=256)
]
FlagQuery = Annotated[str | None, Query(pattern=_FLAG)]


def query_path(request: Request, path: str | None) -> str | bytes | None:
    """The `path` parameter; as bytes when what was sent is not UTF-8 (`path` then holds replacement characters)."""
    if path is None or "\ufffd" not in path:
        return path
    found = b""
    for part in request.scope["query_string"].split(b"&"):
        name, _, value = part.partition(b"=")
        if unquote_to_bytes(name) == b"path":
            found = unquote_to_bytes(value.replace(b"+", b" "))
    return found


def guest_path(path: str | bytes | None, path_b64: str | None, default: str | None = None) -> str | bytes:
    """The path of a request. Raises `request.invalid` unless it is absolute and can be a path."""
    chosen: str | bytes | None = path if path is not None else default
    if path_b64 is not None:
        try:
            chosen = base64.b64decode(path_b64 + "=" * (-len(path_b64) % 4), altchars=b"-_", validate=True)
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


async def _path_of(request: Request, path: PathQuery = None, path_b64: PathB64Query = None) -> str | bytes:
    return guest_path(query_path(request, path), path_b64)


async def _dir_of(request: Request, path: PathQuery = None, path_b64: PathB64Query = None) -> str | bytes:
    return guest_path(query_path(request, path), path_b64, "/")


GuestPath = Annotated[str | bytes, Depends(_path_of)]
#: The root directory when none is given.
GuestDir = Annotated[str | bytes, Depends(_dir_of)]


def _bad_path(message: str) -> ClocheError:
    return ClocheError("request.invalid", message, details={"field": "path"})


def flag(value: str | None, default: bool) -> bool:
    """A `FlagQuery`: `1`, `true`, `0`, `false` in any case, nothing is false; absent is the default."""
    return default if value is None else value.lower() in {"1", "true"}
