"""Request types of promotion to a template."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from cloche_server.api.wire import Wire

_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
TemplateName = Annotated[str, StringConstraints(strict=True, pattern=_NAME)]


class PromoteSnapshotBody(Wire):
    name: TemplateName = Field(description="What creates call it by; a template of all workspaces is not replaced.")
    aliases: Annotated[list[TemplateName], Field(max_length=16)] = Field(
        default_factory=list, description="Other names for it."
    )
    description: Annotated[str, StringConstraints(strict=True, max_length=1024)] = Field("", description="For people.")
