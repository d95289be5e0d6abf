"""What the policy of a sandbox says about something it has not tried. Nothing is sent for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloche_server.core.addresses import parse_address
from cloche_server.core.groups import Member
from cloche_server.core.names import host_name
from cloche_server.core.network import Transport
from cloche_server.core.policy import RAW, Claim, ClaimKind, Decision, Outcome
from cloche_server.netd.groups import group_decision
from cloche_server.netd.session import Session


def explain(session: Session, question: Mapping[str, Any]) -> dict[str, Any]:
    """`host`, `port` (443), `protocol` (`tcp`), and `method` with `path` for one HTTP request. Raises ValueError."""
    host = str(question["host"])
    port = int(question.get("port") or 443)
    transport = Transport(str(question.get("protocol") or "tcp"))
    method = str(question.get("method") or "")
    decision, step = _decide(session, host, port, transport, method, str(question.get("path") or "/"))
    allowed = decision.outcome is not Outcome.DENY
    return {"allowed": allowed, "rule": decision.rule, "reason": decision.reason, "step": step}


def _member(session: Session, host: str) -> Member | None:
    """Whom of the sandbox's group is meant by a name or an address."""
    try:
        return session.peer(parse_address(host))
    except ValueError:
        return session.shared.groups.named(session.sandbox, host_name(host) or "")


def _decide(
    session: Session, host: str, port: int, transport: Transport, method: str, path: str
) -> tuple[Decision, str]:
    member = _member(session, host)
    if member is not None:
        return group_decision(session.shared.doors, member), "address"
    policy = session.policy
    try:
        address = parse_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        pass
    else:
        names = session.names_of(address)
        if transport is Transport.UDP:
            return session.judge_datagram(address, port), "address"
        if method:
            return policy.decide_request(address, port, str(address), method, path), "request"
        decision = policy.decide_address(address, port, transport, names)
        if decision.outcome is Outcome.PEEK:
            decision = policy.decide_connection(address, port, transport, RAW, names)
        return decision, "address"
    name = host_name(host)
    if name is None:
        return Decision(Outcome.DENY, "no-name", "this is not the name of a host"), "name"
    if session.shared.groups.owns(session.sandbox, name):
        return Decision(Outcome.DENY, "group", "the network group has no such member"), "name"
    asked = policy.decide_name(name)
    if not asked.allowed:
        return asked, "name"
    known = session.pins.addresses_of(name, session.shared.clock.monotonic())
    found = known[0] if known else None
    if transport is Transport.UDP:
        return session.judge_datagram(found, port, (name,)), "address"
    kind = ClaimKind.HTTP if port == 80 else ClaimKind.TLS
    decision = policy.decide_connection(found, port, transport, Claim(kind, name))
    if decision.allowed and method:
        tls_name = name if kind is ClaimKind.TLS else None
        return policy.decide_request(found, port, name, method, path, tls_name=tls_name), "request"
    return decision, "connection"
