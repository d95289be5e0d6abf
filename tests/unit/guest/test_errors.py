"""The table from agent errors to codes of the catalogue."""

from __future__ import annotations

import pytest

from cloche_server.guest.errors import CallContext, LinkLost, LinkTimeout, StreamBroken, agent_error

FILE = CallContext("file", path="/a/b", to="/c", user="kim")
EXEC = CallContext("exec", user="kim", cwd="/w", exec_id="x1")
MACHINE = CallContext("machine")


@pytest.mark.parametrize(
    ("ctx", "status", "code", "field", "errno", "wanted", "mentions"),
    [
        (FILE, 404, "not_found", "path", "ENOENT", "file.not_found", "/a/b"),
        (FILE, 404, "not_found", "user", None, "exec.user_not_found", "kim"),
        (FILE, 404, "not_found", None, None, "not_implemented", "older"),
        (EXEC, 404, "not_found", "user", None, "exec.user_not_found", "kim"),
        (EXEC, 404, "not_found", "cwd", None, "exec.invalid_cwd", "/w"),
        (EXEC, 404, "not_found", "exec_id", None, "exec.not_found", "x1"),
        (MACHINE, 404, "not_found", None, None, "guest.error", ""),
        (FILE, 403, "permission_denied", "path", "EACCES", "file.permission_denied", "kim"),
        (EXEC, 403, "permission_denied", "cwd", None, "exec.invalid_cwd", "/w"),
        (EXEC, 403, "permission_denied", None, None, "file.permission_denied", "kim"),
        (FILE, 409, "exists", "to", None, "file.exists", "/c"),
        (FILE, 409, "is_directory", "path", None, "file.is_directory", "/a/b"),
        (FILE, 409, "not_a_directory", "path", None, "file.not_a_directory", "/a/b"),
        (FILE, 409, "not_empty", "path", None, "file.not_empty", "/a/b"),
        (FILE, 409, "not_a_regular_file", "path", None, "file.not_a_regular_file", "/a/b"),
        (FILE, 409, "text_busy", "path", None, "file.busy", "/a/b"),
        (FILE, 409, "conflict", "path", "EBUSY", "file.busy", "/a/b"),
        (FILE, 409, "conflict", "path", "ELOOP", "request.invalid", "/a/b"),
        (FILE, 409, "conflict", "path", "EINVAL", "request.invalid", "/a/b"),
        (FILE, 409, "unheard_of", "path", None, "guest.error", ""),
        (EXEC, 409, "conflict", "id", None, "exec.conflict", "x1"),
        (EXEC, 409, "not_a_directory", "cwd", None, "exec.invalid_cwd", "/w"),
        (EXEC, 413, "too_large", "argv", "E2BIG", "exec.too_large", "argument"),
        (EXEC, 413, "too_large", "cwd", "ENAMETOOLONG", "exec.invalid_cwd", "/w"),
        (EXEC, 413, "too_large", "env", "E2BIG", "exec.too_large", "environment"),
        (FILE, 413, "too_large", "path", "ENAMETOOLONG", "file.name_too_long", "/a/b"),
        (FILE, 413, "too_large", "path", "EFBIG", "file.no_space", ""),
        (FILE, 507, "no_space", None, "EDQUOT", "file.no_space", ""),
        (EXEC, 503, "exhausted", None, "EAGAIN", "guest.exhausted", ""),
        (FILE, 500, "internal", None, "EIO", "guest.error", ""),
        (EXEC, 400, "bad_request", "env", None, "request.invalid", "env"),
        (EXEC, 400, "bad_request", "cwd", None, "exec.invalid_cwd", "/w"),
        (EXEC, 418, "teapot", None, None, "guest.error", ""),
    ],
)
def test_table(
    ctx: CallContext, status: int, code: str, field: str | None, errno: str | None, wanted: str, mentions: str
) -> None:
    body = {"code": code, "message": "TEXT OF THE GUEST", "field": field, "errno": errno}
    error = agent_error(status, body, ctx)
    assert error.code == wanted
    assert mentions in error.message
    assert "TEXT" not in error.message
    assert error.details["status"] == status
    assert error.details.get("field") == field
    assert error.details.get("errno") == errno


@pytest.mark.parametrize("body", [None, [], "x", {}, {"code": 5}, {"message": "m"}])
def test_an_error_without_its_body_is_nonsense(body: object) -> None:
    assert agent_error(404, body, FILE).code == "guest.protocol"


def test_fields_and_errnos_of_unknown_form_are_left_out() -> None:
    error = agent_error(
        400, {"code": "bad_request", "field": "<script>", "errno": "EEVIL; rm -rf", "message": "m"}, EXEC
    )
    assert error.details == {"status": 400}
    assert "script" not in error.message
    agent_error(400, {"code": "bad_request", "field": ["x"], "errno": {}}, EXEC)


def test_long_and_binary_paths_are_quoted_and_cut() -> None:
    body = {"code": "not_found", "field": "path"}
    message = agent_error(404, body, CallContext("file", path=b"/x\xff\n" + b"y" * 5000)).message
    assert "\\xff" in message
    assert "\n" not in message
    assert len(message) < 400


def test_no_message_reads_like_the_network_of_the_caller() -> None:
    for error in (LinkLost("the connection ended"), LinkTimeout("did not answer", 3), StreamBroken()):
        for phrase in ("connection refused", "no route to host", "i/o timeout"):
            assert phrase not in error.message.lower()
