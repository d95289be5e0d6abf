"""The only map from error codes to HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from cloche_server.api.respond import json_response
from cloche_server.core.command import CommandEnd, CommandResult
from cloche_server.core.errors import CATALOGUE, ClocheError

HTTP_STATUS: Final[Mapping[str, int]] = {
    "auth.missing_token": 401,
    "auth.invalid_token": 401,
    "auth.token_expired": 401,
    "auth.forbidden": 403,
    "token.not_found": 404,
    "token.too_many": 409,
    "request.invalid": 400,
    "request.too_large": 413,
    "request.headers_too_large": 431,
    "request.timeout": 408,
    "request.rate_limited": 429,
    "request.host_refused": 421,
    "request.not_found": 404,
    "request.method_not_allowed": 405,
    "request.idempotency_conflict": 409,
    "not_implemented": 501,
    "sandbox.not_found": 404,
    "sandbox.invalid_state": 409,
    "sandbox.failed": 409,
    "sandbox.boot_failed": 500,
    "sandbox.unreachable": 502,
    "sandbox.stop_timeout": 504,
    "sandbox.name_taken": 409,
    "sandbox.capture_failed": 500,
    "sandbox.busy": 503,
    "budget.exceeded": 402,
    "budget.not_found": 404,
    "run.not_found": 404,
    "run.unknown_language": 400,
    "run.queue_full": 429,
    "run.lost": 500,
    "snapshot.not_found": 404,
    "snapshot.corrupt": 500,
    "snapshot.import_disabled": 403,
    "snapshot.incompatible": 409,
    "sshkey.not_found": 404,
    "sshkey.too_many": 409,
    "webhook.not_found": 404,
    "webhook.too_many": 409,
    "secret.not_found": 404,
    "secret.too_many": 409,
    "secret.unavailable": 500,
    "isolation.unavailable": 422,
    "template.not_found": 404,
    "template.corrupt": 500,
    "template.bake_failed": 500,
    "template.name_taken": 409,
    "template.in_use": 409,
    "template.invalid_recipe": 400,
    "exec.not_found": 404,
    "exec.conflict": 409,
    "exec.timeout": 504,
    "exec.sandbox_gone": 502,
    "exec.suspended": 409,
    "exec.too_large": 413,
    "exec.user_not_found": 400,
    "exec.invalid_cwd": 400,
    "exec.cancelled": 502,
    "process.not_found": 404,
    "process.ended": 409,
    "process.lost": 409,
    "process.no_input": 409,
    "process.no_terminal": 409,
    "code.not_available": 409,
    "service.not_found": 404,
    "service.conflict": 409,
    "service.too_many": 409,
    "code.context_not_found": 404,
    "code.too_many_contexts": 429,
    "code.not_waiting": 409,
    "code.kernel_failed": 500,
    "code.lost": 502,
    "file.not_found": 404,
    "file.is_directory": 400,
    "file.not_a_directory": 400,
    "file.not_a_regular_file": 400,
    "file.exists": 409,
    "file.not_empty": 409,
    "file.permission_denied": 403,
    "file.name_too_long": 400,
    "file.busy": 409,
    "file.no_space": 507,
    "file.changed": 412,
    "file.range_not_satisfiable": 416,
    "file.bad_archive": 400,
    "file.unsafe_archive": 400,
    "file.archive_too_large": 413,
    "file.too_many_watches": 409,
    "file.not_a_link": 400,
    "file.link_invalid": 403,
    "git.missing": 409,
    "git.not_a_repository": 409,
    "git.not_found": 404,
    "git.exists": 409,
    "git.auth_failed": 403,
    "git.no_grant": 409,
    "git.conflict": 409,
    "git.rejected": 409,
    "git.nothing_to_commit": 409,
    "git.unreachable": 409,
    "git.failed": 409,
    "port.closed": 502,
    "port.timeout": 504,
    "port.in_use": 409,
    "port.bad_answer": 502,
    "port.not_found": 404,
    "port.domain_taken": 409,
    "preview.unauthorized": 401,
    "preview.path_forbidden": 403,
    "guest.exhausted": 500,
    "guest.protocol": 502,
    "guest.error": 500,
    "network.unavailable": 503,
    "network.off": 409,
    "capacity.unavailable": 503,
    "host.disk_full": 507,
    "host.unsupported": 500,
    "server.shutting_down": 503,
    "internal": 500,
}


def error_body(error: ClocheError, request_id: str) -> dict[str, Any]:
    """The JSON of an error. `error` is a flat, non-empty sentence; existing clients depend on it."""
    spec = CATALOGUE[error.code]
    details = dict(error.details)
    if isinstance(details.get("status"), int):
        del details["status"]  # of the agent's protocol, which is nobody's business
    result = details.pop("result", None)
    if isinstance(result, CommandResult):
        details.update(result_fields(result))
    body: dict[str, Any] = {
        "error": error.message or spec.summary,
        "code": error.code,
        "retryable": spec.retryable,
        "request_id": request_id,
        "details": details,
    }
    if spec.action:
        body["action"] = spec.action
    if HTTP_STATUS[error.code] == 401:
        body["detail"] = error.message
        body["error"] = "unauthorized"
    if "timeout_seconds" in details:
        body["timeout_seconds"] = details["timeout_seconds"]
    return body


def internal_error() -> ClocheError:
    """For what nobody has foreseen; the text of the exception stays in the log."""
    return ClocheError("internal", "an internal error; the log of the server has more under the request id")


def error_response(error: ClocheError, request_id: str) -> Response:
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = f"{error.retry_after:g}"
    status = HTTP_STATUS[error.code]
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error, request_id), status, headers)


def result_fields(result: CommandResult) -> dict[str, Any]:
    """A command's result as the API shows it. Fields that do not apply are left out."""
    fields: dict[str, Any] = {
        "exec_id": result.exec_id,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "encoding": result.encoding,
        "exit_code": result.end.exit_code,
        "duration_ms": round(result.end.duration_ms),
        "duration_us": round(result.end.duration_ms * 1000),
        "termination": termination_fields(result.end),
        "truncated": bool(result.stdout_dropped or result.stderr_dropped),
        "stdout_dropped_bytes": result.stdout_dropped,
        "stderr_dropped_bytes": result.stderr_dropped,
    }
    for name in ("stdout_head_bytes", "stderr_head_bytes"):
        if (value := getattr(result, name)) is not None:
            fields[name] = value
    return fields


def termination_fields(end: CommandEnd) -> dict[str, Any]:
    """How a command ended, without what does not apply."""
    fields: dict[str, Any] = {"reason": end.reason}
    if end.signal is not None:
        fields["signal"] = end.signal
    if end.signal_number is not None:
        fields["signal_number"] = end.signal_number
    if end.detail is not None:
        fields["detail"] = end.detail
    if end.oom_kills:
        fields["oom_kills"] = end.oom_kills
    return fields
