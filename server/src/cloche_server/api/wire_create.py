"""The body of a create, with services, and its answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from cloche_server.api import wire
from cloche_server.api.wire_services import ServiceBody, ServiceName
from cloche_server.core.services import CREATE_WAIT_MAX, SERVICES_MAX, State


class NamedServiceBody(ServiceBody):
    name: ServiceName = Field(description="Unique in the sandbox.")


class CreateBody(wire.CreateBody):
    services: Annotated[list[NamedServiceBody], Field(max_length=SERVICES_MAX)] = Field(
        default_factory=list,
        description="Commands that it keeps running, in any order; as with `PUT /v1/sandboxes/{id}/services/{name}`. "
        "One that cannot be defined undoes the create.",
    )
    wait_for_services_seconds: Annotated[float, Field(ge=0, le=CREATE_WAIT_MAX, allow_inf_nan=False, strict=True)] = (
        Field(
            0.0,
            description="The answer waits until all `services` are healthy or have done their work, or one has failed, "
            "but not longer; it is 201 in each case, and its `services` tell which.",
        )
    )


class CreatedServiceAnswer(BaseModel):
    name: str
    state: State
    detail: str | None = Field(None, description="Why it is in this state, in words of the agent in the sandbox.")


class CreatedAnswer(wire.SandboxAnswer):
    services: list[CreatedServiceAnswer] | None = Field(
        None, description="How those of the body are doing; left out when there are none, or it does not run any more."
    )
