"""Routes that existing clients call and this release does not have. They say so: 501, never a pretence."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from starlette.responses import Response

from cloche_server.api.context import Workspace
from cloche_server.api.docs import answers
from cloche_server.core.errors import ClocheError

router = APIRouter(tags=["not in this release"])

OTHERS = (
    ("POST", "/templates/build"),
    ("GET", "/templates/builds"),
    ("GET", "/templates/builds/{build_id}"),
)


def _refuse(what: str) -> ClocheError:
    return ClocheError("not_implemented", f"{what} is not available in this release", details={"feature": what})


def _add_other(method: str, path: str) -> None:
    async def endpoint(_request: Request, _workspace: Workspace) -> Response:
        raise _refuse(path.split("/")[1])

    router.add_api_route(
        path,
        endpoint,
        methods=[method],
        responses=answers(501),
        response_class=Response,
        status_code=501,
        name=method.lower() + re.sub(r"[/{}]+", "_", path).rstrip("_"),
        summary="Not available in this release",
    )


for _method, _path in OTHERS:
    _add_other(_method, _path)
