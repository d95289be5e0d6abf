"""The index of rules gives the verdicts that reading them one after another gives."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.core.addresses import AddressClass, classify
from cloche_server.core.names import matches
from cloche_server.core.network import NetworkMode, NetworkPolicy, Rule, RuleAction, Transport
from cloche_server.core.policy import RAW, Claim, ClaimKind, Outcome, Policy

NAMES = ["a.test", "x.a.test", "y.x.a.test", "b.test", "test"]
ADDRESSES = [
    ip_address(one) for one in ("45.90.1.10", "45.90.2.10", "10.1.2.3", "10.9.9.9", "2a0f::1", "64:ff9b::a01:203")
]
DOMAINS = [*NAMES, "*.a.test", "*.x.a.test", "*.test"]
NETWORKS = ["45.90.1.10/32", "45.90.0.0/16", "10.1.0.0/16", "10.0.0.0/8", "0.0.0.0/0", "::/0", "2a0f::/32"]
PORTS = [22, 80, 443, 8443]

rules = st.lists(
    st.builds(
        Rule,
        id=st.just("x"),
        action=st.sampled_from(RuleAction),
        domain=st.none() | st.sampled_from(DOMAINS),
        cidr=st.none() | st.sampled_from(NETWORKS),
        ports=st.just(()) | st.sampled_from(PORTS).map(lambda port: ((port, port),)),
        protocol=st.none() | st.sampled_from(Transport),
    ),
    max_size=8,
).map(lambda found: tuple(Rule(f"r{n}", *_rest(rule)) for n, rule in enumerate(found)))
modes = st.sampled_from([NetworkMode.OPEN, NetworkMode.ALLOW_LIST])


def _rest(rule: Rule) -> tuple[object, ...]:
    return (rule.action, rule.domain, rule.cidr, rule.ports, rule.protocol)


def _plainly(policy: NetworkPolicy, address: object, port: int, name: str) -> str:
    """The verdict of rules about TLS to a name that has the address, read one by one."""
    judged = ip_address("10.1.2.3") if str(address) == "64:ff9b::a01:203" else address
    public = classify(address) is AddressClass.PUBLIC  # type: ignore[arg-type]
    for rule in policy.rules:
        allows = rule.action is RuleAction.ALLOW
        if rule.domain is not None and not matches(rule.domain, name):
            continue
        if rule.cidr is not None:
            network = ip_network(rule.cidr)
            inside = judged in network if network.version == judged.version else False  # type: ignore[attr-defined]
            outside = network.version == address.version and address in network  # type: ignore[attr-defined]
            if not inside and not (outside and (not allows or public)):
                continue
        elif allows and not public:
            continue
        if allows and not public and not inside:
            continue
        ports = rule.ports or (((80, 80), (443, 443)) if rule.domain and allows else ())
        if ports and not any(low <= port <= high for low, high in ports):
            continue
        if rule.protocol is Transport.UDP:
            continue
        return f"{rule.action.value} {rule.id}"
    if not public:
        return "deny private-address"
    return "allow default" if policy.mode is NetworkMode.OPEN else "deny default"


@settings(max_examples=120)
@given(modes, rules, st.sampled_from(ADDRESSES), st.sampled_from(PORTS), st.sampled_from(NAMES))
def test_verdicts_are_those_of_the_rules_in_order(
    mode: NetworkMode, rules: tuple[Rule, ...], address: object, port: int, name: str
) -> None:
    policy = NetworkPolicy(mode, rules)
    found = Policy(policy).decide_connection(address, port, claim=Claim(ClaimKind.TLS, name))  # type: ignore[arg-type]
    assert f"{found.outcome.value} {found.rule}" == _plainly(policy, address, port, name)


@settings(max_examples=120)
@given(modes, rules, st.sampled_from(ADDRESSES), st.sampled_from(PORTS), st.sampled_from(NAMES))
def test_what_the_address_decides_no_name_changes(
    mode: NetworkMode, rules: tuple[Rule, ...], address: object, port: int, name: str
) -> None:
    judge = Policy(NetworkPolicy(mode, rules))
    alone = judge.decide_address(address, port, names=[name])  # type: ignore[arg-type]
    named = judge.decide_connection(address, port, claim=Claim(ClaimKind.TLS, name))  # type: ignore[arg-type]
    if alone.outcome is Outcome.DENY:
        assert not named.allowed
    if alone.outcome is Outcome.ALLOW:
        assert named.allowed
    if alone.outcome is Outcome.WATCH:
        assert judge.decide_connection(address, port, claim=RAW, names=[name]).allowed  # type: ignore[arg-type]


@settings(max_examples=60)
@given(rules, st.sampled_from(PORTS), st.sampled_from(NAMES), st.sampled_from(list(ClaimKind)))
def test_no_name_opens_what_is_private(rules: tuple[Rule, ...], port: int, name: str, kind: ClaimKind) -> None:
    named = tuple(Rule(*(rule.id, rule.action, rule.domain, None, rule.ports, rule.protocol)) for rule in rules)
    judge = Policy(NetworkPolicy(NetworkMode.OPEN, named))
    claim = Claim(kind, name if kind in {ClaimKind.TLS, ClaimKind.HTTP} else None)
    for address in (ip_address("10.1.2.3"), ip_address("127.0.0.1"), ip_address("169.254.169.254"), ip_address("::1")):
        found = judge.decide_connection(address, port, claim=claim, names=[name])
        assert not found.allowed or kind is ClaimKind.HTTP2
        assert not judge.decide_request(address, port, name, "GET", "/").allowed
        assert not judge.permits_answer(name, address)


@settings(max_examples=120)
@given(modes, rules, st.sampled_from(ADDRESSES), st.sampled_from(PORTS), st.sampled_from(NAMES))
def test_only_a_rule_that_says_udp_carries_datagrams(
    mode: NetworkMode, rules: tuple[Rule, ...], address: object, port: int, name: str
) -> None:
    explicit = tuple(rule for rule in rules if not (rule.protocol is Transport.UDP and not rule.ports))
    judge = Policy(NetworkPolicy(mode, explicit))
    found = judge.decide_datagram(address, port, [name])  # type: ignore[arg-type]
    if found.allowed:
        (rule,) = [one for one in explicit if one.id == found.rule]
        assert (rule.action, rule.protocol, rule.ports) == (RuleAction.ALLOW, Transport.UDP, ((port, port),))
        assert rule.domain is None or matches(rule.domain, name)
        # Without any other rule that allows, nothing changes.
        kept = tuple(one for one in explicit if one.action is RuleAction.DENY or one.protocol is Transport.UDP)
        assert Policy(NetworkPolicy(mode, kept)).decide_datagram(address, port, [name]) == found  # type: ignore[arg-type]
    # What only speaks of UDP says nothing about TCP.
    silent = tuple(one for one in explicit if one.protocol is not Transport.UDP)
    claim = Claim(ClaimKind.TLS, name)
    assert judge.decide_connection(address, port, claim=claim) == Policy(  # type: ignore[arg-type]
        NetworkPolicy(mode, silent)
    ).decide_connection(address, port, claim=claim)  # type: ignore[arg-type]
