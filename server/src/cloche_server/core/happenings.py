"""What is told about sandboxes: the catalogue of event types, and which of them a change of a record means.

`Event` of `core/lifecycle.py` is what moves a sandbox; a `Happening` is what its journal says afterwards. The journal
tells of states that last. Half-way ones (`hibernating`, `waking`…) are not told: they end in one that is, or in the
one that was told before. A create is told when it has succeeded, because one that fails leaves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cloche_server.core.lifecycle import Status
from cloche_server.core.records import SECRET_METADATA_PREFIX, Sandbox
from cloche_server.core.times import rfc3339

#: Labels that take more room than this are not repeated in an event (bytes of JSON).
MAX_LABELS: Final = 4096


@dataclass(frozen=True, slots=True)
class TypeSpec:
    """`fields`: what the payload may hold, and what it means. Those that do not apply are left out."""

    summary: str
    fields: Mapping[str, str] = field(default_factory=dict)


_BOOT: Final = {"boot_mode": "how it came to run, as in the sandbox object", "boot_ms": "how long that took"}
_WHY: Final = {"reason": "`asked` or `idle`"}
_END: Final = {
    "reason": "as in `termination` of the sandbox object",
    "signal": "the signal that ended the VMM",
    "detail": "one sentence",
}

_BUDGET: Final = {
    "limit": "which one, as in `budget` of the sandbox object",
    "used": "so much was used, by all who share it",
    "allowed": "the limit",
}

_SECRET: Final = {"name": "its name", "version": "counts its values; the value is told nowhere"}

_SERVICE: Final = {
    "service": "its name",
    "process_id": "of this run",
    "detail": "why, in words of the agent",
    "restarts": "how often it was started again before",
    "at": "when, by the clock of the sandbox; `time` is when the server has learnt of it",
    "skipped": "so many events of services were not told before this one, because there were too many",
    "place": "where the agent has it; a server that starts anew goes on behind it",
}

#: Every type that the server writes or sends. A new one is added here, and then told with `Journal.tell`.
CATALOGUE: Final[Mapping[str, TypeSpec]] = {
    "sandbox.created": TypeSpec(
        "a sandbox was made",
        {
            "template": "the name that was asked for",
            "template_id": "the template it runs on",
            "cpus": "vCPUs",
            "memory_mb": "MiB",
            "disk_mb": "MiB",
            "name": "its name",
            "parent_id": "the sandbox it is a fork of",
            "fork_tree_id": "the fork it is a child of",
            "from_snapshot": "the snapshot it continues from",
            "metadata": "its labels, without `secret.*`; left out above 4 KiB",
        },
    ),
    "sandbox.running": TypeSpec("a new sandbox takes commands", _BOOT),
    "sandbox.paused": TypeSpec("its vCPUs stand still", _WHY),
    "sandbox.resumed": TypeSpec("it goes on after a pause"),
    "sandbox.hibernated": TypeSpec("its memory is on disk, and its VMM has ended", _WHY),
    "sandbox.woken": TypeSpec("it goes on after a hibernation", _BOOT),
    "sandbox.stopped": TypeSpec("its guest has shut down; its disk is kept", _WHY),
    "sandbox.started": TypeSpec("it was booted from its disk", _BOOT),
    "sandbox.restored": TypeSpec("it was taken back to a snapshot, and runs", {"snapshot_id": "the snapshot", **_BOOT}),
    "sandbox.failed": TypeSpec("its machine has ended by itself", _END),
    "sandbox.deleted": TypeSpec("nothing of it is left", _END),
    "sandbox.forked": TypeSpec(
        "it was forked; told of the parent",
        {
            "children": "ids of the children that live",
            "tree_id": "the fork",
            "failed": "how many children did not come to life",
            "pause_ms": "how long the parent stood still",
        },
    ),
    "sandbox.promoted": TypeSpec(
        "a child of a fork was kept", {"tree_id": "the fork", "deleted": "ids of the siblings that were deleted"}
    ),
    "sandbox.ttl_changed": TypeSpec(
        "its TTL was set to another value",
        {"ttl_seconds": "seconds", "persistent": "it has no TTL", "expires_at": "when it will be deleted"},
    ),
    "sandbox.idle_changed": TypeSpec(
        "what happens when it is idle was changed", {"idle_seconds": "seconds", "idle_action": "what happens then"}
    ),
    "sandbox.metadata_changed": TypeSpec(
        "labels were changed; those of `secret.*` are not told",
        {"changed": "names of the labels that have a new value", "removed": "names of those that are gone"},
    ),
    "snapshot.created": TypeSpec(
        "a snapshot of it was taken",
        {"snapshot_id": "the snapshot", "name": "its name", "size_bytes": "memory and device state"},
    ),
    "snapshot.deleted": TypeSpec("a snapshot of it was deleted", {"snapshot_id": "the snapshot", "name": "its name"}),
    "budget.warning": TypeSpec("it has used a large part of its budget", _BUDGET),
    "budget.paused": TypeSpec("it was paused, because its budget is used up", _BUDGET),
    "budget.exceeded": TypeSpec("its budget was not raised in time, and it is deleted", _BUDGET),
    "secret.created": TypeSpec("the workspace has a new secret; of no sandbox", _SECRET),
    "secret.rotated": TypeSpec("a secret of the workspace has a new value; of no sandbox", _SECRET),
    "secret.deleted": TypeSpec("a secret of the workspace is gone; of no sandbox", {"name": "its name"}),
    "secret.violation": TypeSpec(
        "a program in it sent the placeholder of a secret where it must not go, and was refused; told once a minute at "
        "most for each sandbox and secret",
        {
            "secret": "the name of the secret",
            "host": "where it was sent last, as the request said",
            "method": "the method of that request",
            "count": "how often it happened since it was told last",
        },
    ),
    "service.started": TypeSpec("a run of a service has begun, as the agent in the sandbox says", _SERVICE),
    "service.exited": TypeSpec(
        "a run of a service is over, as the agent says",
        {
            "exit_code": "of its command; left out when that could not be started",
            "signal": "that ended it",
            "retry_in_seconds": "until it is started again; left out when it is not",
            **_SERVICE,
        },
    ),
    "service.healthy": TypeSpec("the health check of a service passes, and did not before", _SERVICE),
    "service.unhealthy": TypeSpec("so many health checks in a row as its definition says have failed", _SERVICE),
    "service.gave_up": TypeSpec("a service has failed and is not started again; a `start` tries anew", _SERVICE),
    "webhook.test": TypeSpec(
        "sent to a webhook by `POST /v1/webhooks/{id}/test` only; it is in no journal", {"webhook_id": "the webhook"}
    ),
}

#: The state a sandbox is in after an event of this type.
TELLS: Final[Mapping[str, Status]] = {
    "sandbox.running": Status.RUNNING,
    "sandbox.paused": Status.PAUSED,
    "sandbox.resumed": Status.RUNNING,
    "sandbox.hibernated": Status.HIBERNATED,
    "sandbox.woken": Status.RUNNING,
    "sandbox.stopped": Status.STOPPED,
    "sandbox.started": Status.RUNNING,
    "sandbox.restored": Status.RUNNING,
    "sandbox.failed": Status.FAILED,
    "sandbox.deleted": Status.DELETED,
}
#: States that last.
LASTING: Final = frozenset(TELLS.values())
#: Of a half-way state that a server finds at its start: what was told last, where the journal does not say.
TOLD_BEFORE: Final[Mapping[Status, Status]] = {
    Status.HIBERNATING: Status.RUNNING,
    Status.WAKING: Status.HIBERNATED,
    Status.STOPPING: Status.RUNNING,
    Status.STARTING: Status.STOPPED,
    Status.RESTORING: Status.RUNNING,
}
#: What it means to run, by the state that was told before.
_TO_RUNNING: Final[Mapping[Status, str]] = {
    Status.PAUSED: "sandbox.resumed",
    Status.HIBERNATED: "sandbox.woken",
    Status.STOPPED: "sandbox.started",
    Status.FAILED: "sandbox.started",
}
_TO_OTHERS: Final[Mapping[Status, str]] = {
    Status.PAUSED: "sandbox.paused",
    Status.HIBERNATED: "sandbox.hibernated",
    Status.STOPPED: "sandbox.stopped",
    Status.FAILED: "sandbox.failed",
    Status.DELETED: "sandbox.deleted",
}


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happened to a sandbox, or to a workspace: then `sandbox_id` is empty. `at`: Unix seconds; the
    payload is JSON-ready."""

    type: str
    workspace: str
    sandbox_id: str
    at: float
    payload: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ValueError when the catalogue does not know the type, or a field of its payload."""
        known = CATALOGUE.get(self.type)
        unknown = sorted(self.payload.keys() - known.fields.keys()) if known is not None else [self.type]
        if unknown:
            raise ValueError(f"the catalogue does not know {unknown} of {self.type}")


@dataclass(frozen=True, slots=True)
class Told:
    """A happening in the journal. `seq` grows by one with each, over all workspaces."""

    seq: int
    what: Happening


def news(
    told: Status | None, before: Sandbox, after: Sandbox, at: float, ending: str | None = None
) -> tuple[Happening, ...]:
    """What a change of a record from `before` to `after` means, where the journal has said last that it is `told`
    (None: nothing yet). `ending`: why it is deleted, when that is not why it had ended before."""
    found: list[tuple[str, dict[str, Any]]] = []
    now = after.status
    if told is None:
        if now is Status.RUNNING:
            found = [("sandbox.created", _birth(after)), ("sandbox.running", _boot(after))]
    elif before.status is Status.RESTORING and now is Status.RUNNING:
        found = [("sandbox.restored", _given(snapshot_id=after.checkpoint_id, **_boot(after)))]
    elif now in LASTING and now is not told:
        kind = _TO_RUNNING[told] if now is Status.RUNNING else _TO_OTHERS[now]
        found = [(kind, _payload(kind, after, ending))]
    elif now is before.status:
        found = _changes(before, after)
    return tuple(Happening(kind, after.workspace, after.id, at, payload) for kind, payload in found)


def _payload(kind: str, record: Sandbox, ending: str | None) -> dict[str, Any]:
    if kind in {"sandbox.woken", "sandbox.started"}:
        return _boot(record)
    if kind in {"sandbox.paused", "sandbox.hibernated", "sandbox.stopped"}:
        return _given(reason=record.status_reason)
    if kind in {"sandbox.failed", "sandbox.deleted"}:
        end = record.termination
        if kind == "sandbox.deleted" and ending is not None and (end is None or end.reason.value != ending):
            return {"reason": ending}
        return {} if end is None else _given(reason=end.reason.value, signal=end.signal, detail=end.detail)
    return {}


def _birth(record: Sandbox) -> dict[str, Any]:
    labels = _open_labels(record.metadata)
    return _given(
        template=record.template,
        template_id=record.template_id,
        cpus=record.resources.cpus,
        memory_mb=record.resources.memory_mb,
        disk_mb=record.resources.disk_mb,
        name=record.name,
        parent_id=record.parent_id,
        fork_tree_id=record.fork_tree_id,
        from_snapshot=record.snapshot_id,
        metadata=labels if len(json.dumps(labels)) <= MAX_LABELS else None,
    )


def _boot(record: Sandbox) -> dict[str, Any]:
    return {"boot_mode": record.boot_mode.value, "boot_ms": record.boot_ms}


def _changes(before: Sandbox, after: Sandbox) -> list[tuple[str, dict[str, Any]]]:
    """Of what a caller can change. A TTL that is only counted anew is no news."""
    found: list[tuple[str, dict[str, Any]]] = []
    if (before.ttl_seconds, before.persistent) != (after.ttl_seconds, after.persistent):
        expires = rfc3339(after.expires_at) if after.expires_at is not None else None
        payload = _given(ttl_seconds=after.ttl_seconds, persistent=after.persistent, expires_at=expires)
        found.append(("sandbox.ttl_changed", payload))
    if (before.idle_seconds, before.idle_action) != (after.idle_seconds, after.idle_action):
        payload = {"idle_seconds": after.idle_seconds, "idle_action": after.idle_action.value}
        found.append(("sandbox.idle_changed", payload))
    old, new = _open_labels(before.metadata), _open_labels(after.metadata)
    if old != new:
        changed = sorted(name for name, value in new.items() if old.get(name) != value)
        removed = sorted(old.keys() - new.keys())
        found.append(("sandbox.metadata_changed", {"changed": changed, "removed": removed}))
    return found


def _open_labels(metadata: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in metadata.items() if not name.startswith(SECRET_METADATA_PREFIX)}


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# ------------------------------------------------------------------ choosing by type


def patterns() -> list[str]:
    """All that may stand in a list of types: the types themselves, and `sandbox.*` for all of one family."""
    families = sorted({f"{kind.partition('.')[0]}.*" for kind in CATALOGUE})
    return [*CATALOGUE, *families]


def matches(wanted: Iterable[str], kind: str) -> bool:
    """Whether `kind` is one of the `wanted` patterns; none at all want everything."""
    chosen = frozenset(wanted)
    return not chosen or kind in chosen or f"{kind.partition('.')[0]}.*" in chosen


def shown(told: Told) -> dict[str, Any]:
    """An event as clients see it, in answers, in streams and in what webhooks send."""
    what = told.what
    about = {"sandbox_id": what.sandbox_id} if what.sandbox_id else {}
    head = {"id": str(told.seq), "time": rfc3339(what.at), **about}
    return {**head, "type": what.type, "payload": dict(what.payload)}
