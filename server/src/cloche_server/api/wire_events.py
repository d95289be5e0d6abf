"""Request and answer types of events and webhooks."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, StrictBool, StringConstraints

from cloche_server.api.wire import ShortText, Wire
from cloche_server.core.happenings import patterns
from cloche_server.core.webhooks import MAX_URL, check_url

TYPES = patterns()


def _known_type(text: str) -> str:
    if text not in TYPES:
        raise ValueError(f"there is no such type of events; there are {', '.join(TYPES)}")
    return text


def _usable_url(text: str) -> str:
    check_url(text, private=True)  # whether it may be private is for the server that it is sent to
    return text


TypePattern = Annotated[str, AfterValidator(_known_type), Field(json_schema_extra={"enum": TYPES})]
Url = Annotated[
    str,
    StringConstraints(strict=True, min_length=8, max_length=MAX_URL),
    AfterValidator(_usable_url),
    Field(json_schema_extra={"pattern": "^https?://[!-~]+$"}),
]
Description = Annotated[str, StringConstraints(strict=True, max_length=1000)]


class WebhookBody(Wire):
    url: Url = Field(description="Where events are sent to: http or https, without user, password and fragment.")
    types: Annotated[list[TypePattern], Field(max_length=100)] = Field(
        default_factory=list, description="Only these; `sandbox.*` means all of one family. None: all."
    )
    sandbox_id: ShortText | None = Field(None, description="Only events of this sandbox.")
    description: Description | None = Field(None, description="For people.")


class WebhookPatch(Wire):
    url: Url | None = Field(None, description="Where events are sent to from now on.")
    types: Annotated[list[TypePattern], Field(max_length=100)] | None = Field(
        None, description="Only these from now on; an empty list means all."
    )
    description: Description | None = Field(None, description="For people.")
    enabled: StrictBool | None = Field(
        None, description="False: nothing is sent. True: it goes on with the first event that was not delivered."
    )


class EventAnswer(BaseModel):
    """`event`: something that happened."""

    id: str = Field(description="Its place in the journal, decimal. Ids grow; a workspace does not see all of them.")
    time: str
    sandbox_id: str | None = Field(None, description="Left out for what is of the whole workspace, as a secret is.")
    type: str = Field(description="One of the catalogue, `contracts/events.toml`.")
    payload: dict[str, Any]


class MissingAnswer(BaseModel):
    """`gap`: retention has removed these before they were read; not all need have been of this workspace."""

    first_id: str
    last_id: str


class StreamEnd(BaseModel):
    """`end`: the sandbox has been deleted."""

    sandbox_id: str


class EventList(BaseModel):
    events: list[EventAnswer] = Field(description="Oldest first.")
    gap: MissingAnswer | None = Field(None, description="With `since`: what retention has removed after it.")


class WebhookState(BaseModel):
    position: str = Field(description="The id of the last event that is done with.")
    lag: int = Field(description="How many events of the workspace came after it, of any type.")
    delivered: int
    given_up: int = Field(description="Events that could not be delivered within 24 hours.")
    missed: int = Field(description="Ids that retention removed first; not all need have been for this webhook.")
    failures: int = Field(description="Attempts that failed since the last one that did not.")
    failing_since: str | None = Field(None, description="The first failed attempt to deliver the present event.")
    last_attempt_at: str | None = None
    last_success_at: str | None = None
    last_error: str | None = Field(None, description="Why the last attempt failed, when it did.")


class WebhookAnswer(BaseModel):
    id: str
    url: str
    types: list[str]
    sandbox_id: str | None = None
    description: str | None = None
    enabled: bool
    disabled_reason: str | None = Field(None, description="Why the server has disabled it.")
    created_at: str
    state: WebhookState


class WebhookMade(WebhookAnswer):
    secret: str = Field(description="The key of the signatures, `whsec_` and base64. It is not shown again.")


class WebhookList(BaseModel):
    webhooks: list[WebhookAnswer] = Field(description="Oldest first.")


class WebhookTest(BaseModel):
    delivered: bool = Field(description="The receiver answered with 2xx.")
    status: int | None = Field(None, description="What it answered.")
    body: str | None = Field(None, description="The beginning of its answer, at most 4 KiB.")
    error: str | None = Field(None, description="Why it was not delivered.")
    duration_ms: int
