"""Tokens, and what one workspace learns of another: nothing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from conformance_raw import Wire

from kit.client import Box
from kit.server import Server


def _bearer(token: str, scheme: str = "Bearer ") -> str:
    return f"Authorization: {scheme}{token}\r\n"


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "bEaReR   "])
def test_the_scheme_has_no_case(wire: Wire, scheme: str) -> None:
    assert wire.send("GET", "/v1/me", auth=_bearer(wire.token, scheme)).json()["auth_method"] == "token"


@pytest.mark.parametrize(
    ("auth", "code"),
    [
        ("", "auth.missing_token"),
        ("Authorization: \r\n", "auth.missing_token"),
        ("Authorization: Bearer\r\n", "auth.missing_token"),
        ("Authorization: Bearer \r\n", "auth.missing_token"),
        ("Authorization: Basic {token}\r\n", "auth.missing_token"),
        ("Authorization: {token}\r\n", "auth.missing_token"),
        ("Authorization: Bearer pds_00000000000000000000000000000000\r\n", "auth.invalid_token"),
        ("Authorization: Bearer pds_pg_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n", "auth.invalid_token"),
        ("Authorization: Bearer \xe9\r\n", "auth.invalid_token"),
        ("Authorization: Bearer {token} {token}\r\n", "auth.invalid_token"),
        ("Authorization: Bearer {upper}\r\n", "auth.invalid_token"),
        ("Authorization: Bearer {token}\r\nAuthorization: Bearer {token}\r\n", "auth.invalid_token"),
        ("Authorization: Bearer {token}\r\nAuthorization: Bearer pds_0\r\n", "auth.invalid_token"),
    ],
)
def test_refused(wire: Wire, auth: str, code: str) -> None:
    sent = auth.format(token=wire.token, upper=wire.token.upper()) if "\xe9" not in auth else auth
    for method, target in (("GET", "/v1/sandboxes"), ("POST", "/v1/sandboxes"), ("GET", "/v1/nope"), ("TRACE", "/v1")):
        found = wire.send(method, target, auth=sent)
        told = found.error(401, code)
        assert told["error"] == "unauthorized"
        assert told["detail"]
        assert found.header("www-authenticate") == "Bearer"
        assert wire.token not in str(told)


def test_a_token_in_the_query_is_not_one(wire: Wire) -> None:
    wire.send("GET", f"/v1/me?access_token={wire.token}", auth="").error(401, "auth.missing_token")


def test_a_revoked_token(server: Server, wire: Wire) -> None:
    token = server.cli("token", "create").strip()
    assert wire.send("GET", "/v1/me", auth=_bearer(token)).status == 200
    server.cli("token", "revoke", token[:12])
    deadline = time.monotonic() + 10
    while wire.send("GET", "/v1/me", auth=_bearer(token)).status == 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    wire.send("GET", "/v1/me", auth=_bearer(token)).error(401, "auth.invalid_token")


def test_no_token_is_in_the_log(server: Server, wire: Wire) -> None:
    wire.send("GET", f"/v1/nope?x={wire.token}", headers=f"X-Request-Id: {wire.token}\r\n")
    assert wire.token not in server.log.read_text()


# ------------------------------------------------------------------ other workspaces


def _calls(document: dict[str, Any], sandbox: str) -> list[tuple[str, str]]:
    """Every operation on a sandbox, for the sandbox with this id."""
    found = []
    for path, operations in document["paths"].items():
        if "{sandbox_id}" in path:
            target = path.replace("{sandbox_id}", sandbox).replace("{exec_id}", "x1").replace("{port}", "3000")
            target = target.replace("{process_id}", "p1").replace("{service_name}", "s1")
            target += "?host=a.test" if target.endswith("/explain") else ""
            found += [(method.upper(), target) for method in operations]
    return found


def test_foreign_deleted_and_random_ids_give_the_same_answer(
    wire: Wire, stranger: str, sandbox: Box, create: Any
) -> None:
    document = wire.send("GET", "/openapi.json").json()
    gone = create()
    gone.delete()
    foreign = _calls(document, sandbox.id)
    assert len(foreign) > 20
    for (method, target), (_, unknown), (_, deleted) in zip(
        foreign, _calls(document, "z" * 20), _calls(document, gone.id), strict=True
    ):
        fields = {"cmd": "id", "path": "/x", "from": "/x", "to": "/y", "cpu_seconds": 1, "port": 3000}
        fields |= {"signal": "TERM", "cols": 80, "rows": 24, "stdin": "none"} if "/processes" in target else {}
        fields |= {"code": "1", "text": "x"}
        fields |= {"mode": "none"} if target.endswith("/network") else {}
        fields |= {"pattern": "x", "replacement": "y", "paths": ["/x"], "target": "/y", "url": "/x", "message": "m"}
        fields |= {"target": "process"} if target.endswith("/signal") else {}
        fields |= {"mode": "0700"} if target.endswith("/attributes") else {}
        fields |= {"name": "x", "ref": "x"} if "/git/" in target else {}
        if method == "HEAD":
            continue  # its answer has no body to compare; it is the same route as the read
        body = None if method in {"GET", "DELETE"} else json.dumps(fields)
        more = "&" if "?" in target else "?"
        answers = [
            wire.send(method, f"{where}{more}path=/etc/hostname", body, auth=_bearer(stranger))
            for where in (target, unknown, deleted)
        ]
        assert [answer.status for answer in answers] == [404] * 3, (method, target, answers[0].body)
        told = [answer.error(404, "sandbox.not_found") for answer in answers]
        shapes = [
            str({k: v for k, v in body.items() if k != "request_id"}).replace(where, "ID")
            for body, where in zip(told, (sandbox.id, "z" * 20, gone.id), strict=True)
        ]
        assert len(set(shapes)) == 1, (method, target, told)
        names = [[name for name, _ in answer.headers] for answer in answers]
        assert names[0] == names[1] == names[2]
    assert sandbox.sh("echo untouched") == "untouched\n"


def test_lists_and_cursors_show_nothing_foreign(wire: Wire, stranger: str, sandbox: Box) -> None:
    auth = _bearer(stranger)
    assert wire.send("GET", "/v1/sandboxes", auth=auth).json() == []
    foreign = wire.send("GET", f"/v1/sandboxes?after={sandbox.id}", auth=auth).error(400, "request.invalid")
    random = wire.send("GET", f"/v1/sandboxes?after={'z' * 20}", auth=auth).error(400, "request.invalid")
    assert foreign["error"] == random["error"]


def test_one_key_of_two_workspaces_is_two_keys(wire: Wire, stranger: str, sandbox: Box) -> None:
    key = "Idempotency-Key: same\r\n"
    own = wire.send("POST", "/v1/sandboxes", "{}", headers=key)
    other = wire.send("POST", "/v1/sandboxes", "{}", headers=key, auth=_bearer(stranger))
    again = wire.send("POST", "/v1/sandboxes", "{}", headers=key)
    assert (own.status, other.status) == (201, 201)
    assert own.json()["id"] == again.json()["id"] != other.json()["id"]
    wire.send("POST", "/v1/sandboxes", '{"cpus":1}', headers=key).error(409, "request.idempotency_conflict")
    assert wire.send("DELETE", f"/v1/sandboxes/{own.json()['id']}").status == 204
    assert wire.send("DELETE", f"/v1/sandboxes/{other.json()['id']}", auth=_bearer(stranger)).status == 204
