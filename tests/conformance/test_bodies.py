"""Request bodies nobody should send: each gets a documented answer, and the server goes on."""

from __future__ import annotations

import json
import time

import pytest
from conformance_raw import Wire

from kit.client import Box

HUGE = "9" * 5000
TEXTS = [
    ("nothing", None),
    ("empty", ""),
    ("white space", " \r\n\t "),
    ("an empty object", "{}"),
    ("null", "null"),
    ("a list", "[]"),
    ("a string", '"x"'),
    ("a number", "1"),
    ("NaN", "NaN"),
    ("broken JSON", '{"cmd":'),
    ("two objects", "{}{}"),
    ("single quotes", "{'cmd':'x'}"),
    ("broken UTF-8", b'{"cmd":"\xff\xfe"}'),
    ("UTF-16", '{"cmd":"true"}'.encode("utf-16")),
    ("an escaped half character", '{"cmd":"\\ud800"}'),
    ("a raw half character", '{"cmd":"\ud800"}'),
    ("half a character as a key", '{"cmd":"true","env":{"\\udfff":"x"}}'),
    ("deep lists", '{"cmd":' + "[" * 100_000 + "]" * 100_000 + "}"),
    ("deep objects", '{"env":' * 50_000 + "1" + "}" * 50_000),
]
EXECS = [
    '{"cmd":1}',
    '{"cmd":null}',
    '{"cmd":true}',
    '{"cmd":{}}',
    '{"cmd":""}',
    '{"cmd":"  "}',
    '{"cmd":"a\\u0000b"}',
    '{"cmd":"a","argv":["b"]}',
    '{"argv":[]}',
    '{"argv":[""]}',
    '{"argv":"ls"}',
    '{"argv":[1]}',
    '{"argv":[null]}',
    '{"cmd":"true","timeout_seconds":-1}',
    '{"cmd":"true","timeout_seconds":1e400}',
    '{"cmd":"true","timeout_seconds":NaN}',
    '{"cmd":"true","timeout_seconds":-Infinity}',
    '{"cmd":"true","timeout_seconds":true}',
    '{"cmd":"true","timeout_seconds":"5"}',
    '{"cmd":"true","timeout_seconds":' + HUGE + "}",
    '{"cmd":"true","timeout_seconds":86401}',
    '{"cmd":"true","max_output_bytes":1}',
    '{"cmd":"true","max_output_bytes":10485761}',
    '{"cmd":"true","max_output_bytes":2048.5}',
    '{"cmd":"true","encoding":"latin-1"}',
    '{"cmd":"true","on_output_limit":"x"}',
    '{"cmd":"true","detach":1}',
    '{"cmd":"true","detach":"true"}',
    '{"cmd":"true","exec_id":"UP"}',
    '{"cmd":"true","exec_id":""}',
    '{"cmd":"true","exec_id":"a\\n"}',
    '{"cmd":"true","env":[]}',
    '{"cmd":"true","env":{"A":1}}',
    '{"cmd":"true","env":{"A":null}}',
    '{"cmd":"true","env":{"":"x"}}',
    '{"cmd":"true","env":{"A=B":"x"}}',
    '{"cmd":"true","env":{"A":"\\u0000"}}',
    '{"cmd":"true","cwd":"relative"}',
    '{"cmd":"true","cwd":""}',
    '{"cmd":"true","cwd":"/a\\u0000"}',
    '{"cmd":"true","user":"a\\u0000"}',
    '{"cmd":"true","user":"%s"}' % ("a" * 257),
    '{"cmd":"cat","stdin":5}',
    '{"cmd":"cat","stdin":"!","stdin_base64":true}',
]
CREATES = [
    '{"template":1}',
    '{"template":["base"]}',
    '{"cpus":0}',
    '{"cpus":1.5}',
    '{"cpus":true}',
    '{"cpu":"1"}',
    '{"vcpus":-1}',
    '{"cpus":1e400}',
    '{"cpus":100}',
    '{"memory_mb":1}',
    '{"memory_mb":16777216}',
    '{"memory_mb":1e9}',
    '{"disk_mb":1}',
    '{"disk_mb":0}',
    '{"disk_gb":16384}',
    '{"ttl_seconds":-1}',
    '{"ttl_seconds":1.5}',
    '{"ttl_seconds":99999999999999999999}',
    '{"persistent":1}',
    '{"metadata":[]}',
    '{"metadata":{"a":1}}',
    '{"metadata":{"a":null}}',
    '{"metadata":{"":"x"}}',
    '{"metadata":{"%s":"x"}}' % ("k" * 129),
    '{"metadata":{"a":"%s"}}' % ("v" * 4097),
    json.dumps({"metadata": {f"k{n}": "" for n in range(65)}}),
    '{"env":{"1":"x"}}',
    '{"cwd":"relative"}',
    '{"user":"\\u0000"}',
    '{"user":"a\\u0007"}',
    '{"minimum_boundary":"vault"}',
    '{"volumes":1}',
]


@pytest.mark.parametrize(("_name", "body"), TEXTS, ids=[name for name, _ in TEXTS])
def test_what_is_no_request_object(wire: Wire, shared: Box, _name: str, body: str | bytes | None) -> None:
    wire.send("POST", f"{shared.path}/exec", body).error(400, "request.invalid")
    wire.send("POST", f"{shared.path}/exec/stream", body).error(400, "request.invalid")


@pytest.mark.parametrize("kind", [None, "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "a/b; c="])
def test_the_content_type_of_an_empty_body_does_not_matter(wire: Wire, shared: Box, kind: str | None) -> None:
    assert wire.send("PATCH", shared.path, "", kind=kind).status == 200
    assert wire.send("PATCH", shared.path, '{"metadata":{"k":"v"}}', kind=kind).json()["metadata"]["k"] == "v"


@pytest.mark.parametrize("body", EXECS, ids=[body[:60] for body in EXECS])
def test_fields_of_exec(wire: Wire, shared: Box, body: str) -> None:
    found = wire.send("POST", f"{shared.path}/exec", body)
    assert found.status == 400, (body[:100], found)
    assert found.json()["code"] in {"request.invalid", "exec.user_not_found"}
    wire.send("POST", f"{shared.path}/exec/stream", body).error(400, found.json()["code"])


@pytest.mark.parametrize("body", CREATES, ids=[body[:60] for body in CREATES])
def test_fields_of_create(wire: Wire, body: str) -> None:
    told = wire.send("POST", "/v1/sandboxes", body).error(400, "request.invalid")
    assert "fields" in told["details"] or "field" in told["details"], told


def test_a_bad_field_is_named(wire: Wire, shared: Box) -> None:
    told = wire.send("POST", "/v1/sandboxes", '{"ttl_seconds":-1,"cpus":"x"}').error(400, "request.invalid")
    assert {problem["field"] for problem in told["details"]["fields"]} == {"ttl_seconds", "cpus"}
    told = wire.send("POST", f"{shared.path}/fs/mkdir", "{}").error(400, "request.invalid")
    assert told["details"]["fields"][0]["field"] == "path"
    told = wire.send("GET", f"{shared.path}/exec/x/stream?from=-1").error(400, "request.invalid")
    assert told["details"]["fields"][0]["field"] == "from"
    assert "value error" not in told["error"].lower()


def test_null_is_the_same_as_absent(wire: Wire, shared: Box) -> None:
    body = {"cmd": "echo $((6*7))", **dict.fromkeys(("argv", "env", "cwd", "user", "stdin", "timeout_seconds"))}
    body |= dict.fromkeys(("encoding", "max_output_bytes", "on_output_limit", "detach", "exec_id", "keepalive"))
    assert wire.send("POST", f"{shared.path}/exec", json.dumps(body)).json()["stdout"] == "42\n"
    fields = dict.fromkeys(("ttl_seconds", "persistent", "metadata"))
    assert wire.send("PATCH", shared.path, json.dumps(fields)).status == 200


def test_unknown_fields_are_ignored(wire: Wire, shared: Box) -> None:
    body = '{"cmd":"echo hi","args":["x"],"vcpus":2,"later":%s}' % ("[" * 500 + "]" * 500)
    assert wire.send("POST", f"{shared.path}/exec", body).json()["stdout"] == "hi\n"


def test_the_last_of_two_equal_keys_counts(wire: Wire, shared: Box) -> None:
    found = wire.send("POST", f"{shared.path}/exec", '{"cmd":"echo one","cmd":"echo two"}')
    assert found.json()["stdout"] == "two\n"


def test_a_fraction_of_a_second(wire: Wire, shared: Box) -> None:
    began = time.monotonic()
    told = wire.send("POST", f"{shared.path}/exec", '{"cmd":"sleep 60","timeout_seconds":0.25}')
    body = told.error(504, "exec.timeout")
    assert time.monotonic() - began < 20
    assert body["timeout_seconds"] == 0.25
    assert "timeout" in body["error"]
    assert body["details"]["termination"]["reason"] == "timeout"


@pytest.mark.parametrize(
    ("route", "limit"), [("/v1/sandboxes", 1 << 20), ("{box}/exec", 16 << 20), ("{box}/fs/mkdir", 1 << 20)]
)
def test_a_body_that_is_too_large(wire: Wire, shared: Box, route: str, limit: int) -> None:
    body = b'{"cmd":"true","path":"/tmp/x","x":"' + b"a" * (limit + (1 << 20)) + b'"}'
    told = wire.send("POST", route.format(box=shared.path), body).error(413, "request.too_large")
    assert told["details"] == {"limit_bytes": limit}


def test_unknown_templates_and_boundaries(wire: Wire) -> None:
    for name in ("nope", "", "../base", "a" * 256, "ü", "base\0"):
        wire.send("POST", "/v1/sandboxes", json.dumps({"template": name})).error(404, "template.not_found")
    for name in ("x", "../x", "ü", "z" * 20):
        wire.send("POST", "/v1/sandboxes", json.dumps({"from_snapshot": name})).error(404, "snapshot.not_found")
    wire.send("POST", "/v1/sandboxes", '{"volumes":[{"name":"a"}]}').error(501, "not_implemented")


def test_nothing_was_made_by_all_this(wire: Wire, shared: Box) -> None:
    """Last in this file: refused creates leave nothing."""
    assert [found["id"] for found in wire.send("GET", "/v1/sandboxes").json()].count(shared.id) == 1
    assert wire.send("POST", f"{shared.path}/exec", '{"cmd":"echo fine"}').json()["stdout"] == "fine\n"
