"""What a server says of itself and of its templates."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ShapeAnswer(BaseModel):
    id: str
    cpus: int
    memory_mb: int
    size_bytes: int
    created_at: str


class TemplateAnswer(BaseModel):
    name: str
    aliases: list[str]
    description: str
    cpu: int
    memory_mb: int
    disk_mb: int
    size_bytes: int
    is_global: bool = Field(description="All workspaces may use it; false: this one has promoted it.")
    state: Literal["ready"]
    created_at: str
    shapes: list[ShapeAnswer]
    from_snapshot: str | None = Field(None, description="The snapshot it was promoted from.")


class MeAnswer(BaseModel):
    user_id: str
    email: str
    orgs: list[str]
    auth_method: Literal["token"]
    workspace: str
    token_prefix: str
    scope: Literal["read", "exec", "admin"]
    sandbox_id: str | None = None
    expires_at: str | None = None


class HealthAnswer(BaseModel):
    status: Literal["ok", "starting", "stopping"]


class VersionAnswer(BaseModel):
    service: str
    semver: str
    api: str
    accel: str
