"""Request and answer types of usage and budgets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from cloche_server.api.wire_base import Seconds, Wire
from cloche_server.core.budgets import LIMITS

Much = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False, strict=True)]
Many = Annotated[StrictInt, Field(ge=1, le=2**53)]


def _one_limit(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in LIMITS]


class BudgetBody(Wire):
    """At least one limit."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_one_limit)

    cpu_seconds: Much | None = Field(None, description="Active CPU time.")
    wall_seconds: Much | None = Field(None, description="Time in which it runs.")
    exec_count: Many | None = Field(None, description="So many commands may be started; the next one is refused.")
    bytes_out: Many | None = Field(
        None, description="Output of commands, contents of files that are read, bytes from ports."
    )
    warn_at: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)] = Field(
        0.8, description="The part of a limit that is told of, once."
    )
    grace_seconds: Seconds = Field(60.0, description="Between the pause at a limit and the end.")

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        """As in every body: null is an absent field, and 60.0 is 60. This one may stand in another body."""
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        return {n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in given.items()}

    @model_validator(mode="after")
    def _limited(self) -> BudgetBody:
        if all(getattr(self, name) is None for name in LIMITS):
            raise ValueError(f"a budget needs at least one of {', '.join(LIMITS)}")
        return self


class CostAnswer(BaseModel):
    currency: str
    cpu: float = Field(description="Of active CPU time.")
    memory: float = Field(description="Of memory that was provisioned.")
    disk: float = Field(description="Of what the disk took on the host.")
    total: float


class UsageTotals(BaseModel):
    wall_seconds: dict[str, float] = Field(description="By the state it was in.")
    cpu_seconds: float = Field(description="Active CPU time of its machines.")
    memory_provisioned_mib_seconds: float = Field(description="While the host holds memory for it: not asleep on disk.")
    memory_used_mib_seconds: float = Field(description="What of its memory was its own, shared pages not counted.")
    disk_mib_seconds: float = Field(description="What its disk, and its memory when that is saved, took on the host.")
    disk_bytes: int = Field(description="The same, now.")
    snapshot_bytes: int = Field(description="Of snapshots taken of it that still exist.")
    exec_count: int
    bytes_in: int = Field(description="Input of commands, contents of files that were written, bytes to ports.")
    bytes_out: int = Field(description="Output of commands, contents of files that were read, bytes from ports.")
    starts: int = Field(description="Created, woken, booted.")
    first_started_at: str | None = None
    last_started_at: str | None = None
    cost: CostAnswer | None = Field(None, description="Only when the server has prices.")


class UsageAnswer(UsageTotals):
    sandbox_id: str
    status: str
    created_at: str
    ended_at: str | None = None
    cpus: int
    memory_mb: int


class UsageGroup(BaseModel):
    value: str | None = Field(None, description="Of the label; left out for those that do not have it.")
    count: int
    usage: UsageTotals


class UsageSum(BaseModel):
    workspace: str
    at: str
    since: str | None = None
    until: str | None = None
    count: int = Field(description="So many sandboxes.")
    usage: UsageTotals
    group_by: str | None = None
    groups: list[UsageGroup] = Field(description="By the values of the label; empty without `group_by`.")


class BudgetUsed(BaseModel):
    cpu_seconds: float
    wall_seconds: float
    exec_count: int
    bytes_out: int


class BudgetLeft(BaseModel):
    """Only what is limited."""

    cpu_seconds: float | None = None
    wall_seconds: float | None = None
    exec_count: int | None = None
    bytes_out: int | None = None


class BudgetAnswer(BaseModel):
    id: str = Field(description="Of the account; sandboxes that share a budget have the same.")
    cpu_seconds: float | None = None
    wall_seconds: float | None = None
    exec_count: int | None = None
    bytes_out: int | None = None
    warn_at: float
    grace_seconds: float
    used: BudgetUsed = Field(description="By all that draw on it, and have drawn.")
    left: BudgetLeft
    status: Literal["ok", "warned", "exceeded"]
    exceeded_by: str | None = Field(None, description="The limit that was reached.")
    exceeded_at: str | None = None
    deletes_at: str | None = Field(None, description="When its sandboxes are deleted, unless it is raised.")
    sandboxes: list[str] = Field(description="Those that draw on it.")
