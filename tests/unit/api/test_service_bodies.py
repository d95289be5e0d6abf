"""Definitions of services on their way to the agent and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from cloche_server.api.routes.created import services_of
from cloche_server.api.routes.sandbox_services import _shown, spec_of
from cloche_server.api.wire_create import CreateBody
from cloche_server.api.wire_services import ServiceAnswer, ServiceBody
from cloche_server.core.errors import ClocheError
from cloche_server.core.logs import LINE_MAX, LineBuffer, parse_cursor
from cloche_server.guest.services import service, to_body

FULL: dict[str, Any] = {
    "command": ["web", "--port", "80"],
    "env": {"A": "b"},
    "cwd": "/srv",
    "user": "www",
    "rlimits": {"nofile": 64},
    "buffer_kb": 64,
    "autostart": False,
    "restart": "always",
    "backoff_seconds": 2.5,
    "max_restarts": 0,
    "window_seconds": 60,
    "stop_signal": "INT",
    "stop_grace_seconds": 0,
    "depends_on": ["db", "db", "cache"],
    "health": {"http": {"port": 80, "path": "/up", "status": 204}, "interval_seconds": 0.5, "on_unhealthy": "report"},
}


def told(definition: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """What an agent answers to a definition."""
    log = {"epoch": "0f", "first": 0, "next": 0}
    body = {"name": "web", "state": "stopped", "pid": 0, "started_ns": 0, "restarts": 0, "failures": 0, "log": log}
    return {**body, "spec": json.loads(json.dumps(definition)), **fields}


@pytest.mark.parametrize(
    "body",
    [{"command": "run"}, FULL, {"argv": ["x"], "health": {"tcp": 1}}, {"cmd": "x", "health": {"command": ["a", "b"]}}],
)
def test_a_definition_can_be_sent_again_as_it_is_told(body: dict[str, Any]) -> None:
    spec = spec_of(ServiceBody.model_validate(body), "web")
    shown = _shown(service(told(to_body("web", spec))))
    ServiceAnswer.model_validate(shown)
    assert spec_of(ServiceBody.model_validate(shown["definition"]), "web") == spec


@pytest.mark.parametrize(
    "change",
    [
        {"command": None},
        {"argv": ["x"]},
        {"restart": "maybe"},
        {"health": {}},
        {"health": {"tcp": 1, "command": "x"}},
        {"health": {"http": {"port": 1, "path": "/ x"}}},
        {"health": {"http": {"port": 1, "path": "/x\r\nHost: y"}}},
        {"backoff_seconds": 60, "max_backoff_seconds": 1},
        {"depends_on": ["A b"]},
        {"stop_grace_seconds": 61},
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    ServiceBody.model_validate({"command": "x"})
    with pytest.raises(ValidationError):
        ServiceBody.model_validate({"command": "x", **change})


def test_it_cannot_depend_on_itself() -> None:
    with pytest.raises(ClocheError, match="depends_on"):
        spec_of(ServiceBody.model_validate({"command": "x", "depends_on": ["web"]}), "web")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"state": "fine"},
        {"pid": -1},
        {"log": {}},
        {"log": {"epoch": "0.1", "first": 0, "next": 0}},
        {"waiting_for": ["ok", "not ok"]},
        {"spec": {}},
        {"last_exit": {}},
    ],
)
def test_nonsense_of_a_guest_is_told_as_such(change: dict[str, Any]) -> None:
    spec = to_body("web", spec_of(ServiceBody.model_validate(FULL), "web"))
    service(told(spec))
    with pytest.raises(ClocheError) as caught:
        service(told(spec, **change))
    assert caught.value.code == "guest.protocol"


def test_text_of_a_guest_has_no_control_characters() -> None:
    spec = to_body("web", spec_of(ServiceBody.model_validate(FULL), "web"))
    assert service(told(spec, detail="a\x1b[2Jb\n" + "x" * 1000)).detail.startswith("a?[2Jb?xxx")


def test_names_of_variables_of_a_guest_are_text() -> None:
    spec = to_body("web", spec_of(ServiceBody.model_validate(FULL), "web"))
    odd = {**spec, "env": {"A\ud800": "1"}, "rlimits": {"\udfff": 1}}
    found = service(told(odd)).spec
    assert (found.env, found.rlimits) == ({"A?": "1"}, {"?": 1})


def test_lines_come_whole_and_long_ones_in_pieces() -> None:
    buffer = LineBuffer()
    assert list(buffer.feed(b"a\nb")) == [(b"a", True, 1)]
    assert list(buffer.feed(b"c\n\n")) == [(b"bc", True, 1), (b"", True, 0)]
    assert list(buffer.feed(b"x" * LINE_MAX)) == []
    assert [(len(line), whole, rest) for line, whole, rest in buffer.feed(b"xy\n")] == [
        (LINE_MAX, False, 3),
        (2, True, 0),
    ]
    assert buffer.flush() == b""


@pytest.mark.parametrize("text", ["", "-1", "1.", "1.A", "x", "1.a.b", "9" * 19, "१"])
def test_what_is_no_place_in_a_log(text: str) -> None:
    assert parse_cursor(text) is None
    assert str(parse_cursor("12.0f")) == "12.0f"


def named(name: str, *others: str) -> dict[str, Any]:
    return {"name": name, "command": "x", "depends_on": [*others]}


def test_services_of_a_create_are_defined_behind_what_they_depend_on() -> None:
    body = CreateBody.model_validate({"services": [named("c", "b", "old"), named("a"), named("b", "a")]})
    found = services_of(body)
    assert [name for name, _ in found] == ["a", "b", "c"]
    assert found[2][1].depends_on == ("b", "old"), "one of the snapshot is known to the agent alone"
    assert services_of(CreateBody()) == ()


@pytest.mark.parametrize(
    ("services", "sentence"),
    [
        ([named("a"), named("a")], "two of the name a; each needs"),
        (
            [named("x"), named("a", "b"), named("b", "c"), named("c", "b")],
            r"circle: b -> c -> b; one has to start first",
        ),
        ([named("a", "a")], "other services"),
    ],
)
def test_services_of_a_create_that_cannot_be(services: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(ClocheError, match=sentence) as told:
        services_of(CreateBody.model_validate({"services": services}))
    assert told.value.code == "request.invalid"


@pytest.mark.parametrize(
    "body",
    [
        {"services": [{"command": "x"}]},
        {"services": [{"name": "A b", "command": "x"}]},
        {"services": [named(f"s{number}") for number in range(33)]},
        {"wait_for_services_seconds": 601},
    ],
)
def test_bodies_of_creates_that_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CreateBody.model_validate(body)
