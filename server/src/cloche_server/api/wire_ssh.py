"""What requests and answers about SSH hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from cloche_server.api.wire_base import Wire
from cloche_server.core.scopes import MAX_EXPIRY_SECONDS
from cloche_server.core.sshkeys import MAX_COMMENT, MAX_TEXT


class SshKeyBody(Wire):
    """A public key that is to be accepted."""

    public_key: Annotated[
        str,
        Field(
            min_length=1,
            max_length=MAX_TEXT,
            description="One line as in a file that ends in `.pub`: ed25519, ECDSA, RSA from 2048 bits on, or of an "
            "authenticator (`sk-…`).",
        ),
    ]
    comment: Annotated[
        str | None, Field(max_length=MAX_COMMENT, description="Whose it is. Default: what stands behind the key.")
    ] = None
    sandbox_id: Annotated[
        str | None, Field(max_length=64, description="The only sandbox it opens. Default: all of the workspace.")
    ] = None
    expires_in_seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=MAX_EXPIRY_SECONDS,
            allow_inf_nan=False,
            strict=True,
            description="How long it is accepted. Default: as long as the token that adds it, at most; else for ever.",
        ),
    ] = None


class SshKeyAnswer(BaseModel):
    """A key that is accepted. `fingerprint` as `ssh-keygen -l` shows it."""

    id: str
    kind: str
    public_key: str
    fingerprint: str
    comment: str
    sandbox_id: str | None = None
    created_at: str
    expires_at: str | None = None


class SshKeyList(BaseModel):
    """Oldest first."""

    keys: list[SshKeyAnswer]


class SshAnswer(BaseModel):
    """Where sandboxes are reached by SSH: at `port` of the server, whose key is `host_key`. The user is the id or name
    of a sandbox. Without `enabled` they are not, and the rest is absent."""

    enabled: bool
    port: int | None = None
    host_key: str | None = None
    fingerprint: str | None = None
