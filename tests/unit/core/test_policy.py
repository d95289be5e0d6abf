"""Verdicts of a policy."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from cloche_server.core.network import NetworkPolicy, Transport
from cloche_server.core.policy import RAW, Claim, ClaimKind, Outcome, Policy
from cloche_server.core.policy_input import parse_policy

A, B, PRIVATE = ip_address("45.90.1.10"), ip_address("45.90.2.10"), ip_address("10.1.2.3")


def policy(mode: str, *rules: dict[str, Any], **more: Any) -> Policy:
    return Policy(parse_policy({"mode": mode, "rules": list(rules)}), **more)


def allow(**fields: Any) -> dict[str, Any]:
    return {"action": "allow", **fields}


def deny(**fields: Any) -> dict[str, Any]:
    return {"action": "deny", **fields}


def tls(name: str | None) -> Claim:
    return Claim(ClaimKind.TLS, name)


def http(name: str) -> Claim:
    return Claim(ClaimKind.HTTP, name)


# ------------------------------------------------------------------ modes and order


def test_none_denies_whatever_the_rules_say() -> None:
    judge = policy("none", allow(domain="a.test"), allow(cidr="0.0.0.0/0"))
    assert judge.decide_name("a.test").rule == "mode"
    assert judge.decide_address(A, 443).rule == "mode"
    assert judge.decide_connection(A, 443, claim=tls("a.test")).rule == "mode"
    assert judge.decide_request(A, 80, "a.test", "GET", "/").rule == "mode"


def test_the_first_match_decides() -> None:
    judge = policy("allow-list", deny(domain="x.a.test"), allow(domain="*.a.test"), deny(domain="y.a.test"))
    assert judge.decide_connection(A, 443, claim=tls("x.a.test")).rule == "rule-1"
    assert judge.decide_connection(A, 443, claim=tls("y.a.test")).rule == "rule-2"
    assert not judge.decide_name("x.a.test").allowed
    assert judge.decide_name("y.a.test").allowed


def test_defaults() -> None:
    assert policy("open").decide_address(A, 22).rule == "default"
    assert policy("open").decide_address(A, 22).outcome is Outcome.ALLOW
    assert policy("allow-list").decide_address(A, 22).outcome is Outcome.DENY
    assert policy("open").decide_name("x.test").allowed
    assert not policy("allow-list").decide_name("x.test").allowed


def test_only_a_rule_that_says_udp_opens_it() -> None:
    judge = policy("open", allow(ports=[443]), allow(protocol="any", cidr="45.90.0.0/16"), allow(domain="a.test"))
    assert not judge.opens_udp
    assert judge.decide_address(A, 443, Transport.UDP, ["a.test"]).rule == "udp"
    judge = policy("open", deny(cidr=str(B)), allow(protocol="udp", ports=[443]))
    assert judge.opens_udp
    assert judge.decide_address(A, 443, Transport.UDP).rule == "rule-2"
    assert judge.decide_address(A, 444, Transport.UDP).rule == "udp"
    assert judge.decide_address(B, 443, Transport.UDP).rule == "rule-1"
    assert judge.decide_address(PRIVATE, 443, Transport.UDP).rule == "private-address"
    assert judge.decide_address(A, 443).rule == "default", "and TCP is as before"
    none = policy("none", allow(protocol="udp", ports=[443]))
    assert not none.opens_udp
    assert none.decide_address(A, 443, Transport.UDP).rule == "mode"


def test_a_name_opens_udp_to_its_addresses() -> None:
    judge = policy("allow-list", allow(protocol="udp", domain="a.test", ports=[123]))
    assert judge.decide_name("a.test").allowed
    assert judge.names_for_datagrams(123) == ["a.test"]
    assert judge.names_for_datagrams(443) == []
    assert judge.decide_address(A, 123, Transport.UDP, ["a.test"]).allowed
    assert judge.decide_address(A, 123, Transport.UDP).rule == "not-resolved"
    assert judge.decide_address(A, 123, Transport.UDP, ["b.test"]).rule == "not-resolved"
    assert not judge.decide_address(A, 123, names=["a.test"]).allowed, "it says nothing about TCP"
    assert not judge.decide_address(PRIVATE, 123, Transport.UDP, ["a.test"]).allowed
    both = policy("allow-list", allow(protocol="udp", domain="a.test", cidr="10.0.0.0/8", ports=[123]))
    assert both.decide_address(PRIVATE, 123, Transport.UDP, ["a.test"]).allowed
    assert not both.decide_address(A, 123, Transport.UDP, ["a.test"]).allowed


def test_what_no_rule_opens_for_udp() -> None:
    ports = ["1-65535"]
    wide = [allow(protocol="udp", cidr=one, ports=ports) for one in ("0.0.0.0/0", "::/0")]
    judge = policy("open", *wide, host=[B], never=[ip_network("45.90.9.0/24")])
    closed = ("127.0.0.1", "0.0.0.0", "::", "::1", "169.254.169.254", "fe80::1", "224.0.0.1", "255.255.255.255",
              "ff02::1", "192.168.127.1", "198.19.0.1", str(B), "45.90.9.1", "64:ff9b::7f00:1")  # fmt: skip
    for address in closed:
        assert not judge.decide_address(ip_address(address), 7000, Transport.UDP).allowed, address
    assert judge.decide_address(A, 7000, Transport.UDP).allowed
    assert judge.decide_address(A, 53, Transport.UDP).rule == "udp", "that is the resolver's"


# ------------------------------------------------------------------ ports


def test_a_domain_without_ports_means_the_web() -> None:
    judge = policy("allow-list", allow(domain="a.test"))
    for port in (80, 443):
        assert judge.decide_connection(A, port, claim=tls("a.test")).allowed
    assert judge.decide_address(A, 22, names=["a.test"]).outcome is Outcome.DENY
    assert judge.decide_address(A, 8443, names=["a.test"]).outcome is Outcome.DENY


def test_a_deny_rule_without_ports_means_all() -> None:
    judge = policy("open", deny(domain="a.test"))
    assert not judge.decide_connection(A, 22, names=["a.test"]).allowed
    assert not judge.decide_name("a.test").allowed


def test_a_deny_rule_for_one_port_leaves_the_name() -> None:
    judge = policy("open", deny(domain="a.test", ports=[25]))
    assert judge.decide_name("a.test").allowed
    assert not judge.decide_connection(A, 25, names=["a.test"]).allowed
    assert judge.decide_connection(A, 443, claim=tls("a.test")).allowed


def test_a_stated_port_is_bound_to_the_addresses_of_the_name() -> None:
    judge = policy("allow-list", allow(domain="a.test", ports=[22, "8000-8010"]))
    assert judge.decide_address(A, 22, names=["a.test"]).outcome is Outcome.WATCH
    assert judge.decide_address(A, 8005, names=["a.test"]).outcome is Outcome.WATCH
    assert judge.decide_connection(A, 22, claim=RAW, names=[]).rule == "default"
    assert not judge.decide_connection(A, 8005, claim=tls("b.test"), names=["a.test"]).allowed
    assert judge.names_for(22) == ["a.test"]


# ------------------------------------------------------------------ names and addresses


def test_addresses_alone_decide_where_names_do_not_matter() -> None:
    assert policy("open").decide_address(A, 443).outcome is Outcome.ALLOW
    assert policy("open", allow(domain="a.test")).decide_address(A, 443).outcome is Outcome.ALLOW
    assert policy("allow-list", deny(domain="a.test")).decide_address(A, 443).outcome is Outcome.DENY
    assert policy("allow-list", allow(cidr=str(A)), allow(domain="b.test")).decide_address(A, 443).rule == "rule-1"
    assert policy("allow-list", allow(domain="b.test"), allow(cidr=str(A))).decide_address(A, 443).rule == "rule-2"


def test_names_are_asked_for_where_they_matter() -> None:
    assert policy("allow-list", allow(domain="a.test")).decide_address(A, 443).outcome is Outcome.PEEK
    assert policy("open", deny(domain="a.test")).decide_address(A, 443).outcome is Outcome.PEEK
    assert policy("open", deny(domain="a.test")).decide_address(A, 22).outcome is Outcome.WATCH
    judge = policy("open", deny(domain="a.test"), allow(cidr=str(A)))
    assert judge.decide_address(A, 443).outcome is Outcome.PEEK


@pytest.mark.parametrize("claim", [tls(None), RAW, Claim(ClaimKind.TLS, None, "broken"), tls("b.test")])
def test_what_does_not_name_an_allowed_host(claim: Claim) -> None:
    judge = policy("allow-list", allow(domain="a.test"))
    assert not judge.decide_connection(A, 443, claim=claim, names=["a.test"]).allowed


def test_a_claimed_name_has_to_have_the_address() -> None:
    judge = policy("allow-list", allow(domain="a.test"))
    assert judge.decide_connection(B, 443, claim=tls("a.test")).by_name
    assert judge.decide_connection(B, 443, claim=tls("a.test"), bound=False).rule == "not-resolved"


def test_a_claimed_name_does_not_lift_a_later_denial_in_an_open_sandbox() -> None:
    judge = policy("open", allow(domain="a.test"), deny(cidr="45.90.2.0/24"))
    assert judge.decide_connection(B, 443, claim=tls("a.test"), bound=False).rule == "rule-2"
    assert judge.decide_connection(A, 443, claim=tls("a.test"), bound=False).rule == "default"


def test_not_public_needs_a_network() -> None:
    assert policy("open").decide_address(PRIVATE, 80).rule == "private-address"
    assert policy("open", allow()).decide_address(PRIVATE, 80).rule == "private-address"
    named = policy("allow-list", allow(domain="a.test"))
    assert named.decide_connection(PRIVATE, 443, claim=tls("a.test")).rule == "private-address"
    assert not named.permits_answer("a.test", PRIVATE)
    both = policy("allow-list", allow(domain="a.test"), allow(cidr="10.0.0.0/8"))
    assert both.permits_answer("a.test", PRIVATE)
    assert both.decide_connection(PRIVATE, 443, claim=tls("a.test")).rule == "rule-2"


def test_a_rule_with_domain_and_network_needs_both() -> None:
    judge = policy("allow-list", allow(domain="a.test", cidr="10.1.0.0/16"))
    assert judge.decide_connection(PRIVATE, 443, claim=tls("a.test")).allowed
    assert not judge.decide_connection(PRIVATE, 443, claim=tls("b.test")).allowed
    assert not judge.decide_connection(ip_address("10.2.0.1"), 443, claim=tls("a.test")).allowed
    assert not judge.decide_connection(A, 443, claim=tls("a.test")).allowed
    assert judge.permits_answer("a.test", PRIVATE)
    assert not judge.permits_answer("b.test", PRIVATE)


def test_what_the_operator_excludes_stays_closed() -> None:
    judge = policy("open", allow(cidr="10.0.0.0/8"), never=[ip_network("10.1.0.0/16")])
    assert judge.decide_address(PRIVATE, 80).rule == "private-address"
    assert judge.decide_address(ip_address("10.2.0.1"), 80).rule == "rule-1"


def test_addresses_in_other_forms_meet_the_rules_for_what_they_carry() -> None:
    nat64 = ip_address("64:ff9b::45.90.2.10")
    assert policy("open", deny(cidr=str(B))).decide_address(nat64, 80).rule == "rule-1"
    assert policy("open", deny(cidr="::/0")).decide_address(nat64, 80).rule == "rule-1"
    inner = ip_address("64:ff9b::10.1.2.3")
    assert policy("open", allow(cidr="::/0")).decide_address(inner, 80).rule == "private-address"


# ------------------------------------------------------------------ HTTP


def test_plain_http_under_names_is_read() -> None:
    judge = policy("allow-list", allow(domain="a.test"))
    assert judge.decide_connection(A, 80, claim=http("a.test")).reads_http
    assert not judge.decide_connection(A, 443, claim=tls("a.test")).reads_http
    assert judge.decide_connection(A, 80, claim=Claim(ClaimKind.HTTP2)).reads_http
    assert policy("open", deny(domain="b.test")).decide_connection(A, 80, claim=http("a.test")).reads_http


def test_rules_about_requests_need_reading() -> None:
    judge = policy("allow-list", allow(domain="a.test", methods=["get"], paths=["/ok*"]))
    assert judge.decide_connection(A, 443, claim=tls("a.test")).reads_http
    assert judge.reads_http("a.test", 443)
    assert not judge.reads_http("b.test", 443)
    assert not judge.decide_connection(A, 443, claim=tls("b.test")).allowed
    everywhere = policy("open", deny(methods=["POST"]))
    assert everywhere.decide_connection(A, 443, claim=tls("x.test")).reads_http
    assert everywhere.decide_connection(A, 443, claim=tls(None)).rule == "unreadable"
    assert everywhere.decide_connection(A, 22, claim=RAW).allowed


def test_requests() -> None:
    judge = policy(
        "allow-list", allow(domain="a.test", methods=["GET"], paths=["/ok*"]), allow(domain="*.a.test", paths=["/x"])
    )

    def ask(host: str, method: str, path: str, tls_name: str | None = None) -> bool:
        return judge.decide_request(A, 443, host, method, path, tls_name=tls_name).allowed

    assert ask("a.test", "GET", "/ok/1")
    assert ask("A.test:443", "get", "/ok?x=/../..")
    assert not ask("a.test:444", "GET", "/ok")
    assert not ask("a.test", "POST", "/ok")
    assert not ask("a.test", "GET", "/no")
    assert not ask("a.test", "GET", "/ok/../no")
    assert not ask("a.test", "GET", "/ok/%2e%2e/no")
    assert not ask("a.test", "GET", "/ok/%252e%252e/no")
    assert not ask("a.test", "GET", "/ok\\..\\no")
    assert not ask("b.test", "GET", "/ok")
    assert ask("y.a.test", "PUT", "/x", "y.a.test")
    assert not ask("y.a.test", "PUT", "/x", "a.test")
    assert not ask("a.test\0", "GET", "/ok")


def test_denied_paths_are_denied_in_every_spelling() -> None:
    judge = policy("open", deny(domain="a.test", paths=["/admin*"]))
    for path in (
        "/admin",
        "/admin/x",
        "/x/../admin",
        "//admin",
        "/%61dmin",
        "/./admin",
        "/;x/admin",
        "/x/%2e%2e/admin",
    ):
        assert not judge.decide_request(A, 80, "a.test", "GET", path).allowed, path
    assert judge.decide_request(A, 80, "a.test", "GET", "/other").allowed


def test_a_request_to_an_address_stays_there() -> None:
    judge = policy("allow-list", allow(cidr=str(A)), allow(domain="a.test"))
    assert judge.decide_request(A, 80, str(A), "GET", "/").allowed
    assert judge.decide_request(A, 80, str(B), "GET", "/").rule == "name-mismatch"
    assert judge.decide_request(A, 443, str(A), "GET", "/", tls_name="a.test").rule == "name-mismatch"


def test_other_records_need_an_exact_rule() -> None:
    judge = policy("allow-list", allow(domain="a.test"), allow(domain="*.wild.test"))
    assert judge.permits_records("a.test")
    assert not judge.permits_records("x.wild.test")
    assert policy("open").permits_records("x.wild.test")


def test_a_policy_is_kept_as_it_was() -> None:
    source = parse_policy({"mode": "open"})
    assert Policy(source).source is source
    assert source == NetworkPolicy()
