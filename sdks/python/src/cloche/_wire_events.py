"""Between the JSON of the API and the records of events and webhooks; as `_wire`."""

from __future__ import annotations

from collections.abc import Mapping

from . import models
from ._wire import Json, record, required, timestamp


def sandbox_event(data: Json) -> models.SandboxEvent:
    """Something that happened."""
    payload = data.get("payload")
    return models.SandboxEvent(
        id=str(required(data, "id")),
        time=timestamp(data.get("time")),
        sandbox_id=str(data.get("sandbox_id") or ""),
        type=str(required(data, "type")),
        payload=dict(payload) if isinstance(payload, Mapping) else {},
    )


def event_gap(data: Json) -> models.EventGap:
    """Events that are not kept any more."""
    return models.EventGap(str(required(data, "first_id")), str(required(data, "last_id")))


def webhook(answer: object) -> models.WebhookInfo:
    """A receiver of events."""
    data = record(answer)
    state = record(data.get("state") or {})
    return models.WebhookInfo(
        id=str(required(data, "id")),
        url=str(data.get("url") or ""),
        types=tuple(data.get("types") or ()),
        sandbox_id=data.get("sandbox_id"),
        description=data.get("description"),
        enabled=bool(data.get("enabled", True)),
        disabled_reason=data.get("disabled_reason"),
        secret=data.get("secret"),
        lag=int(state.get("lag") or 0),
        delivered=int(state.get("delivered") or 0),
        given_up=int(state.get("given_up") or 0),
        missed=int(state.get("missed") or 0),
        failures=int(state.get("failures") or 0),
        last_error=state.get("last_error"),
        last_success_at=timestamp(state.get("last_success_at")),
        created_at=timestamp(data.get("created_at")),
        raw={name: value for name, value in data.items() if name != "secret"},
    )


def webhook_test(data: Json) -> models.WebhookTest:
    """What a receiver answered."""
    return models.WebhookTest(
        delivered=bool(required(data, "delivered")),
        status=data.get("status"),
        body=str(data.get("body") or ""),
        error=data.get("error"),
        duration_ms=float(data.get("duration_ms") or 0),
    )
