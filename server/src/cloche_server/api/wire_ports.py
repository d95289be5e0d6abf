"""Request and answer types of ports and previews."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictInt, StringConstraints

from cloche_server.api.wire_base import Wire
from cloche_server.core.previews import MAX_PATH, MAX_PATHS, MAX_PORT, MAX_TOKEN_SECONDS, TOKEN_SECONDS

PortNumber = Annotated[StrictInt, Field(ge=1, le=MAX_PORT, description="TCP port; 22 and 1011 are reserved.")]
Access = Literal["public", "token", "basic"]


class PortBody(Wire):
    port: PortNumber
    label: Annotated[str, StringConstraints(max_length=128)] | None = Field(None, description="For people.")
    domain: Annotated[str, StringConstraints(min_length=1, max_length=253)] | None = Field(
        None, description="A name of your own that leads to the server of previews, and from there to this port."
    )
    access: Access | None = Field(
        None,
        description="Who may come in by the host name: whoever knows it, who has a token, or a name and a password. "
        "Default: the setting `preview_access`.",
    )
    username: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = Field(
        None, description="With `basic`."
    )
    password: Annotated[str, StringConstraints(min_length=8, max_length=256)] | None = Field(
        None, description="With `basic`. It is never shown."
    )
    host: Literal["public", "localhost"] = Field(
        "public",
        description="The Host that the server in the sandbox sees: that of the client, or `localhost:<port>` for "
        "servers that check it.",
    )


class PreviewTokenBody(Wire):
    port: PortNumber
    ttl_seconds: Annotated[StrictInt, Field(ge=1, le=MAX_TOKEN_SECONDS)] = Field(
        TOKEN_SECONDS, description="So long the token opens the port."
    )
    paths: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f%]*$", max_length=MAX_PATH)]],
        Field(max_length=MAX_PATHS),
    ] = Field(default_factory=list, description="Only what lies below one of these; all when there are none.")


class PortAnswer(BaseModel):
    port: int
    label: str | None = None
    listening: bool = Field(description="Something listens there now; false while the sandbox sleeps.")
    source: Literal["user", "detected"] = Field(description="Whether something was said about it.")
    proxy_url: str = Field(description="Where it is reached; a path of this API when previews are switched off.")
    access: Access
    domain: str | None = None
    username: str | None = None
    host: Literal["public", "localhost"]
    addresses: list[str] = Field(description="Addresses in the sandbox on which it listens.")
    pid: int | None = Field(None, description="Of the process that listens.")
    process: str | None = Field(None, description="Its name.")


class PreviewTokenAnswer(BaseModel):
    url: str = Field(description="A link that holds the token.")
    host_url: str | None = Field(
        None, description="The same by host name, for browsers: the token becomes a cookie. Needs wildcard DNS."
    )
    token: str
    sandbox_id: str
    port: int
    paths: list[str]
    expires_at: str
