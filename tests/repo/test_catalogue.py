"""Errors, settings and routes: catalogue, source and documents say the same."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from sources import ROOT, SERVER, Source, called, parsed, strings

from cloche_server.api.app import bare_app
from cloche_server.api.docs import answers
from cloche_server.api.errors import HTTP_STATUS
from cloche_server.api.openapi import build_document
from cloche_server.core.errors import CATALOGUE
from cloche_server.settings import Settings, env_name

CODE = re.compile(r"[a-z]+(\.[a-z_]+)+|not_implemented|internal")


def _raised(source: Source) -> Iterator[tuple[int, str]]:
    """Codes in `ClocheError("code", …)`."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and called(node) == "ClocheError" and node.args:
            code = node.args[0]
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                yield node.lineno, code.value


def test_every_code_has_a_status_and_the_other_way_round() -> None:
    assert set(CATALOGUE) == set(HTTP_STATUS)
    assert all(400 <= status < 600 for status in HTTP_STATUS.values())
    assert all(CODE.fullmatch(code) for code in CATALOGUE)


def test_every_code_in_the_source_is_in_the_catalogue() -> None:
    unknown = [
        f"{source.name}:{line} {code}"
        for source in parsed(SERVER)
        for line, code in _raised(source)
        if code not in CATALOGUE
    ]
    assert not unknown, unknown


def test_every_code_is_raised_somewhere() -> None:
    """As a literal outside the two tables: in a `ClocheError`, or in a table of the guest's answers."""
    tables = {SERVER / "core" / "errors.py", SERVER / "api" / "errors.py"}
    used = {node.value for source in parsed(SERVER) if source.path not in tables for node in strings(source)}
    unused = set(CATALOGUE) - used
    assert not unused, f"nobody raises {unused}"


def test_what_is_retryable_is_safe_to_send_again() -> None:
    """Only errors after which nothing has happened; a create that was refused is one of 503 and 507."""
    retryable = {code for code, spec in CATALOGUE.items() if spec.retryable}
    assert retryable == {
        "capacity.unavailable",
        "sandbox.busy",
        "host.disk_full",
        "server.shutting_down",
        "file.busy",
        "network.unavailable",
        "request.rate_limited",
        "run.queue_full",
    }
    assert {code for code, status in HTTP_STATUS.items() if status == 503} == {
        "capacity.unavailable",
        "sandbox.busy",
        "server.shutting_down",
        "network.unavailable",
    }


def test_no_sentence_makes_a_client_run_a_command_again() -> None:
    """Existing clients repeat a call whose error holds one of these."""
    words = ("connect: connection refused", "no route to host", "i/o timeout")
    found = [
        f"{source.name}:{node.lineno}"
        for source in parsed(SERVER)
        for node in strings(source)
        if any(word in str(node.value).lower() for word in words)
    ]
    assert not found, found
    assert "timeout" in CATALOGUE["exec.timeout"].summary


def test_errors_are_never_nested() -> None:
    schema = build_document(bare_app(), Settings())["components"]["schemas"]["ErrorAnswer"]
    assert schema["properties"]["error"]["type"] == "string"
    assert {"error", "code", "retryable", "request_id", "details"} <= set(schema["required"])


def test_every_status_has_a_text() -> None:
    for status in set(HTTP_STATUS.values()):
        assert answers(status)[status]["description"]


def test_the_contract_for_other_languages() -> None:
    table = tomllib.loads((ROOT / "contracts" / "errors.toml").read_text("utf-8"))
    assert {code: row["status"] for code, row in table.items()} == dict(HTTP_STATUS)
    assert {code: row["retryable"] for code, row in table.items()} == {c: s.retryable for c, s in CATALOGUE.items()}


def test_generated_documents_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "docs", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text("utf-8")
    for declared in fields(Settings):
        assert declared.metadata.get("doc"), declared.name
        assert f"`{env_name(declared.name)}`" in page, declared.name
        used = sum(f".{declared.name}" in source.text for source in parsed(SERVER))
        assert used, f"nothing reads the setting {declared.name}"


def test_every_route_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    document = build_document(bare_app(), Settings())
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert f"### {method.upper()} {path}\n" in page
            assert operation["summary"], (method, path)
    ids = [operation["operationId"] for operations in document["paths"].values() for operation in operations.values()]
    assert len(ids) == len(set(ids))


def test_imports_point_down() -> None:
    done = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
