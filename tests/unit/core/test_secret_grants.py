"""Grants as they come in JSON, and what they match."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.errors import ClocheError
from cloche_server.core.netctl import grant_from_json, grant_to_json
from cloche_server.core.network import SecretGrant, SecretPlace
from cloche_server.core.secrets import grant_reaches, parse_grants, shown_grant


def zeros(count: int) -> bytes:
    return bytes(count)


def parsed(**fields: Any) -> SecretGrant:
    return parse_grants([{"secret": "OPENAI", "hosts": ["api.openai.com"], **fields}], zeros)[0]


def test_the_shortest_one() -> None:
    made = parsed()
    assert made == SecretGrant("OPENAI", "cloche-secret-openai-" + "0" * 24, ("api.openai.com",))
    assert shown_grant(made) == {
        "secret": "OPENAI", "placeholder": made.placeholder, "hosts": ["api.openai.com"], "in": ["header"],
    }  # fmt: skip


def test_all_fields_come_back_as_they_are_meant() -> None:
    given_ = {
        "env": "KEY", "hosts": ["API.example.com.", "*.Example.com", "api.example.com"], "headers": ["Authorization"],
        "methods": ["get", "POST"], "paths": ["/v1/*", "*"], "in": ["header", "query", "body"],
        "pass_hosts": ["logs.example.com"], "placeholder": "my-own-placeholder",
    }  # fmt: skip
    made = parsed(**given_)
    shown = shown_grant(made)
    assert shown == {
        "secret": "OPENAI", "placeholder": "my-own-placeholder", "env": "KEY",
        "hosts": ["api.example.com", "*.example.com"], "headers": ["authorization"], "methods": ["GET", "POST"],
        "paths": ["/v1/*", "/*"], "in": ["header", "query", "body"], "pass_hosts": ["logs.example.com"],
    }  # fmt: skip
    assert parse_grants([shown], zeros) == (made,)
    assert grant_from_json(grant_to_json(made)) == made
    assert made.places == tuple(SecretPlace)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("secrets.0.secret", {"secret": "1"}),
        ("secrets.0.secret", {"secret": None}),
        ("secrets.0.hosts", {"hosts": []}),
        ("secrets.0.hosts", {"hosts": None}),
        ("secrets.0.hosts", {"hosts": "a.test"}),
        ("secrets.0.hosts.0", {"hosts": [5]}),
        *(
            ("secrets.0.hosts.0", {"hosts": [host]})
            for host in ("", "*", "*.com", "a b", "https://a.test", "a.test:443", "a.test/x", "1.2.3.4", "[::1]",
                         "a..b", "*.*.test", "x.*.test", "-a.test", "a" * 64 + ".test", "ä.test", "*.")
        ),
        ("secrets.0.pass_hosts.0", {"pass_hosts": ["*"]}),
        ("secrets.0.headers.0", {"headers": ["a b"]}),
        ("secrets.0.headers.0", {"headers": ["Host"]}),
        ("secrets.0.headers", {"headers": ["x"], "in": ["query"]}),
        ("secrets.0.methods.0", {"methods": ["A B"]}),
        ("secrets.0.paths.0", {"paths": ["v1"]}),
        ("secrets.0.paths.0", {"paths": ["/a*b"]}),
        ("secrets.0.paths.0", {"paths": ["/ä"]}),
        ("secrets.0.in.0", {"in": ["path"]}),
        ("secrets.0.env", {"env": "1A"}),
        ("secrets.0.env", {"env": 1}),
        ("secrets.0.placeholder", {"placeholder": "short"}),
        ("secrets.0.placeholder", {"placeholder": "x" * 129}),
        ("secrets.0.placeholder", {"placeholder": "with spaces in it all"}),
        ("secrets.0.placeholder", {"placeholder": "percent%41percent%41"}),
    ],
)  # fmt: skip
def test_what_is_refused(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ClocheError) as caught:
        parsed(**fields)
    assert (caught.value.code, caught.value.details) == ("request.invalid", {"field": field})


@pytest.mark.parametrize(
    ("field", "second"),
    [
        ("secrets.1.env", {"env": "A", "placeholder": "another-placeholder"}),
        ("secrets.1.placeholder", {"placeholder": "the-first-placeholder"}),
        ("secrets.1.placeholder", {"placeholder": "the-first-placeholder-longer"}),
        ("secrets.1.placeholder", {"placeholder": "first-placeholder"}),
    ],
)
def test_grants_are_told_apart(field: str, second: dict[str, Any]) -> None:
    base = {"secret": "X", "hosts": ["a.test"]}
    with pytest.raises(ClocheError) as caught:
        parse_grants([{**base, "env": "A", "placeholder": "the-first-placeholder"}, {**base, **second}], zeros)
    assert caught.value.details == {"field": field}


@pytest.mark.parametrize("raw", [{}, "x", 5, [5], [[]], [{"secret": "X", "hosts": ["a.test"]}] * 65])
def test_other_json_is_refused(raw: object) -> None:
    with pytest.raises(ClocheError):
        parse_grants(raw, zeros)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.sampled_from(["a.test", "header", "X"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["secret", "env", "hosts", "headers", "in", "paths", "placeholder"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.thorough
@given(st.lists(JSON, max_size=3))
def test_any_json_is_parsed_or_refused(raw: list[Any]) -> None:
    made: tuple[SecretGrant, ...] = ()
    with contextlib.suppress(ClocheError):
        made = parse_grants(raw, zeros)
    assert parse_grants([shown_grant(one) for one in made], zeros) == made


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/x", True), ("/v1/", True), ("/v1/a%20b", True), ("/v1/x/", True), ("/v1/a/../b", True),
        ("/v1", False), ("/v2/x", False), ("/v1/../v2", False), ("/v1/%2e%2e/v2", False), ("/v1/..%2fv2", False),
        ("/v1/%252e%252e/v2", False), ("/v1/..\\v2", False), ("/v1/..;x/v2", False), ("//v1/x", False),
        ("/v1/../../v1/x", True),
    ],
)  # fmt: skip
def test_paths(path: str, allowed: bool) -> None:
    assert grant_reaches(parsed(paths=["/v1/*"]), "api.openai.com", "GET", path) is allowed
    assert grant_reaches(parsed(), "api.openai.com", "GET", path)


def test_exact_paths() -> None:
    assert not grant_reaches(parsed(paths=["/x"]), "api.openai.com", "GET", "/x/")
    assert grant_reaches(parsed(methods=["get"], paths=["/x"]), "api.openai.com", "GET", "/x")
    assert not grant_reaches(parsed(methods=["get"], paths=["/x"]), "api.openai.com", "get", "/x")
