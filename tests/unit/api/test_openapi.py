"""The OpenAPI document by itself: valid, complete, and with the limits of the server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from cloche_server.api.app import bare_app
from cloche_server.api.errors import HTTP_STATUS
from cloche_server.api.openapi import EVENTS, REQUESTS, build_document
from cloche_server.settings import Settings


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_document(bare_app(), Settings())


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield path, method, operation


def _refs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _refs(value)
    elif isinstance(node, list):
        for value in node:
            yield from _refs(value)


def _is_valid(document: dict[str, Any], schema: str, value: object) -> bool:
    whole = {"$ref": f"#/components/schemas/{schema}", "components": document["components"]}
    return bool(Draft202012Validator(whole).is_valid(value))


@pytest.mark.thorough
def test_it_is_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    errors = [error.message for error in OPENAPI_31_VALIDATOR.iter_errors(document)]
    assert not errors, errors[:3]
    for schema in document["components"]["schemas"].values():
        Draft202012Validator(schema | {"components": document["components"]})


def test_every_reference_leads_somewhere_and_every_schema_is_used(document: dict[str, Any]) -> None:
    used = {ref.rsplit("/", 1)[-1] for ref in _refs(document)}
    assert used == set(document["components"]["schemas"])
    assert {model.__name__ for model in (*REQUESTS, *EVENTS)} <= used


def test_paths_and_parameters_agree(document: dict[str, Any]) -> None:
    for path, method, operation in _operations(document):
        named = [p["name"] for p in operation.get("parameters", []) if p["in"] == "path"]
        assert sorted(named) == sorted(re.findall(r"{(\w+)}", path)), (method, path)


def test_tokens_are_asked_for_below_v1_only(document: dict[str, Any]) -> None:
    for path, method, operation in _operations(document):
        asked = path.startswith("/v1") and not path.startswith("/v1/f/")  # what is signed needs none
        assert ("security" in operation) == asked, (method, path)
        assert ("401" in operation["responses"]) == asked, (method, path)


def test_every_answer_has_its_headers(document: dict[str, Any]) -> None:
    for path, method, operation in _operations(document):
        for status, answer in operation["responses"].items():
            where = (method, path, status)
            assert "X-Request-Id" in answer["headers"], where
            needed = {"401": "WWW-Authenticate", "405": "Allow", "503": "Retry-After"}.get(status)
            assert needed is None or path == "/readyz" or needed in answer["headers"], where
            if int(status) >= 400 and path != "/readyz":
                assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer"), where
                assert int(status) in HTTP_STATUS.values(), where


def test_the_limits_are_those_of_the_server() -> None:
    document = build_document(bare_app(), Settings(max_cpus=3, max_memory_mb=512, exec_max_timeout=5000))
    schemas = document["components"]["schemas"]
    for name in ("cpus", "cpu", "vcpus"):
        assert schemas["CreateBody"]["properties"][name]["anyOf"][0]["maximum"] == 3
    assert not _is_valid(document, "CreateBody", {"memory_mb": 513})
    assert _is_valid(document, "CreateBody", {"memory_mb": 512, "cpu": 3, "unknown": 1})
    assert not _is_valid(document, "ExecBody", {"cmd": "true", "timeout_seconds": 5001})


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ({"cmd": "ls"}, True),
        ({"argv": ["ls"]}, True),
        ({"cmd": ["ls"], "argv": None, "env": None}, True),
        ({}, False),
        ({"cmd": None}, False),
        ({"cmd": "ls", "argv": ["ls"]}, False),
    ],
)
def test_a_command_is_one_of_two(document: dict[str, Any], body: dict[str, Any], valid: bool) -> None:
    assert _is_valid(document, "ExecBody", body) is valid


def test_null_is_absent_in_requests_and_never_in_answers(document: dict[str, Any]) -> None:
    for model in REQUESTS:
        schema = document["components"]["schemas"][model.__name__]
        for name, field in schema["properties"].items():
            if name not in schema.get("required", []):
                assert {"type": "null"} in field["anyOf"], (model, name)
    answers = {k: v for k, v in document["components"]["schemas"].items() if k not in {m.__name__ for m in REQUESTS}}
    assert '"null"' not in json.dumps(answers)


def test_labels_are_free_query_parameters(document: dict[str, Any]) -> None:
    found = next(p for p in document["paths"]["/v1/sandboxes"]["get"]["parameters"] if p["name"] == "metadata")
    assert (found["style"], found["explode"], found["schema"]["type"]) == ("form", True, "object")
    schema = Draft202012Validator(found["schema"])
    assert schema.is_valid({"metadata.team": "a", "metadata.x.y": "b"})
    assert not schema.is_valid({"team": "a"})


def test_streams_tell_their_events(document: dict[str, Any]) -> None:
    streams = {
        "/v1/sandboxes/{sandbox_id}/exec/stream": ("post", {"stdout", "stderr", "gap", "exit", "error"}),
        "/v1/sandboxes/{sandbox_id}/exec/{exec_id}/stream": ("get", {"stdout", "stderr", "gap", "exit", "error"}),
        "/v1/sandboxes/{sandbox_id}/logs": ("get", {"line", "gap", "end", "error"}),
    }
    for path, (method, events) in streams.items():
        schema = document["paths"][path][method]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        assert {part["properties"]["event"]["const"] for part in schema["oneOf"]} == events
        assert Draft202012Validator(schema).is_valid({"event": "error", "data": "{}"})
        assert not Draft202012Validator(schema).is_valid({"event": "other", "data": "{}"})


def test_a_create_leads_on(document: dict[str, Any]) -> None:
    ids = {operation["operationId"] for _, _, operation in _operations(document)}
    links = document["paths"]["/v1/sandboxes"]["post"]["responses"]["201"]["links"]
    assert {"sandboxes_get", "exec_run", "files_write"} <= set(links)
    assert {link["operationId"] for link in links.values()} <= ids


def test_every_field_of_a_request_says_what_it_is() -> None:
    silent = [
        f"{model.__name__}.{name}"
        for model in REQUESTS
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert not silent, silent
