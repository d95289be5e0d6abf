"""What generated requests are about: the document, narrowed to ids that live and to work that ends."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from cloche_server.api.openapi import REQUESTS

#: These answer 400 to what a schema cannot say: a user who is not in the guest, a path that is not absolute once
#: it is decoded, a disk smaller than the template's.
SEMANTIC = {
    "sandboxes_create",
    "exec_run",
    "exec_stream",
    "files_read",
    "files_write",
    "files_delete",
    "files_move",
} | {
    "files_list_dir",
    "files_stat",
    "files_head",
    "files_copy",
    "files_attributes",
    "files_touch",
    "files_link",
    "files_readlink",
    "files_tree_use",
    "files_disk_use",
    "files_glob",
    "files_grep",
    "files_replace",
    "files_archive",
    "files_extract",
    "files_watch",
    "files_url",
    "files_link_read",
    "files_link_head",
    "files_link_write",
    "git_clone",
    "git_status",
    "git_diff",
    "git_commit",
    "git_branches",
    "git_branch",
    "git_checkout",
    "git_push",
    "git_pull",
    "git_log",
    "files_mkdir",
    "sandboxes_list",
    "exec_get",
    "exec_attach",
    "code_run",
    "code_create_context",
    "repl_create",
    "repl_run",
    "repl_once",
    "lineage_fork",
    "lineage_fork_tree",
    "lineage_promote",
    "snapshots_restore",
    "snapshots_promote_snapshot",
    "snapshots_import_snapshot",
    "templates_delete",
    "events_of_sandbox",
    "events_of_workspace",
    "webhooks_create",
    "webhooks_patch",
    "usage_sum",
    "network_put",
    "secrets_put",
    "ports_declare",
    "ports_get",
    "ports_remove",
    "ports_token",
    "run_run",
    "run_batch",
    "ssh_create_key",
    "processes_start",
    "processes_write",
    "processes_signal",
    "processes_output",
    "services_put",
    "services_get",
    "services_wait",
    "services_start",
    "services_stop",
    "services_restart",
    "services_delete",
    "sandboxes_logs",
    "terminal_terminal",
    "terminal_ssh",
}
#: Nobody is there, so nothing is sent anywhere.
RECEIVER = "https://receiver.invalid/hook"
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f of-nobody"
RUN: dict[str, list[Any]] = {
    "cpus": [1], "memory_mb": [256], "template": ["base"], "callback_url": [RECEIVER], "timeout_seconds": [0.5, 2],
    "source": ["print(1)"],
}  # fmt: skip
#: What puts the sandbox of all tests back into the state that the others need.
UNDO = {"lineage_pause": "resume", "lineage_hibernate": "wake", "lineage_stop": "start"}
#: Their waits, and what they run, are narrower in `aimed` than they are.
NARROWED = {
    "run_run",
    "run_batch",
    "sandboxes_wait",
    "processes_wait",
    "processes_write",
    "processes_output",
    "services_wait",
}
#: Streams that stay open until the caller hangs up, whatever else the request says.
ENDLESS = {"files_watch", "network_log"}
#: Each of these starts, saves or ends a machine, which takes seconds.
SLOW = {
    "lineage_stop",
    "lineage_start",
    "lineage_restart",
    "lineage_fork",
    "lineage_fork_tree",
    "snapshots_take_snapshot",
    "snapshots_promote_snapshot",
    "snapshots_export_snapshot",
    "lineage_hibernate",
    "lineage_wake",
    "snapshots_restore",
    "run_run",
    "run_batch",
}


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with no room for fields that it does not name, in answers."""
    found = copy.deepcopy(document)
    requests = {model.__name__ for model in REQUESTS}
    for name, model in found["components"]["schemas"].items():
        if name not in requests:
            model.setdefault("additionalProperties", False)
    return found


def _aim_parameters(found: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Ids, and what would wait or walk for long."""
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["responses"].get("201", {}).pop("links", None)
            operation.pop("security", None)  # every request here has the token; `test_auth` is about others
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "path" and parameter["name"] in values:
                    parameter["schema"] = {"type": "string", "enum": values[parameter["name"]]}
                if path.endswith("/fs/watch") and parameter["name"] == "path":
                    parameter["schema"] = {"type": "string", "enum": ["/nope", "/etc/hostname"]}  # a watch has no end
                    parameter["required"] = True
                if path.endswith("/fs/archive") and parameter["name"] == "path":
                    parameter["schema"] = {"type": "string", "enum": ["/etc/apt", "/nope"]}
                if path.endswith(("/fs/du", "/fs/df")) and parameter["name"] == "path":
                    parameter["schema"] = {"type": "string", "enum": ["/etc", "/nope"]}
                if path.endswith(("/logs", "/events")) and parameter["name"] == "follow":
                    parameter["schema"] = {"type": "string", "enum": ["0", "false", ""]}
                if path.endswith("/output") and parameter["name"] == "follow":
                    parameter["schema"] = {"type": "string", "enum": ["0", "false", ""]}
                    parameter["required"] = True
                if path.endswith("/stdin") and parameter["name"] == "timeout":
                    parameter["schema"] = {"type": "number", "minimum": 0, "maximum": 0.2}
                    parameter["required"] = True
                if path.endswith("/wait") and parameter["name"] == "timeout":
                    parameter["schema"] = {"type": "number", "minimum": 0, "maximum": 0.2}
                    parameter["required"] = True


def aimed(document: dict[str, Any], sandbox: str, exec_id: str, snapshot: str, webhook: str) -> dict[str, Any]:
    """Most ids are those of something that lives; nothing runs for ever, and nothing is baked."""
    found = closed(document)
    values = {"sandbox_id": [sandbox, "z" * 20], "exec_id": [exec_id, "nope"], "name": ["base", "nope"]}
    values["snapshot_id"] = [snapshot, "z" * 20]
    values |= {"webhook_id": [webhook, "z" * 20], "run_id": ["z" * 20, "nope"], "process_id": [exec_id, "nope"]}
    values |= {"token_prefix": ["pds_00000000", "nope"], "service_name": ["fuzzed", "nope"]}
    values["key_id"] = ["ssh_0000000000000000", "nope"]
    _aim_parameters(found, values)
    found["components"]["schemas"]["RestoreBody"]["properties"]["snapshot_id"] = {"enum": [snapshot, "nope", None]}
    # Not the whole disk, and no attributes of what others need.
    for body in ("CopyBody", "AttributesBody", "TouchBody", "LinkBody", "GlobBody", "GrepBody"):
        fields = found["components"]["schemas"][body]["properties"]
        for field in fields.keys() & {"path", "from", "to"}:
            fields[field] = {"enum": ["/tmp/fuzzed", "/etc/apt", "/nope/x"]}
        for field in fields.keys() & {"path_b64", "from_b64", "to_b64"}:
            fields[field] = {"enum": [None]}
    _only(found["components"]["schemas"])
    _small(found, snapshot)
    return found


def _only(schemas: dict[str, Any]) -> None:
    """Fields with one value."""
    for body, field, value in (
        ("WebhookBody", "url", RECEIVER),
        ("WebhookPatch", "url", RECEIVER),
        ("SshKeyBody", "public_key", PUBLIC_KEY),
    ):
        schemas[body]["properties"][field] = {"enum": [value]}


def _small(found: dict[str, Any], snapshot: str) -> None:
    """What is made is small, and ends."""
    create = found["components"]["schemas"]["CreateBody"]["properties"]
    for name, allowed in {"cpus": [1], "cpu": [1], "vcpus": [1], "memory_mb": [256], "disk_mb": [4096, 5000]}.items():
        create[name] = {"enum": [*allowed, None]}
    create["max_lifetime_seconds"] = {"enum": [0, 600, None]}
    create["disk_gb"] = {"enum": [4, None]}
    create["template"] = {"enum": ["base", "ubuntu-24.04", None]}
    some = [{"name": "a", "command": "exec sleep 600", "stop_grace_seconds": 0}, {"name": "b", "argv": ["true"]}]
    create["services"] = {"enum": [[], some, [*some, some[0]], [{**some[0], "depends_on": ["nope"]}]]}
    create["wait_for_services_seconds"] = {"enum": [0, 0.5, 1]}
    service = found["components"]["schemas"]["ServiceBody"]["properties"]
    # Each start of a server of its own is a process that somebody has to end.
    service |= {"depends_on": {"enum": [[], ["nope"]]}, "stop_grace_seconds": {"enum": [0, 0.1]}}
    run = found["components"]["schemas"]["RunBody"]["properties"]
    # Each runs a machine; one that needs another size would bake it.
    run |= {name: {"enum": [*allowed, None]} for name, allowed in RUN.items()}
    run["language"] = {"enum": ["python", "Bash", "nope"]}
    found["components"]["schemas"]["RunBatchBody"]["properties"]["runs"]["maxItems"] = 2
    budget = found["components"]["schemas"]["BudgetBody"]["properties"]
    for name in ("cpu_seconds", "wall_seconds", "exec_count", "bytes_out"):
        budget[name] = {"enum": [10**9, None]}  # none is reached
    create["from_snapshot"] = {"enum": [snapshot, "nope", None]}
    for body in ("ForkBody", "ForkTreeBody"):
        found["components"]["schemas"][body]["properties"]["count"] = {"enum": [1, 2]}
        found["components"]["schemas"][body]["properties"]["max_lifetime_seconds"] = {"enum": [0, 600, None]}
