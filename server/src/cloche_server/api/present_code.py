"""What runs of code and contexts look like in JSON."""

from __future__ import annotations

import json
from typing import Any

from cloche_server.api.present import rfc3339
from cloche_server.app.code_result import CodeOutcome
from cloche_server.core.code import CodeContext, CodeEnd, CodeError, CodeResult


def code_result(result: CodeResult) -> dict[str, Any]:
    return {"data": dict(result.data), "main": result.main, "dropped": dict(result.dropped)}


def code_error(error: CodeError) -> dict[str, Any]:
    return {"name": error.name, "message": error.message, "traceback": error.traceback}


def code_end(end: CodeEnd) -> dict[str, Any]:
    return {
        "status": end.status,
        "execution_count": end.execution_count,
        "duration_ms": end.duration_ms,
        "state_lost": end.state_lost,
        **({"detail": end.detail} if end.detail else {}),
    }


def code_context(context: CodeContext) -> dict[str, Any]:
    return {
        "id": context.id,
        "language": context.language,
        "state": context.state,
        "cells": context.cells,
        "execution_count": context.execution_count,
        "created_at": rfc3339(context.created_at),
        **({"cwd": context.cwd} if context.cwd is not None else {}),
    }


def code_outcome(found: CodeOutcome) -> dict[str, Any]:
    return {
        **code_end(found.end),
        "context_id": found.started.context_id,
        "language": found.started.language,
        "stdout": found.stdout,
        "stderr": found.stderr,
        "stdout_dropped_bytes": found.stdout_dropped,
        "stderr_dropped_bytes": found.stderr_dropped,
        "results": [code_result(one) for one in found.results],
        "results_dropped": found.results_dropped,
        **({"error": code_error(found.error)} if found.error is not None else {}),
    }


def repl_session(context: CodeContext, sandbox_id: str) -> dict[str, Any]:
    return {
        "id": context.id,
        "session_id": context.id,
        "sandbox_id": sandbox_id,
        "language": context.language,
        "created_at": rfc3339(context.created_at),
        "cells": context.cells,
    }


def repl_run(found: CodeOutcome) -> dict[str, Any]:
    """As existing clients read it: one traceback, and every form of a result as text."""
    end = found.end
    code = 0 if end.status == "ok" else 137 if end.status in {"killed", "oom"} else 1
    told = found.error.traceback or f"{found.error.name}: {found.error.message}" if found.error else end.detail or ""
    return {
        "stdout": found.stdout,
        "stderr": found.stderr,
        "exit": code,
        "exit_code": code,
        "duration_ms": end.duration_ms,
        "error": told if code else "",
        # A bundle with a form named `type` would be taken for another kind of result.
        "results": [
            {mime: value if isinstance(value, str) else json.dumps(value) for mime, value in one.data.items()}
            for one in found.results
        ],
    }
