"""Records of events and webhooks; `models` hands them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class SandboxEvent:
    """Something that happened to a sandbox, or to the workspace: then `sandbox_id` is empty. `type` and `payload` are
    described in the server's reference."""

    id: str
    time: datetime | None
    sandbox_id: str
    type: str
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventGap:
    """Events that the server had removed before they were read; not all need have been of this workspace."""

    first_id: str
    last_id: str


@dataclass(frozen=True, slots=True)
class WebhookInfo:
    """A receiver of events. `secret` is there only in what `create` returns; `raw` holds the whole answer.

    `lag` counts the events that came after the last one that is done with.
    """

    id: str
    url: str
    types: tuple[str, ...] = ()
    sandbox_id: str | None = None
    description: str | None = None
    enabled: bool = True
    disabled_reason: str | None = None
    secret: str | None = field(default=None, repr=False)
    lag: int = 0
    delivered: int = 0
    given_up: int = 0
    missed: int = 0
    failures: int = 0
    last_error: str | None = None
    last_success_at: datetime | None = None
    created_at: datetime | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class WebhookTest:
    """What a receiver answered to a test. `status` is None when there was no answer; `error` says why."""

    delivered: bool
    status: int | None = None
    body: str = ""
    error: str | None = None
    duration_ms: float = 0.0
