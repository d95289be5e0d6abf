"""Between the JSON of the API and the records of `services`: pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._wire import Json, given, record, records, required, timestamp
from .services import HealthCheck, LogPage, ServiceDefinition, ServiceInfo


def service(data: Json) -> ServiceInfo:
    """A service."""
    last = data.get("last_exit")
    return ServiceInfo(
        name=str(required(data, "name")),
        state=str(required(data, "state")),
        detail=data.get("detail"),
        waiting_for=tuple(str(one) for one in data.get("waiting_for") or ()),
        pid=data.get("pid"),
        process_id=data.get("process_id"),
        started_at=timestamp(data.get("started_at")),
        restarts=int(data.get("restarts") or 0),
        last_exit_code=last.get("exit_code") if isinstance(last, dict) else None,
        definition=record(data.get("definition") or {}),
        raw=data,
    )


def services(data: object) -> list[ServiceInfo]:
    """The list of them."""
    return [service(one) for one in records(required(record(data), "services"))]


def health(check: HealthCheck) -> dict[str, Any]:
    """The body of a health check."""
    words = check.command if check.command is None or isinstance(check.command, str) else list(check.command)
    body = given(tcp=check.tcp, command=words, retries=check.retries, on_unhealthy=check.on_unhealthy)
    body |= given(interval_seconds=check.interval, timeout_seconds=check.timeout)
    body |= given(start_period_seconds=check.start_period)
    if check.http is not None:
        body["http"] = given(port=check.http, path=check.path, status=check.status)
    return body


def definition(one: ServiceDefinition) -> dict[str, Any]:
    """The body of a definition, without its name."""
    words = one.command if isinstance(one.command, str) else [str(word) for word in one.command]
    body = given(command=words, cwd=one.cwd, user=one.user, restart=one.restart, max_restarts=one.max_restarts)
    body |= given(env=dict(one.env) or None, depends_on=list(one.depends_on) or None, autostart=one.autostart)
    body |= given(backoff_seconds=one.backoff, window_seconds=one.window, stop_grace_seconds=one.stop_grace)
    body |= given(buffer_kb=one.buffer_kb, health=None if one.health is None else health(one.health))
    return body | dict(one.more)


def definitions(found: Sequence[ServiceDefinition | Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Those of a create; a mapping is as the API has it."""
    if found is None:
        return None
    return [{"name": one.name, **definition(one)} if isinstance(one, ServiceDefinition) else dict(one) for one in found]


def of_create(found: Sequence[ServiceDefinition | Mapping[str, Any]] | None, wait: float | None) -> dict[str, Any]:
    """The part of a create's body that is about services; `wait` in seconds."""
    return given(services=definitions(found), wait_for_services_seconds=wait)


def page(data: object) -> LogPage:
    """A part of a log."""
    found = record(data)
    return LogPage(
        lines=tuple(str(required(one, "line")) for one in records(required(found, "lines"))),
        next=str(required(found, "next")),
        more=bool(found.get("more")),
        gap_bytes=int(found.get("gap_bytes") or 0),
        restarted=bool(found.get("restarted")),
        final=bool(found.get("final")),
    )
