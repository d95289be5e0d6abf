"""The OpenAPI document: what FastAPI derives from the routes, made complete and true.

What FastAPI cannot know is added here: request bodies (routes read them themselves), the limits of this
server, events of streams, headers and refusals that every route has, and links between the calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from cloche_server.api import (
    wire,
    wire_archive,
    wire_code,
    wire_create,
    wire_events,
    wire_files,
    wire_git,
    wire_lineage,
    wire_logs,
    wire_ports,
    wire_process,
    wire_runs,
    wire_secrets,
    wire_services,
    wire_ssh,
    wire_tokens,
    wire_usage,
)
from cloche_server.api.docs import error_answer, header
from cloche_server.api.scopes import Reach, need_of
from cloche_server.core.filelinks import PREFIX
from cloche_server.core.scopes import Scope
from cloche_server.settings import Settings

REQUESTS: Final[tuple[type[BaseModel], ...]] = (
    wire_create.CreateBody,
    wire.ExecBody,
    wire.LifecycleBody,
    wire.SandboxPatch,
    wire.MkdirBody,
    wire.MoveBody,
    *wire_files.REQUESTS,
    *wire_git.REQUESTS,
    wire_lineage.ForkBody,
    wire_lineage.ForkTreeBody,
    wire_lineage.PromoteBody,
    wire_lineage.RestoreBody,
    wire_lineage.SnapshotBody,
    wire_lineage.StopBody,
    wire_archive.PromoteSnapshotBody,
    wire_tokens.TokenBody,
    wire_ssh.SshKeyBody,
    wire_events.WebhookBody,
    wire_events.WebhookPatch,
    wire_secrets.SecretBody,
    wire_usage.BudgetBody,
    wire_ports.PortBody,
    wire_ports.PreviewTokenBody,
    wire_runs.RunBody,
    wire_runs.RunBatchBody,
    wire_process.ProcessBody,
    wire_process.SignalBody,
    wire_process.InputBody,
    wire_process.SizeBody,
    wire_services.ServiceBody,
    wire_services.HealthBody,
    wire_services.HttpCheckBody,
    wire_create.NamedServiceBody,
    wire_code.CodeBody,
    wire_code.ContextBody,
    wire_code.CodeInputBody,
    wire_code.ReplSessionBody,
    wire_code.ReplRunBody,
    wire_code.ReplBody,
)
EVENTS: Final[tuple[type[BaseModel], ...]] = (
    wire.OutputEvent,
    wire.GapEvent,
    wire.ExitEvent,
    wire_logs.LineEvent,
    wire_logs.LogGapEvent,
    wire_logs.LogEndEvent,
    wire_logs.LogsAnswer,
    *wire_files.EVENTS,
    wire_events.EventAnswer,
    wire_events.MissingAnswer,
    wire_events.StreamEnd,
    wire_process.ProcessOutputEvent,
    wire_process.ProcessExitEvent,
    wire_process.OutputEndEvent,
    wire_code.CodeStartedEvent,
    wire_code.CodeTextEvent,
    wire_code.CodeGapEvent,
    wire_code.CodeResultItem,
    wire_code.CodeErrorItem,
    wire_code.CodeInputEvent,
    wire_code.CodeEndEvent,
    wire.ErrorAnswer,
)
_REF: Final = "#/components/schemas/{model}"
#: Possible on every route, and on every route below `/v1`.
_EVERYWHERE: Final = (405, 431)
_BELOW_V1: Final = (401, 429, 503)
_LIMITS: Final = {
    "X-RateLimit-Limit": header("Requests this token may send at once; absent without a limit", "integer"),
    "X-RateLimit-Remaining": header("How many of them now", "integer"),
    "X-RateLimit-Reset": header("Seconds until it is all of them again", "integer"),
}
TAGS: Final = (
    ("sandboxes", "Create, find, change and delete sandboxes."),
    ("lineage", "Forks, pause and hibernation, stop and start."),
    ("snapshots", "What a sandbox was at one moment, and what goes on from it."),
    ("events", "What has happened."),
    ("webhooks", "Receivers that events are sent to."),
    ("network", "What a sandbox may reach, and what became of what it tried."),
    ("secrets", "What sandboxes may use without knowing it."),
    ("ports", "What listens in a sandbox, and who may reach it from outside."),
    ("usage", "What sandboxes have used, and budgets that limit it."),
    ("exec", "Run commands in a sandbox."),
    ("processes", "Processes that nobody has to stay connected to: with an input, a terminal, signals."),
    ("services", "Commands that the sandbox keeps running: in order, watched, started again, also at boot."),
    ("terminal", "Terminals over WebSockets."),
    ("files", "Read and write files in a sandbox, search them, pack them, watch them."),
    ("git", "Work with git repositories in a sandbox."),
    ("run", "Run a program once, in a sandbox of its own that is gone afterwards."),
    ("code", "Run code in kernels that keep their state."),
    ("repl", "The same for clients of PandaStack."),
    ("templates", "What sandboxes are made from."),
    ("tokens", "Who may do what, and who did."),
    ("ssh", "SSH: where it is served, and the keys that open sandboxes."),
    ("service", "The server itself."),
    ("not in this release", "Existing clients call these; they answer 501."),
)
_LINKED: Final = (
    "sandboxes_get",
    "sandboxes_delete",
    "sandboxes_patch",
    "sandboxes_get_lifecycle",
    "exec_run",
    "exec_stream",
    "files_read",
    "files_write",
)

Schema = dict[str, Any]


def build_document(app: FastAPI, settings: Settings) -> Schema:
    """The document of this server."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        openapi_version="3.1.0",
        tags=[{"name": name, "description": text} for name, text in TAGS],
        license_info={"name": "Apache 2.0", "identifier": "Apache-2.0"},
        servers=[{"url": "/"}],
    )
    components = document["components"]
    components["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "`pds_` and 32 hex digits. `x-scope` names the scope that a call needs: `admin` holds "
            "`exec`, which holds `read`. With `x-reach: workspace` a token of one sandbox is refused.",
        }
    }
    schemas = components["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for model in (*REQUESTS, *EVENTS):
        schemas[model.__name__] = model.model_json_schema(mode="validation", ref_template=_REF)
        schemas.update(schemas[model.__name__].pop("$defs", {}))
    _finish_requests(schemas, settings)
    for name, schema in schemas.items():
        if name not in {model.__name__ for model in REQUESTS}:
            _finish_answer(schema)
    _drop_titles(schemas)
    for path, operation in _operations(document):
        _finish_operation(path, operation)
    _add_links(document)
    return document


def _operations(document: Schema) -> Iterator[tuple[str, Schema]]:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            yield path, operation


# ------------------------------------------------------------------ requests


def _finish_requests(schemas: Schema, settings: Settings) -> None:
    create = schemas["CreateBody"]["properties"]
    _limit(create["cpus"], settings.max_cpus)
    _limit(create["memory_mb"], settings.max_memory_mb)
    _limit(create["disk_mb"], settings.max_disk_mb)
    _limit(create["disk_gb"], settings.max_disk_mb // 1024)
    for alias in ("cpu", "vcpus"):
        create[alias] = {**create["cpus"], "description": "The same as `cpus`.", "deprecated": True}
    _limit(schemas["ExecBody"]["properties"]["timeout_seconds"], settings.exec_max_timeout)
    _limit(schemas["CodeBody"]["properties"]["timeout_seconds"], settings.exec_max_timeout)
    schemas["ExecBody"]["oneOf"] = [
        {"required": [one], "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}}
        for one, other in (("cmd", "argv"), ("argv", "cmd"))
    ]
    for model in REQUESTS:
        schema = schemas[model.__name__]
        required = schema.get("required", [])
        for name, field in schema["properties"].items():
            if name not in required:
                schema["properties"][name] = _nullable(field)


def _finish_answer(schema: Schema) -> None:
    """What does not apply is left out of an answer, never null."""
    for name, field in schema.get("properties", {}).items():
        schema["properties"][name] = _without_null(field)


def _limit(field: Schema, maximum: float) -> None:
    for part in (field, *field.get("anyOf", [])):
        if part.get("type") in {"integer", "number"}:
            part["maximum"] = maximum


def _nullable(field: Schema) -> Schema:
    """Null is the same as an absent field."""
    if {"type": "null"} in field.get("anyOf", []):
        return field
    about: Schema = {key: field.pop(key) for key in ("description", "default", "title", "deprecated") if key in field}
    return {"anyOf": [field, {"type": "null"}], **about}


def _drop_titles(node: Any) -> None:
    """Pydantic repeats every name as a title."""
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        for value in node.values():
            _drop_titles(value)
    elif isinstance(node, list):
        for value in node:
            _drop_titles(value)


# ------------------------------------------------------------------ operations


def _finish_operation(path: str, operation: Schema) -> None:
    responses = operation["responses"]
    if "ErrorAnswer" not in str(responses.get("422")):
        responses.pop("422", None)  # FastAPI's own; a request that is not valid is 400 here
    below = path.startswith("/v1")
    linked = path.startswith(PREFIX)  # what is signed needs no token
    wanted = [*_EVERYWHERE, *((403, 429, 503) if linked else _BELOW_V1 if below else ())]
    if _can_be_invalid(operation):
        wanted.append(400)
    for status in wanted:
        responses.setdefault(str(status), error_answer(status))
    if below and not linked:
        _add_scope(operation, responses)
    _add_path_parameters(path, operation)
    for parameter in operation.get("parameters", []):
        parameter["schema"] = _without_null(parameter["schema"])
        _drop_titles(parameter["schema"])
    for response in responses.values():
        _drop_titles(response)
        if response["description"] == "Successful Response":
            response["description"] = "Done"
        response["headers"] = {"X-Request-Id": header("As sent, or made"), **response.get("headers", {})}
    operation["responses"] = dict(sorted(responses.items()))


def _add_scope(operation: Schema, responses: Schema) -> None:
    """What the token must be good for, and what is answered when it is not."""
    need = need_of(operation["operationId"])
    operation["security"] = [{"token": []}]
    operation["x-scope"] = need.scope.value
    operation["x-reach"] = need.reach.value
    if need.scope is not Scope.READ or need.reach is not Reach.SANDBOX:
        responses.setdefault("403", error_answer(403))
    for status in responses:
        if status != "401":
            responses[status]["headers"] = {**_LIMITS, **responses[status].get("headers", {})}


def _add_path_parameters(path: str, operation: Schema) -> None:
    """Those that the function behind the route does not look at."""
    for name in re.findall(r"{(\w+)}", path):
        parameters = operation.setdefault("parameters", [])
        if all(p["name"] != name for p in parameters):
            parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})


def _can_be_invalid(operation: Schema) -> bool:
    return "requestBody" in operation or any(p["in"] in {"query", "header"} for p in operation.get("parameters", []))


def _without_null(schema: Schema) -> Schema:
    """Of something that may be left out, but is never null."""
    kinds = [part for part in schema.get("anyOf", []) if part != {"type": "null"}]
    if len(kinds) != 1 or len(kinds) == len(schema["anyOf"]):
        return schema
    rest = {key: value for key, value in schema.items() if key not in {"anyOf", "title"}}
    if rest.get("default", ...) is None:
        del rest["default"]
    return {**kinds[0], **rest}


def _add_links(document: Schema) -> None:
    """From the answer of a create to what can be done with the sandbox."""
    known = {operation["operationId"] for _, operation in _operations(document)}
    created = document["paths"]["/v1/sandboxes"]["post"]["responses"]["201"]
    created["links"] = {
        name: {"operationId": name, "parameters": {"sandbox_id": "$response.body#/id"}}
        for name in _LINKED
        if name in known
    }
