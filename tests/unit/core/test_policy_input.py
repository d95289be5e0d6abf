"""What a client may write as a policy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.errors import ClocheError
from cloche_server.core.netctl import policy_from_json, policy_to_json
from cloche_server.core.network import NetworkLimits, NetworkMode, Rule, RuleAction, Transport
from cloche_server.core.policy_input import parse_policy


def test_the_whole_shape() -> None:
    policy = parse_policy(
        {
            "mode": "allow-list",
            "rules": [
                {
                    "id": "pypi",
                    "action": "allow",
                    "domain": "*.PyPI.org.",
                    "ports": [443, "8000-8010"],
                    "protocol": "tcp",
                    "methods": ["get"],
                    "paths": ["/simple/*"],
                },
                {"action": "deny", "cidr": "10.0.0.0/8", "protocol": "any"},
                {"action": "allow", "domain": "bücher.example"},
            ],
            "limits": {"connections": 5},
            "learn": True,
            "unknown": 1,
        }
    )
    assert policy.mode is NetworkMode.ALLOW_LIST
    assert policy.rules == (
        Rule(
            "pypi", RuleAction.ALLOW, "*.pypi.org", None, ((443, 443), (8000, 8010)), Transport.TCP, ("GET",),
            ("/simple/*",),
        ),
        Rule("rule-2", RuleAction.DENY, None, "10.0.0.0/8"),
        Rule("rule-3", RuleAction.ALLOW, "xn--bcher-kva.example"),
    )  # fmt: skip
    assert policy.limits == NetworkLimits(connections=5)
    assert policy.learn
    assert policy_from_json(policy_to_json(policy)) == policy
    assert parse_policy({}).mode is NetworkMode.OPEN


def rule(**fields: Any) -> dict[str, Any]:
    return {"rules": [{"action": "allow", **fields}]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"mode": "closed"}, "network.mode"),
        ({"mode": []}, "network.mode"),
        ({"rules": {}}, "network.rules"),
        ({"rules": [{}] * 2001}, "network.rules"),
        ({"rules": [1]}, "network.rules[0]"),
        ({"rules": [{}]}, "network.rules[0].action"),
        ({"learn": "yes"}, "network.learn"),
        ({"limits": {"connections": -1}}, "network.limits.connections"),
        ({"limits": {"total_mb": True}}, "network.limits.total_mb"),
        ({"limits": []}, "network.limits"),
        (rule(action="maybe"), "network.rules[0].action"),
        (rule(domian="a.test"), "network.rules[0]"),
        (rule(domain="a..test"), "network.rules[0].domain"),
        (rule(domain="1.2.3.4"), "network.rules[0].domain"),
        (rule(domain="*.*.x"), "network.rules[0].domain"),
        (rule(domain=5), "network.rules[0].domain"),
        (rule(cidr="10.0.0.1/8"), "network.rules[0].cidr"),
        (rule(cidr="x"), "network.rules[0].cidr"),
        (rule(cidr="fe80::1%eth0"), "network.rules[0].cidr"),
        (rule(cidr="::ffff:10.0.0.0/104"), "network.rules[0].cidr"),
        (rule(ports=[0]), "network.rules[0].ports"),
        (rule(ports=[65536]), "network.rules[0].ports"),
        (rule(ports=["10-5"]), "network.rules[0].ports"),
        (rule(ports=["http"]), "network.rules[0].ports"),
        (rule(ports=[True]), "network.rules[0].ports"),
        (rule(ports=80), "network.rules[0].ports"),
        (rule(protocol="icmp"), "network.rules[0].protocol"),
        (rule(protocol="udp", methods=["GET"]), "network.rules[0].protocol"),
        (rule(protocol="udp"), "network.rules[0].ports"),
        (rule(protocol="udp", domain="a.test"), "network.rules[0].ports"),
        (rule(protocol="udp", ports=[53, "53"]), "network.rules[0].ports"),
        (rule(methods=["G T"]), "network.rules[0].methods"),
        (rule(paths=["x"]), "network.rules[0].paths"),
        (rule(paths=["/a*b"]), "network.rules[0].paths"),
        (rule(paths=["/a?b"]), "network.rules[0].paths"),
        (rule(id="default"), "network.rules[0].id"),
        (rule(id="a b"), "network.rules[0].id"),
        ({"rules": [{"action": "allow", "id": "x"}, {"action": "deny", "id": "x"}]}, "network.rules[1].id"),
    ],
)
def test_what_is_refused(body: dict[str, Any], field: str) -> None:
    with pytest.raises(ClocheError) as caught:
        parse_policy(body)
    assert caught.value.code == "request.invalid"
    assert caught.value.details["field"] == field


def test_udp_is_allowed_with_its_ports_and_denied_without() -> None:
    body = rule(protocol="udp", domain="a.test", ports=["50-60", 123])
    (found,) = parse_policy(body).rules
    assert (found.protocol, found.ports) == (Transport.UDP, ((50, 60), (123, 123)))
    (found,) = parse_policy(rule(action="deny", protocol="udp")).rules
    assert (found.protocol, found.ports) == (Transport.UDP, ())


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
FIELDS = ("id", "action", "domain", "cidr", "ports", "protocol", "methods", "paths")


@pytest.mark.thorough
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "mode": json | st.sampled_from(["open", "none"]),
            "rules": json | st.lists(st.dictionaries(st.sampled_from(FIELDS), json, max_size=8), max_size=3),
            "limits": json,
            "learn": json,
        },
    )
)
def test_anything_is_a_policy_or_a_sentence(body: dict[str, Any]) -> None:
    found: str = "network"
    try:
        policy = parse_policy(body)
    except ClocheError as error:
        found = f"{error.details['field']}" if error.code == "request.invalid" else error.code
    else:
        assert policy_from_json(policy_to_json(policy)) == policy
    assert found.startswith("network")
