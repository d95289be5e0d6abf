"""The OpenAPI document against the server: generated requests, each answer checked against the document."""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from cloche_server.api.app import bare_app
from cloche_server.api.openapi import REQUESTS, build_document
from cloche_server.core.secrets import NAME
from cloche_server.settings import Settings
from kit.client import Api, Box

#: A fixed seed finds the same again; the other half of the run looks elsewhere each time.
SEEDS = (20261129, int(os.environ.get("CLOCHE_TEST_SEED") or secrets.randbelow(2**32)))
EXAMPLES = 12
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
    "terminal_terminal",
    "terminal_ssh",
}
#: Nobody is there, so nothing is sent anywhere.
RECEIVER = "https://receiver.invalid/hook"
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f of-nobody"
#: Snapshots and webhooks that no generated request may delete.
KEPT: set[str] = set()
RUN: dict[str, list[Any]] = {
    "cpus": [1], "memory_mb": [256], "template": ["base"], "callback_url": [RECEIVER], "timeout_seconds": [0.5, 2],
    "source": ["print(1)"],
}  # fmt: skip
#: What puts the sandbox of all tests back into the state that the others need.
UNDO = {"lineage_pause": "resume", "lineage_hibernate": "wake", "lineage_stop": "start"}
#: Their waits are cut short in `aimed`.
NARROWED = {"sandboxes_wait", "processes_wait", "processes_write", "processes_output"}
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


def aimed(document: dict[str, Any], sandbox: str, exec_id: str, snapshot: str, webhook: str) -> dict[str, Any]:
    """Most ids are those of something that lives; nothing runs for ever, and nothing is baked."""
    found = closed(document)
    values = {"sandbox_id": [sandbox, "z" * 20], "exec_id": [exec_id, "nope"], "name": ["base", "nope"]}
    values["snapshot_id"] = [snapshot, "z" * 20]
    values |= {"webhook_id": [webhook, "z" * 20], "key_id": ["ssh_0000000000000000", "nope"]}
    values |= {"run_id": ["z" * 20, "nope"], "process_id": [exec_id, "nope"], "token_prefix": ["pds_00000000", "nope"]}
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
    found["components"]["schemas"]["RestoreBody"]["properties"]["snapshot_id"] = {"enum": [snapshot, "nope", None]}
    # Not the whole disk, and no attributes of what others need.
    for body in ("CopyBody", "AttributesBody", "TouchBody", "LinkBody", "GlobBody", "GrepBody"):
        fields = found["components"]["schemas"][body]["properties"]
        for field in fields.keys() & {"path", "from", "to"}:
            fields[field] = {"enum": ["/tmp/fuzzed", "/etc/apt", "/nope/x"]}
        for field in fields.keys() & {"path_b64", "from_b64", "to_b64"}:
            fields[field] = {"enum": [None]}
    _only(found["components"]["schemas"])
    create = found["components"]["schemas"]["CreateBody"]["properties"]
    for name, allowed in {"cpus": [1], "cpu": [1], "vcpus": [1], "memory_mb": [256], "disk_mb": [4096, 5000]}.items():
        create[name] = {"enum": [*allowed, None]}
    create["max_lifetime_seconds"] = {"enum": [0, 600, None]}
    create["disk_gb"] = {"enum": [4, None]}
    create["template"] = {"enum": ["base", "ubuntu-24.04", None]}
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
    return found


def _only(schemas: dict[str, Any]) -> None:
    """Fields with one value."""
    for body, field, value in (
        ("WebhookBody", "url", RECEIVER),
        ("WebhookPatch", "url", RECEIVER),
        ("SshKeyBody", "public_key", PUBLIC_KEY),
    ):
        schemas[body]["properties"][field] = {"enum": [value]}


@pytest.fixture(scope="module")
def document(api: Api) -> dict[str, Any]:
    return dict(api.call("GET", "/openapi.json"))


@pytest.fixture(scope="module")
def fuzzed(api: Api, document: dict[str, Any], shared: Box) -> Iterator[Any]:
    exec_id = shared.start("echo recorded; exit 3")
    shared.follow_all(exec_id)
    snapshot = shared.snapshot()
    webhook = api.call("POST", "/v1/webhooks", json={"url": RECEIVER})["id"]
    found = schemathesis.openapi.from_dict(aimed(document, shared.id, exec_id, snapshot, webhook))
    found.config.update(base_url=api.url)
    KEPT.update((snapshot, webhook))
    yield found
    KEPT.difference_update((snapshot, webhook))
    api.call("DELETE", f"/v1/webhooks/{webhook}")
    api.call("DELETE", f"/v1/snapshots/{snapshot}")


def _operations() -> list[tuple[str, bool]]:
    """Ids of all operations, and whether a request of each can be wrong."""
    found = []
    for path, operations in build_document(bare_app(), Settings()).get("paths", {}).items():
        for operation in operations.values():
            varied = "{" in path or "requestBody" in operation or bool(operation.get("parameters"))
            found.append((operation["operationId"], varied))
    return found


OPERATIONS = _operations()


def _check(case: schemathesis.Case, api: Api) -> None:
    name = case.operation.definition.raw["operationId"]
    path = case.path_parameters or {}
    if name == "sandboxes_delete" and path.get("sandbox_id") in api.made:
        return
    if name.startswith(("snapshots_delete_", "webhooks_delete")) and KEPT & set(path.values()):
        return
    excluded: list[CheckFunction] = [not_a_server_error, *([positive_data_acceptance] if name in SEMANTIC else ())]
    headers = {"Authorization": f"Bearer {api.token}"}
    response = case.call(headers=headers, timeout=120)
    # The check does not know 431; and labels that are not well formed are other parameters, which are ignored.
    # What is narrower in `aimed` than for the server: a template beside a snapshot, and a wait of the usual length.
    body = case.body if isinstance(case.body, dict) else {}
    narrowed = body.get("from_snapshot") in KEPT or (
        name in NARROWED and not {"timeout", "follow"} & set(case.query or {})
    )
    # Any name will do for a new secret, also one that is the text of `null`.
    named = name == "secrets_put" and NAME.fullmatch(str(path.get("name")))
    if response.status_code == 431 or name == "sandboxes_list" or narrowed or named:
        excluded.append(negative_data_rejection)
    try:
        case.validate_response(response, excluded_checks=excluded, headers=headers)
        assert response.status_code < 500 or response.status_code in {501, 503, 504, 507}, response.text
    finally:
        _undo(name, path, response, api)


def _undo(name: str, path: Mapping[str, Any], response: Any, api: Api) -> None:
    """Deletes what was made, and wakes what was put to sleep."""
    if response.status_code >= 300:
        return
    if name in UNDO:
        api.call("POST", f"/v1/sandboxes/{path['sandbox_id']}/{UNDO[name]}")
    elif name == "usage_set_budget":
        api.call("DELETE", f"/v1/sandboxes/{path['sandbox_id']}/budget")
    elif name == "snapshots_take_snapshot":
        api.call("DELETE", f"/v1/snapshots/{response.json()['id']}")
    elif name == "snapshots_promote_snapshot":
        api.call("DELETE", f"/v1/templates/{response.json()['name']}")
    elif name == "processes_start":
        api.call("DELETE", f"/v1/sandboxes/{path['sandbox_id']}/processes/{response.json()['process_id']}")
    elif name == "secrets_put":
        api.call("DELETE", f"/v1/secrets/{path['name']}")
    elif name == "ports_declare":
        api.call("DELETE", f"/v1/sandboxes/{path['sandbox_id']}/ports/{response.json()['port']}")
    elif name == "ssh_create_key":
        api.call("DELETE", f"/v1/ssh-keys/{response.json()['id']}")
    elif name == "webhooks_create":
        api.call("DELETE", f"/v1/webhooks/{response.json()['id']}")
    elif response.status_code == 201 and name in {"sandboxes_create", "lineage_fork", "lineage_fork_tree"}:
        made = response.json()
        for one in made.get("children", [made]):
            api.request("DELETE", f"/v1/sandboxes/{one['id']}")


def _try(strategy: Any, api: Api, number: int, examples: int) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=strategy)
    def run(case: schemathesis.Case) -> None:
        _check(case, api)

    run()


@pytest.mark.parametrize("number", SEEDS, ids=["same", "other"])
@pytest.mark.parametrize(("name", "varied"), OPERATIONS, ids=[name for name, _ in OPERATIONS])
def test_operation(fuzzed: Any, api: Api, name: str, varied: bool, number: int) -> None:
    operation = fuzzed.find_operation_by_id(name)
    if name.startswith("later_") or not varied:
        _try(operation.as_strategy(GenerationMode.POSITIVE), api, number, 2 if varied else 1)
    else:
        good, bad = (1, 2) if name in SLOW else (EXAMPLES, EXAMPLES)
        _try(operation.as_strategy(GenerationMode.POSITIVE), api, number, good)
        _try(operation.as_strategy(GenerationMode.NEGATIVE), api, number, bad)
