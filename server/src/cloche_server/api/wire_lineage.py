"""Request and answer types of forks, snapshots, pause and hibernation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt

from cloche_server.api.wire import LIFETIME, Env, Metadata, Name, SandboxAnswer, ShortText, Ttl, Wire

#: Children of one call, as existing clients expect.
MAX_FORKS = 16


class ForkBody(Wire):
    count: Annotated[StrictInt, Field(ge=1, le=MAX_FORKS)] = Field(1, description="So many children of one moment.")
    ttl_seconds: Ttl | None = Field(None, description="Default: as the parent was given.")
    persistent: StrictBool | None = Field(None, description="Default: as the parent.")
    metadata: Metadata = Field(default_factory=dict, description="On top of the parent's labels.")
    env: Env = Field(default_factory=dict, description="On top of the parent's environment, for new commands.")
    name: Name | None = Field(None, description="Of the only child: with `count` 1. Unique among the living.")
    budget: Literal["share", "split"] | None = Field(
        None,
        description="Of a parent with a budget: the children draw on it as well (`share`, the default), or what "
        "is left is divided evenly among all.",
    )
    max_lifetime_seconds: Ttl = Field(0, description=f"{LIFETIME} Never after the end of the parent's lifetime.")


class ForkTreeBody(ForkBody):
    count: Annotated[StrictInt, Field(ge=1, le=MAX_FORKS)] = Field(2, description="So many children of one moment.")


class PromoteBody(Wire):
    tree_id: ShortText | None = Field(None, description="Default: the tree the sandbox is a child of.")
    cleanup_siblings: StrictBool = Field(False, description="Delete the other children.")


class StopBody(Wire):
    timeout_seconds: Annotated[float, Field(ge=1, le=600, allow_inf_nan=False, strict=True)] = Field(
        30.0, description="So long the guest may take to shut down."
    )
    force: StrictBool = Field(False, description="Kill it after that time; what was not on its disk is lost.")


class SnapshotBody(Wire):
    name: ShortText | None = Field(None, description="For people; need not be unique.")
    memory: StrictBool | None = Field(
        None,
        description="With memory and processes, or the disk only, from which a sandbox boots. Default: true, and false "
        "for a sandbox that is stopped or has failed.",
    )


class RestoreBody(Wire):
    snapshot_id: ShortText | None = Field(
        None, description="Default: the snapshot that was last taken of the sandbox, or that it last went on from."
    )


class ForkError(BaseModel):
    index: int
    err: str
    code: str


class ForkAnswer(SandboxAnswer):
    tree_id: str
    pause_ms: float = Field(description="How long the parent stood still.")
    children: list[SandboxAnswer] = Field(description="All children; the first one is also the object around it.")
    errors: list[ForkError] | None = None


class ForkTreeAnswer(BaseModel):
    tree_id: str
    parent_id: str
    at: str
    pause_ms: float
    children: list[SandboxAnswer]
    errors: list[ForkError] | None = None


class PromoteAnswer(BaseModel):
    winner: str
    tree_id: str
    deleted: list[str]
    failures: dict[str, str]


class StatusAnswer(BaseModel):
    status: str


class SnapshotAnswer(BaseModel):
    id: str
    sandbox_id: str
    name: str | None = None
    workspace: str
    template: str
    template_resolved: str
    template_id: str
    cpus: int
    memory_mb: int
    disk_mb: int
    memory: bool = Field(description="It holds memory and processes, not only the disk.")
    metadata: dict[str, str]
    size_bytes: int = Field(description="Of memory and device state; the disk is in layers that others share.")
    disk_bytes: int = Field(description="What all its disk layers take on the host; others may share them.")
    parent_snapshot_id: str | None = None
    created_at: str


class VerifyAnswer(BaseModel):
    id: str
    ok: bool
    problems: list[str] = Field(description="What is not as it was written; empty when all is well.")


class LineageAnswer(BaseModel):
    snapshot: SnapshotAnswer
    ancestors: list[SnapshotAnswer] = Field(description="What it was taken over, nearest first.")
    missing_ancestor_id: str | None = Field(None, description="The one above the last of them, which was deleted.")
    children: list[SnapshotAnswer] = Field(description="Snapshots that were taken next, of what went on from it.")
    sandboxes: list[str] = Field(description="Living sandboxes that have gone on from it and no later snapshot.")


class SnapshotList(BaseModel):
    snapshots: list[SnapshotAnswer]
