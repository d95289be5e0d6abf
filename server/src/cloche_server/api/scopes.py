"""Which call needs what of a token: one table, by operation id, and the one place that asks it.

A call that is not in the table needs everything, so that a new route is closed until somebody says what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from starlette.requests import HTTPConnection

from cloche_server.api.context import services_of, token_of
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import TokenInfo
from cloche_server.core.scopes import NOWHERE, Scope


class Reach(Enum):
    """What a call touches: one sandbox (or its snapshots, or what the route itself narrows down to one), or more."""

    SANDBOX = "sandbox"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Need:
    """`scope`: the least that will do. A token of one sandbox makes calls of that reach only."""

    scope: Scope
    reach: Reach = Reach.SANDBOX


_READ: Final = Need(Scope.READ)
_EXEC: Final = Need(Scope.EXEC)
_ADMIN: Final = Need(Scope.ADMIN)
_READ_ALL: Final = Need(Scope.READ, Reach.WORKSPACE)
_EXEC_ALL: Final = Need(Scope.EXEC, Reach.WORKSPACE)
_ADMIN_ALL: Final = Need(Scope.ADMIN, Reach.WORKSPACE)

#: `read` never wakes a sandbox, never reaches into one and changes nothing.
NEEDS: Final[dict[str, Need]] = {
    "service_me": _READ,
    # sandboxes
    "sandboxes_list": _READ,
    "sandboxes_get": _READ,
    "sandboxes_wait": _READ,
    "sandboxes_get_lifecycle": _READ,
    # of the console; what runs in the sandbox is asked for another scope in the route
    "sandboxes_logs": _READ,
    "sandboxes_create": _EXEC_ALL,
    "sandboxes_patch": _EXEC,
    "sandboxes_delete": _EXEC,
    "sandboxes_set_lifecycle": _EXEC,
    "sandboxes_load": _EXEC,
    "sandboxes_selftest": _EXEC,
    # commands and files
    "exec_run": _EXEC,
    "exec_stream": _EXEC,
    "exec_list": _EXEC,
    "exec_get": _EXEC,
    "exec_attach": _EXEC,
    "exec_kill": _EXEC,
    "processes_start": _EXEC,
    "processes_list": _EXEC,
    "processes_get": _EXEC,
    "processes_wait": _EXEC,
    "processes_signal": _EXEC,
    "processes_resize": _EXEC,
    "processes_write": _EXEC,
    "processes_close_stdin": _EXEC,
    "processes_delete": _EXEC,
    "processes_output": _EXEC,
    "services_list": _EXEC,
    "services_get": _EXEC,
    "services_put": _EXEC,
    "services_delete": _EXEC,
    "services_start": _EXEC,
    "services_stop": _EXEC,
    "services_restart": _EXEC,
    "services_wait": _EXEC,
    "terminal_terminal": _EXEC,
    "terminal_ssh": _EXEC,
    "code_run": _EXEC,
    "code_list_contexts": _EXEC,
    "code_create_context": _EXEC,
    "code_delete_context": _EXEC,
    "code_interrupt_context": _EXEC,
    "code_restart_context": _EXEC,
    "code_answer_input": _EXEC,
    "repl_languages": _READ,
    "repl_create": _EXEC,
    "repl_list": _EXEC,
    "repl_run": _EXEC,
    "repl_delete": _EXEC,
    "repl_once": _EXEC,
    "files_read": _EXEC,
    "files_write": _EXEC,
    "files_delete": _EXEC,
    "files_list_dir": _EXEC,
    "files_stat": _EXEC,
    "files_mkdir": _EXEC,
    "files_move": _EXEC,
    # one-shot runs: each makes a sandbox of its own
    "run_run": _EXEC_ALL,
    "run_batch": _EXEC_ALL,
    "run_languages": _READ,
    "run_get": _EXEC_ALL,
    "run_delete": _EXEC_ALL,
    "files_head": _EXEC,
    "files_copy": _EXEC,
    "files_attributes": _EXEC,
    "files_touch": _EXEC,
    "files_link": _EXEC,
    "files_readlink": _EXEC,
    "files_tree_use": _EXEC,
    "files_disk_use": _EXEC,
    "files_glob": _EXEC,
    "files_grep": _EXEC,
    "files_replace": _EXEC,
    "files_archive": _EXEC,
    "files_extract": _EXEC,
    "files_watch": _EXEC,
    "files_url": _EXEC,
    # git
    "git_clone": _EXEC,
    "git_status": _EXEC,
    "git_diff": _EXEC,
    "git_commit": _EXEC,
    "git_branches": _EXEC,
    "git_branch": _EXEC,
    "git_checkout": _EXEC,
    "git_push": _EXEC,
    "git_pull": _EXEC,
    "git_log": _EXEC,
    # ports: what listens is asked in the sandbox, and a link opens it
    "ports_list": _EXEC,
    "ports_get": _EXEC,
    "ports_declare": _EXEC,
    "ports_remove": _EXEC,
    "ports_token": _EXEC,
    # lineage: forks are other sandboxes, and so are siblings
    "lineage_fork": _EXEC_ALL,
    "lineage_fork_tree": _EXEC_ALL,
    "lineage_promote": _EXEC_ALL,
    "lineage_pause": _EXEC,
    "lineage_resume": _EXEC,
    "lineage_hibernate": _EXEC,
    "lineage_wake": _EXEC,
    "lineage_stop": _EXEC,
    "lineage_start": _EXEC,
    "lineage_restart": _EXEC,
    # snapshots: an archive holds the memory of its sandbox
    "snapshots_snapshots": _READ,
    "snapshots_get_snapshot": _READ,
    "snapshots_lineage": _READ_ALL,
    "snapshots_take_snapshot": _EXEC,
    "snapshots_restore": _EXEC,
    "snapshots_verify": _EXEC,
    "snapshots_delete_snapshot": _EXEC,
    "snapshots_export_snapshot": _EXEC,
    "snapshots_promote_snapshot": _EXEC_ALL,
    "snapshots_import_snapshot": _ADMIN_ALL,
    # events and webhooks
    "events_of_sandbox": _READ,
    "events_of_workspace": _READ,
    "webhooks_create": _ADMIN_ALL,
    "webhooks_list": _ADMIN_ALL,
    "webhooks_get": _ADMIN_ALL,
    "webhooks_patch": _ADMIN_ALL,
    "webhooks_delete": _ADMIN_ALL,
    "webhooks_try": _ADMIN_ALL,
    # usage and budgets: what shares a budget is more than one sandbox, and nobody raises their own limit
    "usage_get": _READ,
    "usage_sum": _READ,
    "usage_get_budget": _READ_ALL,
    "usage_set_budget": _EXEC_ALL,
    "usage_delete_budget": _EXEC_ALL,
    # templates
    "templates_list": _READ_ALL,
    "templates_get": _READ_ALL,
    "templates_delete": _ADMIN_ALL,
    "later_post_templates_build": _ADMIN_ALL,
    "later_get_templates_builds": _READ_ALL,
    "later_get_templates_builds_build_id": _READ_ALL,
    # the network: nobody widens their own walls, so a token of one sandbox only looks
    "network_get": _READ,
    "network_put": _EXEC_ALL,
    "network_log": _READ,
    "network_explain": _READ,
    "network_proposal": _READ,
    # secrets
    "secrets_list": _ADMIN_ALL,
    "secrets_get": _ADMIN_ALL,
    "secrets_put": _ADMIN_ALL,
    "secrets_delete": _ADMIN_ALL,
    "secrets_ca": _READ_ALL,
    # access: a token of one sandbox makes, sees and revokes tokens of that sandbox
    "tokens_create": _ADMIN,
    "tokens_list": _ADMIN,
    "tokens_revoke": _ADMIN,
    "tokens_audit": _ADMIN_ALL,
    # SSH: whoever may run commands may say by which keys
    "ssh_create_key": _EXEC,
    "ssh_list_keys": _EXEC,
    "ssh_delete_key": _EXEC,
    "ssh_get": _READ,
}
CLOSED: Final = _ADMIN_ALL


def need_of(operation: str) -> Need:
    return NEEDS.get(operation, CLOSED)


def operation_id(route: Any) -> str:
    """`exec_run`: the tag and the name of the route. All WebSockets are terminals, of one name each."""
    if not hasattr(route, "tags"):
        return f"terminal_{route.name}"
    tag = "later" if route.tags[0] == "not in this release" else route.tags[0]
    return f"{tag}_{route.name}"


def narrowed(only: str | None, asked: str | None, workspace: str) -> tuple[str | None, str]:
    """Which sandbox a list is about, and in which workspace it is looked for, when the token is one of the sandbox
    `only`: that one, whatever is asked for; another one does not exist."""
    if only is None or asked in (None, only):
        return only or asked, workspace
    return asked, NOWHERE


async def authorize(request: HTTPConnection) -> None:
    """Stands before every route below `/v1`, those of WebSockets too. Raises `auth.forbidden`."""
    token = token_of(request)
    need = need_of(operation_id(request.scope["route"]))
    if not token.scope.holds(need.scope):
        raise ClocheError(
            "auth.forbidden",
            f"this call needs a token of scope {need.scope.value}, and this one has {token.scope.value}",
            details={"scope": need.scope.value, "has": token.scope.value},
        )
    if token.sandbox_id is not None:
        await _narrow(request, token, token.sandbox_id, need)


async def _narrow(request: HTTPConnection, token: TokenInfo, only: str, need: Need) -> None:
    """Of a token of one sandbox."""
    if need.reach is not Reach.SANDBOX:
        raise ClocheError(
            "auth.forbidden",
            "this token is for one sandbox, and this call reaches beyond it",
            details={"scope": need.scope.value, "has": token.scope.value, "sandbox_id": only},
        )
    named = request.scope["path_params"]
    if "sandbox_id" in named and named["sandbox_id"] != only:
        request.scope["cloche.workspace"] = NOWHERE
    if "snapshot_id" in named:
        services = await services_of(request)
        if not services.snapshots.is_of(token.workspace, named["snapshot_id"], only):
            request.scope["cloche.workspace"] = NOWHERE
