"""Self-tests of the network: what is closed, what a rule opens, and what nothing can be said about."""

from __future__ import annotations

from typing import Any

import pytest

from cloche_server.host import witness
from kit.client import Api, Box

pytestmark = pytest.mark.vm

TRIED = {f"network.{name}" for name in ("host", "api", "udp", "icmp", "metadata", "neighbours")}


def found(api: Api, box: Box) -> tuple[dict[str, Any], dict[str, str]]:
    answer = api.call("POST", f"{box.path}/selftest")
    probes = {one["name"]: one for one in answer["probes"] if one["name"].startswith("network.")}
    return probes, {one["name"]: one["reason"] for one in answer["skipped"]}


def test_what_is_closed_and_what_a_rule_opens(api: Api) -> None:
    """The host itself sees what arrives, so the same attempt must get through where a rule opens the address."""
    (address, *_) = [str(one) for one in witness.outward() if one.version == 4]
    box = api.create()
    probes, skipped = found(api, box)
    assert {*TRIED, "network.private", "network.slot"} <= set(probes)
    assert not [one for one in probes.values() if not one["held"]]
    assert "network.dns" in skipped
    assert f"TCP {address}:" in probes["network.host"]["detail"]

    api.call("PUT", f"{box.path}/network", json={"mode": "none"})
    probes, skipped = found(api, box)
    assert not [one for one in probes.values() if not one["held"]]
    assert "refused" in probes["network.dns"]["detail"]
    assert "network.dns" not in skipped

    rules = [
        {"id": "mine", "action": "allow", "cidr": f"{address}/32"},
        {"id": "cloud", "action": "allow", "cidr": "169.254.169.254/32"},
        {"id": "lan", "action": "allow", "cidr": "10.0.0.0/8"},
    ]
    api.call("PUT", f"{box.path}/network", json={"mode": "allow-list", "rules": rules})
    probes, _ = found(api, box)
    assert not [one for one in probes.values() if not one["held"]]
    assert "it has arrived, the rule mine opens it" in probes["network.host"]["detail"]
    assert "refused" in probes["network.metadata"]["detail"], "the operator's `network_never` comes before any rule"
    assert "10.0.0.1 (lan)" in probes["network.private"]["detail"]
    assert "arrived" not in probes["network.udp"]["detail"]
    assert "answered" not in probes["network.icmp"]["detail"]


def test_a_guest_without_tools_claims_nothing(api: Api) -> None:
    box = api.create()
    box.sh("mv /usr/bin/python3 /usr/bin/python3-away")
    probes, skipped = found(api, box)
    assert set(probes) == {"network.private", "network.slot"}, "what the host can tell by itself"
    assert set(skipped) >= TRIED
    assert all("no tool in the guest" in skipped[name] for name in TRIED)
