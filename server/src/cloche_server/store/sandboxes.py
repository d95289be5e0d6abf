"""Sandbox records and rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cloche_server.core.budgets import Account
from cloche_server.core.happenings import Happening
from cloche_server.core.lifecycle import Status
from cloche_server.core.netctl import grant_from_json, grant_to_json, policy_from_json, policy_to_json
from cloche_server.core.network import NetworkMode, NetworkPolicy
from cloche_server.core.records import (
    BootMode,
    ExecDefaults,
    IdleAction,
    Isolation,
    ProcessRef,
    Resources,
    Sandbox,
    Termination,
    TerminationReason,
    with_status,
)
from cloche_server.core.walls import Walls
from cloche_server.store.accounts import account_row
from cloche_server.store.db import Database, Row
from cloche_server.store.events import EventStore, statements


def to_row(sandbox: Sandbox) -> dict[str, Any]:
    return {
        "id": sandbox.id,
        "workspace": sandbox.workspace,
        "name": sandbox.name,
        "status": sandbox.status.value,
        "template": sandbox.template,
        "template_name": sandbox.template_name,
        "template_id": sandbox.template_id,
        "cpus": sandbox.resources.cpus,
        "memory_mb": sandbox.resources.memory_mb,
        "disk_mb": sandbox.resources.disk_mb,
        "isolation": json.dumps(asdict(sandbox.isolation)),
        "defaults": json.dumps(
            {"env": dict(sandbox.defaults.env), "cwd": sandbox.defaults.cwd, "user": sandbox.defaults.user}
        ),
        "metadata": json.dumps(dict(sandbox.metadata)),
        "created_at": sandbox.created_at,
        "ttl_seconds": sandbox.ttl_seconds,
        "persistent": int(sandbox.persistent),
        "expires_at": sandbox.expires_at,
        "started_at": sandbox.started_at,
        "boot_ms": sandbox.boot_ms,
        "boot_mode": sandbox.boot_mode.value,
        "process": json.dumps(asdict(sandbox.process)) if sandbox.process else None,
        "termination": json.dumps(asdict(sandbox.termination)) if sandbox.termination else None,
        "ended_at": sandbox.ended_at,
        "generation": sandbox.generation,
        "version": sandbox.version,
        "layer_id": sandbox.layer_id,
        "cold": int(sandbox.cold),
        "parent_id": sandbox.parent_id,
        "fork_tree_id": sandbox.fork_tree_id,
        "snapshot_id": sandbox.snapshot_id,
        "checkpoint_id": sandbox.checkpoint_id,
        "idle_seconds": sandbox.idle_seconds,
        "idle_action": sandbox.idle_action.value,
        "status_reason": sandbox.status_reason,
        "walls": json.dumps(asdict(sandbox.walls)),
        "cpu_origin": sandbox.cpu_origin,
        "max_lifetime_seconds": sandbox.max_lifetime_seconds,
        "ends_at": sandbox.ends_at,
        "account_id": sandbox.account_id,
        "network": json.dumps(policy_to_json(sandbox.network)),
        "grants": json.dumps([grant_to_json(grant) for grant in sandbox.grants]),
        "network_group": sandbox.network_group,
        "group_address": sandbox.group_address,
    }


def from_row(row: Row) -> Sandbox:
    termination = None
    if row["termination"]:
        fields = json.loads(row["termination"])
        termination = Termination(**{**fields, "reason": TerminationReason(fields["reason"])})
    return Sandbox(
        id=row["id"],
        workspace=row["workspace"],
        name=row["name"],
        status=Status(row["status"]),
        template=row["template"],
        template_name=row["template_name"],
        template_id=row["template_id"],
        resources=Resources(row["cpus"], row["memory_mb"], row["disk_mb"]),
        isolation=Isolation(**json.loads(row["isolation"])),
        defaults=ExecDefaults(**json.loads(row["defaults"])),
        metadata=json.loads(row["metadata"]),
        created_at=row["created_at"],
        ttl_seconds=row["ttl_seconds"],
        persistent=bool(row["persistent"]),
        expires_at=row["expires_at"],
        started_at=row["started_at"],
        boot_ms=row["boot_ms"],
        boot_mode=BootMode(row["boot_mode"]),
        process=ProcessRef(**json.loads(row["process"])) if row["process"] else None,
        termination=termination,
        ended_at=row["ended_at"],
        generation=row["generation"],
        version=row["version"],
        layer_id=row["layer_id"],
        cold=bool(row["cold"]),
        parent_id=row["parent_id"],
        fork_tree_id=row["fork_tree_id"],
        snapshot_id=row["snapshot_id"],
        checkpoint_id=row["checkpoint_id"],
        idle_seconds=row["idle_seconds"],
        idle_action=IdleAction(row["idle_action"]),
        status_reason=row["status_reason"],
        # A server that knew no meters has left nothing here.
        walls=Walls(**json.loads(row["walls"] or "{}") or {"since": row["created_at"]}),
        cpu_origin=row["cpu_origin"],
        max_lifetime_seconds=row["max_lifetime_seconds"],
        ends_at=row["ends_at"],
        account_id=row["account_id"],
        # A sandbox of a server that knew no network has no card.
        network=policy_from_json(json.loads(row["network"])) if row["network"] else NetworkPolicy(NetworkMode.NONE),
        grants=tuple(grant_from_json(grant) for grant in json.loads(row["grants"])),
        network_group=row["network_group"],
        group_address=row["group_address"],
    )


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """The `Idempotency-Key` that a sandbox is made for, and a digest of the request that came with it."""

    key: str
    request_hash: str


class SandboxStore:
    """Where sandbox records live. Every update is conditional on the version it came from."""

    def __init__(self, database: Database) -> None:
        self._db = database
        #: The journal, in the same database.
        self.events = EventStore(database)

    @property
    def is_new(self) -> bool:
        """There was no database before this server."""
        return self._db.new

    async def insert(self, sandbox: Sandbox, key: IdempotencyKey | None = None, account: Account | None = None) -> None:
        """All or nothing. Raises `Conflict` when the id or the key exists."""
        rows: list[tuple[str, dict[str, Any]]] = [("insert_sandbox", to_row(sandbox))]
        if key is not None:
            taken = {"workspace": sandbox.workspace, "sandbox_id": sandbox.id, "created_at": sandbox.created_at}
            rows.append(("insert_idempotency", {**taken, **asdict(key)}))
        if account is not None:
            rows.append(("put_budget", account_row(account)))
        await self._db.execute_all(rows)

    async def update(self, sandbox: Sandbox, happenings: Sequence[Happening] = ()) -> None:
        """Writes `sandbox`, whose version is one above the stored one, and what is told of it: both or neither.
        Raises `Conflict` when another version is stored."""
        await self._db.execute_all([("update_sandbox", to_row(sandbox)), *statements(happenings)], conditional=True)

    async def get(self, sandbox_id: str) -> Sandbox | None:
        rows = await self._db.fetch("get_sandbox", id=sandbox_id)
        return from_row(rows[0]) if rows else None

    async def get_of(self, workspace: str, sandbox_id: str) -> Sandbox | None:
        """As `get`. A record of another workspace is not read at all, so that it takes no longer than none."""
        rows = await self._db.fetch("get_sandbox_of", id=sandbox_id, workspace=workspace)
        return from_row(rows[0]) if rows else None

    async def living(self) -> list[Sandbox]:
        """Every record that is not deleted, oldest first."""
        return [from_row(row) for row in await self._db.fetch("all_sandboxes")]

    async def forget(self, sandbox_id: str, happenings: Sequence[Happening] = ()) -> None:
        """Removes the record of a create that came to nothing with its budget and meter, and sets its key free."""
        names = ("forget_budget", "forget_sandbox", "forget_idempotency", "forget_usage")
        await self._db.execute_all([*((name, {"id": sandbox_id}) for name in names), *statements(happenings)])

    async def prune(self, before: float) -> int:
        return await self._db.execute("prune_sandboxes", before=before)

    async def template_users(self, template_id: str) -> int:
        return int((await self._db.fetch("count_template_users", template_id=template_id))[0]["n"])

    async def delete_all(self, now: float) -> None:
        """Marks every living sandbox for deletion by the next server. For when no server runs."""
        for record in await self.living():
            if record.status is not Status.DELETING:
                await self.update(with_status(record, Status.DELETING, now, version=record.version + 1))
