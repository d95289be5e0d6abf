"""What requests and answers about tokens and the audit log hold."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from cloche_server.api.wire_base import Wire
from cloche_server.core.scopes import MAX_EXPIRY_SECONDS

ScopeName = Literal["read", "exec", "admin"]


class TokenBody(Wire):
    """A token that is asked for."""

    name: Annotated[str, Field(max_length=128, description="What it is for.")] = "default"
    scope: Annotated[
        ScopeName,
        Field(
            description="`read` looks, `exec` uses and makes sandboxes, `admin` does all; each holds the one before."
        ),
    ]
    sandbox_id: Annotated[
        str | None, Field(max_length=64, description="The only sandbox it is good for; it cannot make others.")
    ] = None
    expires_in_seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=MAX_EXPIRY_SECONDS,
            allow_inf_nan=False,
            strict=True,
            description="How long it lives. Default: as long as the token that makes it, at most; else for ever.",
        ),
    ] = None


class TokenAnswer(BaseModel):
    """A token without its secret. `prefix` names it."""

    prefix: str
    name: str
    scope: ScopeName
    workspace: str
    sandbox_id: str | None = None
    created_at: str
    expires_at: str | None = None


class TokenMade(TokenAnswer):
    """`token` is told now and never again."""

    token: str


class TokenList(BaseModel):
    tokens: list[TokenAnswer]


class AuditItem(BaseModel):
    """One request that changes something, or tried to. `token` is a prefix."""

    time: str
    request_id: str
    token: str | None = None
    workspace: str | None = None
    method: str
    route: str
    sandbox_id: str | None = None
    status: int
    code: str | None = None
    client: str


class AuditList(BaseModel):
    """Newest first. `next`: where the older ones go on."""

    entries: list[AuditItem]
    next: str | None = None
