"""From records to the JSON of the API."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from cloche_server.api.errors import result_fields
from cloche_server.core.command import CommandResult
from cloche_server.core.records import SECRET_METADATA_PREFIX, Sandbox
from cloche_server.core.secrets import shown_grant


def rfc3339(seconds: float) -> str:
    """UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def sandbox(record: Sandbox) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": record.id,
        "template": record.template,
        "template_resolved": record.template_name,
        "template_id": record.template_id,
        "status": record.status.value,
        "cpu": record.resources.cpus,
        "cpus": record.resources.cpus,
        "memory_mb": record.resources.memory_mb,
        "disk_mb": record.resources.disk_mb,
        "metadata": {k: v for k, v in record.metadata.items() if not k.startswith(SECRET_METADATA_PREFIX)},
        "env_keys": sorted(record.defaults.env),
        "workspace": record.workspace,
        "created_at": rfc3339(record.created_at),
        "ttl_seconds": record.ttl_seconds,
        "persistent": record.persistent,
        "max_lifetime_seconds": record.max_lifetime_seconds,
        "boot_ms": record.boot_ms,
        "boot_mode": record.boot_mode.value,
        "isolation": asdict(record.isolation),
        "generation": record.generation,
    }
    body["network_mode"] = record.network.mode.value
    if record.network_group is not None:
        body["network_group"] = record.network_group
    if record.grants:
        body["secrets"] = [shown_grant(grant) for grant in record.grants]
    body["idle_seconds"] = record.idle_seconds
    body["idle_action"] = record.idle_action.value
    if record.name is not None:
        body["name"] = record.name
    if record.status_reason is not None:
        body["status_reason"] = record.status_reason
    if record.parent_id is not None:
        body["parent_id"] = record.parent_id
    if record.fork_tree_id is not None:
        body["fork_tree_id"] = record.fork_tree_id
    if record.snapshot_id is not None:
        body["from_snapshot"] = record.snapshot_id
    if record.checkpoint_id is not None:
        body["checkpoint_id"] = record.checkpoint_id
    if record.started_at is not None:
        body["started_at"] = rfc3339(record.started_at)
    if record.expires_at is not None:
        body["expires_at"] = rfc3339(record.expires_at)
    if record.ends_at is not None:
        body["ends_at"] = rfc3339(record.ends_at)
    if record.termination is not None:
        body["termination"] = without_none(
            {
                "reason": record.termination.reason.value,
                "at": rfc3339(record.termination.at),
                "signal": record.termination.signal,
                "detail": record.termination.detail,
            }
        )
    return body


def fork_tree(parent_id: str, made: Any, at: float) -> dict[str, Any]:
    body: dict[str, Any] = {
        "tree_id": made.tree_id,
        "parent_id": parent_id,
        "at": rfc3339(at),
        "pause_ms": round(made.pause_ms, 1),
        "children": [sandbox(child) for child in made.children],
    }
    if made.errors:
        body["errors"] = [{"index": n, "err": e.message, "code": e.code} for n, e in sorted(made.errors.items())]
    return body


def snapshot(one: Any, disk_bytes: int) -> dict[str, Any]:
    return without_none(
        {
            "id": one.id,
            "sandbox_id": one.sandbox_id,
            "name": one.name,
            "workspace": one.workspace,
            "template": one.template,
            "template_resolved": one.template_name,
            "template_id": one.template_id,
            "cpus": one.shape.cpus,
            "memory_mb": one.shape.memory_mb,
            "disk_mb": one.disk_mb,
            "memory": one.memory,
            "metadata": {k: v for k, v in one.metadata.items() if not k.startswith(SECRET_METADATA_PREFIX)},
            "size_bytes": one.size_bytes,
            "disk_bytes": disk_bytes,
            "parent_snapshot_id": one.parent_snapshot_id,
            "created_at": rfc3339(one.created_at),
        }
    )


def lifecycle(record: Sandbox, idle_seconds: int) -> dict[str, Any]:
    return without_none(
        {
            "ttl_seconds": record.ttl_seconds,
            "persistent": record.persistent,
            "idle_seconds": idle_seconds,
            "expires_at": rfc3339(record.expires_at) if record.expires_at is not None else None,
            "ends_at": rfc3339(record.ends_at) if record.ends_at is not None else None,
        }
    )


def file_entry(entry: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "name": entry.name,
        "path": entry.path,
        "type": entry.type,
        "is_dir": entry.type == "dir",
        "size": entry.size,
        "mode": f"{entry.mode:04o}",
        "mtime": entry.mtime_ns // 1_000_000_000,
        "mtime_ns": entry.mtime_ns,
        "uid": entry.uid,
        "gid": entry.gid,
        "owner": entry.owner,
        "group": entry.group,
    }
    if entry.target is not None:
        body["target"] = entry.target
    try:
        entry.raw_name.decode("utf-8")
    except UnicodeDecodeError:
        body["name_b64"] = b64url(entry.raw_name)
    return body


def b64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def exec_info(info: Any, result: CommandResult | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "exec_id": info.id,
        "status": "running" if info.running else "exited",
        "pid": info.pid,
        "detached": info.detach,
        "started_at": rfc3339(min(info.started_ns / 1e9, 253402300799.0)),
        "output_bytes": info.offset,
    }
    if result is not None:
        fields = result_fields(result)
        body.update({k: v for k, v in fields.items() if k not in {"duration_us", "exec_id"}})
    elif info.exit is not None:
        end = info.exit
        body["exit_code"] = end.exit_code
        body["duration_ms"] = round(end.duration_ms)
        body["termination"] = without_none(
            {
                "reason": end.reason,
                "signal": end.signal,
                "signal_number": end.signal_number,
                "detail": end.detail,
                "oom_kills": end.oom_kills or None,
            }
        )
    return body


def template(family: Any, default_shape: tuple[int, int]) -> dict[str, Any]:
    shapes = sorted(family.shapes, key=lambda m: (m.template.shape.cpus, m.template.shape.memory_mb))
    usual = (default_shape[0], shapes[-1].furnishing.memory_mb or default_shape[1])
    exact = [m for m in shapes if (m.template.shape.cpus, m.template.shape.memory_mb) == usual]
    shown = (exact or shapes)[-1].template
    body: dict[str, Any] = {
        "name": family.name,
        "aliases": list(family.aliases),
        "description": family.description,
        "cpu": shown.shape.cpus,
        "memory_mb": shown.shape.memory_mb,
        "disk_mb": shown.disk_mb,
        "size_bytes": sum(m.template.size_bytes for m in shapes),
        "is_global": family.workspace is None,
        "state": "ready",
        "created_at": rfc3339(shown.created_at),
        "shapes": [
            {
                "id": m.template.id,
                "cpus": m.template.shape.cpus,
                "memory_mb": m.template.shape.memory_mb,
                "size_bytes": m.template.size_bytes,
                "created_at": rfc3339(m.template.created_at),
            }
            for m in shapes
        ],
    }
    if family.snapshot_id is not None:
        body["from_snapshot"] = family.snapshot_id
    return body


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
