"""SSH: where it is served, and the keys that open sandboxes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from cloche_server.api.context import Caller, ServicesDep
from cloche_server.api.docs import answers, header, json_body
from cloche_server.api.present import rfc3339, without_none
from cloche_server.api.respond import json_response, read_model
from cloche_server.api.wire_ssh import SshAnswer, SshKeyAnswer, SshKeyBody, SshKeyList
from cloche_server.app.sshkeys import WantedKey
from cloche_server.core.sshkeys import SshKey

router = APIRouter(tags=["ssh"])

KeyId = Annotated[str, Path(description="Id of a key: `ssh_` and 16 hex digits.")]


def _shown(key: SshKey) -> dict[str, Any]:
    return without_none(
        {
            "id": key.id,
            "kind": key.kind,
            "public_key": key.public_key,
            "fingerprint": key.fingerprint,
            "comment": key.comment,
            "sandbox_id": key.sandbox_id,
            "created_at": rfc3339(key.created_at),
            "expires_at": None if key.expires_at is None else rfc3339(key.expires_at),
        }
    )


@router.get("/ssh", response_model=SshAnswer, name="get", responses=answers(), summary="Where SSH is served")
async def get_ssh(services: ServicesDep, caller: Caller) -> Response:
    found = services.ssh
    if found is None:
        return json_response({"enabled": False})
    told = {"port": found.port, "host_key": found.host_key, "fingerprint": found.fingerprint}
    return json_response({"enabled": True, **told})


@router.post(
    "/ssh-keys",
    status_code=201,
    response_model=SshKeyAnswer,
    responses={
        201: {"description": "The key", "headers": {"Location": header("Its path")}},
        **answers(400, 404, 408, 409, 413, 507),
    },
    openapi_extra=json_body(SshKeyBody),
    summary="Accept a public key for SSH",
)
async def create_key(request: Request, services: ServicesDep, caller: Caller) -> Response:
    """It opens one sandbox or all of the workspace, and never more than the token that adds it."""
    body = await read_model(request, SshKeyBody)
    wanted = WantedKey(body.public_key, body.comment, body.sandbox_id, body.expires_in_seconds)
    made = await services.ssh_keys.create(caller, wanted)
    return json_response(_shown(made), 201, {"Location": f"/v1/ssh-keys/{made.id}"})


@router.get("/ssh-keys", response_model=SshKeyList, summary="List keys that are accepted, oldest first")
async def list_keys(services: ServicesDep, caller: Caller) -> Response:
    return json_response({"keys": [_shown(one) for one in await services.ssh_keys.list(caller)]})


@router.delete("/ssh-keys/{key_id}", status_code=204, responses=answers(404, 507), summary="Accept a key no more")
async def delete_key(key_id: KeyId, services: ServicesDep, caller: Caller) -> Response:
    """At once: connections that were opened with it are ended."""
    await services.ssh_keys.delete(caller, key_id)
    return Response(status_code=204)
