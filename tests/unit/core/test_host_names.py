"""Names of hosts, taken strictly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.names import canonical_name, domain_pattern, host_name, matches, parents


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("_dmarc.example.com", "_dmarc.example.com"),
        ("a-b.c", "a-b.c"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("localhost", "localhost"),
        ("1.2.3.com", "1.2.3.com"),
        ("x" * 63 + ".com", "x" * 63 + ".com"),
        ("example.com..", None),
        (".example.com", None),
        ("a..b", None),
        ("", None),
        (".", None),
        ("-a.com", None),
        ("a-.com", None),
        ("a b.com", None),
        ("a\0.com", None),
        ("a.com\n", None),
        ("a/b.com", None),
        ("a:80", None),
        ("bücher.example", None),
        ("\u212aelvin.com", None),
        ("x" * 64 + ".com", None),
        (".".join(["abc"] * 64), None),
        ("1.2.3.4", None),
        ("127.1", None),
        ("2852039166", None),
        ("0xa9fea9fe", None),
        ("a.0x7f", None),
    ],
)
def test_canonical_names(text: str, name: str | None) -> None:
    assert canonical_name(text) == name


def test_other_scripts_become_ascii() -> None:
    assert host_name("Bücher.example") == "xn--bcher-kva.example"
    assert host_name("\u212aelvin.com") == "kelvin.com"
    assert host_name("a\u3002b.com") == "a.b.com"
    assert host_name("ü" * 300) is None


@pytest.mark.parametrize("text", ["*", "*.", "a.*.com", "**.com", "*a.com", "*.1.2.3.4", "*.*.com"])
def test_patterns_that_mean_nothing(text: str) -> None:
    assert domain_pattern(text) is None


@given(st.text(max_size=300))
def test_a_canonical_name_stays_itself(text: str) -> None:
    name = canonical_name(text)
    if name is not None:
        assert canonical_name(name) == name == canonical_name(name.upper() + ".")
        assert name.isascii()
        assert len(name) <= 253


def test_wildcards_are_what_is_below() -> None:
    assert matches("*.a.com", "x.a.com")
    assert matches("*.a.com", "y.x.a.com")
    assert not matches("*.a.com", "a.com")
    assert not matches("*.a.com", "xa.com")
    assert not matches("a.com", "x.a.com")
    assert parents("a.b.c") == ["b.c", "c"]
