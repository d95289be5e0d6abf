"""One sandbox in netd: its policy, what it has resolved, its open connections, counters and log."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cloche_server.core.addresses import Address, parse_address
from cloche_server.core.groups import Member
from cloche_server.core.names import canonical_name, matches
from cloche_server.core.netctl import LogEntry
from cloche_server.core.network import NetworkPolicy, SecretGrant, Transport
from cloche_server.core.policy import RAW, Claim, ClaimKind, Decision, Outcome, Policy
from cloche_server.netd.bucket import Bucket
from cloche_server.netd.flow import Dialed, Refused, Target, Verdict
from cloche_server.netd.groups import group_decision
from cloche_server.netd.journal import DecisionLog, Learner
from cloche_server.netd.lookup import Lookups
from cloche_server.netd.pins import Pins
from cloche_server.netd.shared import Shared

#: Of one sandbox at once: when its policy says nothing, and whatever it says, so that no guest uses up what all share.
USUAL_CONNECTIONS: Final = 1024
MOST_CONNECTIONS: Final = 4096
#: Ports whose clients speak first.
SPEAK_FIRST: Final = frozenset({80, 443, 8000, 8080, 8443})
#: Names of one sandbox whose certificates are made ahead.
MOST_PREPARED: Final = 64
_MIB: Final = 1024 * 1024
_QUIC: Final = 443


@dataclass(slots=True)
class Flow:
    """One open connection of a guest, or one flow of its datagrams (`transport`). `claim`: what its first bytes said,
    None: they were not asked. `bound`: whether the claimed name is known to have the address. `peer`: whom in its group
    it leads to; no policy is asked then. `cut` ends it."""

    number: int
    address: Address
    port: int
    cut: Callable[[], None]
    transport: Transport = Transport.TCP
    claim: Claim | None = None
    bound: bool = True
    decided: Decision | None = None
    peer: Member | None = None
    engine: bool = False
    sent: int = 0
    received: int = 0
    was_cut: str = ""

    @property
    def target(self) -> Target:
        claim = self.claim
        name = None if claim is None else claim.name
        return Target(
            address=str(self.address),
            port=self.port,
            name=name,
            tls=claim is not None and claim.kind is ClaimKind.TLS,
            connection=self.number,
        )


@dataclass(slots=True)
class Totals:
    sent: int = 0
    received: int = 0
    connections: int = 0
    flows: dict[int, Flow] = field(default_factory=dict)


class Session:
    """Implements `flow.Carrier`."""

    def __init__(
        self, sandbox: str, workspace: str, policy: NetworkPolicy, grants: Sequence[SecretGrant], shared: Shared
    ) -> None:
        self._sandbox = sandbox
        self._workspace = workspace
        self.shared = shared
        self.log = DecisionLog(shared.clock.now)
        self.learner = Learner()
        self.pins = Pins()
        self.totals = Totals()
        self._numbers = itertools.count(1)
        self.up = Bucket(0, 0)
        self.down = Bucket(0, 0)
        self._set(policy, grants)
        self.lookups = Lookups(self, shared.upstream)
        #: Called when another policy holds, or others are in its group.
        self.changed: Callable[[], None] = lambda: None

    def _set(self, policy: NetworkPolicy, grants: Sequence[SecretGrant]) -> None:
        self.policy = Policy(policy, self.shared.host, self.shared.never)
        self._grants = tuple(grants)
        rate = policy.limits.bandwidth_kbps * 1000 / 8
        now = self.shared.clock.monotonic()
        self.up.change(rate, now)
        self.down.change(rate, now)

    def replace(self, policy: NetworkPolicy, grants: Sequence[SecretGrant]) -> int:
        """The new policy holds at once; connections that it does not allow are cut. Returns how many."""
        self._set(policy, grants)
        self.changed()
        self.forget_waiting()
        return self._cut("policy")

    def regroup(self) -> None:
        """The members of its group have changed; connections to who is none any more are cut."""
        self.changed()
        self._cut("cut: one of the two has left the group")

    def _cut(self, why: str) -> int:
        doomed = [flow for flow in self.totals.flows.values() if flow.decided is not None and not self.still(flow)]
        for flow in doomed:
            flow.was_cut = why
            flow.cut()
        return len(doomed)

    def peer(self, address: Address) -> Member | None:
        """Who of its group has an address."""
        return self.shared.groups.at(self._sandbox, address)

    @property
    def own_address(self) -> Address | None:
        """Its own in its group; None: it is in none."""
        return self.shared.groups.own_address(self._sandbox)

    def prepare(self) -> None:
        """Certificates of names that are known to be read are made before anybody waits for them."""
        if self.shared.engine is not None:
            domains = [rule.domain for rule in self.policy.source.rules if rule.reads_http and rule.domain]
            names = [*(host for grant in self._grants for host in (*grant.hosts, *grant.pass_hosts)), *domains]
            exact = dict.fromkeys(name for name in names if not name.startswith("*."))
            self.shared.engine.prepare(self._workspace, list(exact)[:MOST_PREPARED])

    def forget_waiting(self) -> None:
        """Connections to servers that wait for a next request end."""
        if self.shared.engine is not None:
            self.shared.engine.forget(self)

    # ------------------------------------------------------------------ the carrier

    @property
    def sandbox(self) -> str:
        return self._sandbox

    @property
    def workspace(self) -> str:
        return self._workspace

    @property
    def grants(self) -> Sequence[SecretGrant]:
        return self._grants

    def secret(self, name: str) -> str | None:
        return self.shared.vault.value(self._workspace, name)

    def reads_http(self, name: str, port: int) -> bool:
        hosts = (host for grant in self._grants for host in (*grant.hosts, *grant.pass_hosts))
        return any(matches(host, name) for host in hosts) or self.policy.reads_http(name, port)

    def decide_request(self, target: Target, host: str, method: str, path: str) -> Verdict:
        tls_name = (target.name or "") if target.tls else None
        address = parse_address(target.address)
        decision = self.policy.decide_request(address, target.port, host, method, path, tls_name=tls_name)
        return Verdict(decision.allowed, decision.rule, decision.reason)

    def violated(self, secret: str, host: str, method: str) -> None:
        self.shared.violations.add(self._sandbox, self._workspace, secret, host, method)

    def note(self, target: Target, kind: str, verdict: Verdict, *, host: str, method: str = "", path: str = "") -> None:
        self.log.add(
            LogEntry(
                seq=0,
                at=0.0,
                kind=kind,
                verdict="allow" if verdict.allowed else "deny",
                rule=verdict.rule,
                reason=verdict.reason,
                name=host,
                address=target.address,
                port=target.port,
                method=method,
                path=path,
                connection=target.connection,
            )
        )

    async def addresses(self, target: Target, host: str) -> Sequence[str]:
        name = canonical_name(host)
        if name is None:
            candidates = [parse_address(target.address)]
        else:
            candidates = await self.lookups.addresses(name)
            wanted = parse_address(target.address)
            candidates.sort(key=lambda one: (one != wanted, one.version))
        claim = Claim(ClaimKind.HTTP, name or host)
        refused = Decision(Outcome.DENY, "not-resolved", "the name has no address that may be reached")
        allowed = []
        for address in candidates:
            decision = self.policy.decide_connection(address, target.port, Transport.TCP, claim)
            if decision.allowed:
                allowed.append(str(address))
            else:
                refused = decision
        if not allowed:
            raise Refused(Verdict(False, refused.rule, refused.reason))
        return allowed

    async def dial(self, target: Target, addresses: Sequence[str]) -> Dialed:
        candidates = [parse_address(address) for address in addresses]
        sock, address = await self.shared.dialer.connect_any(candidates, target.port)
        return Dialed(sock, str(address))

    async def pace(self, sent: int, received: int) -> None:
        loop = asyncio.get_running_loop()
        for bucket, want in ((self.up, sent), (self.down, received)):
            while want > 0:
                want -= bucket.take(want, loop.time())
                if want > 0:
                    await asyncio.sleep(bucket.delay())

    def count(self, target: Target, sent: int, received: int) -> None:
        flow = self.totals.flows.get(target.connection)
        if flow is not None:
            self.carried(flow, sent, received)

    # ------------------------------------------------------------------ connections

    def open(self, address: Address, port: int, cut: Callable[[], None], transport: Transport = Transport.TCP) -> Flow:
        """Registers a connection of the guest; `close` ends it."""
        flow = Flow(next(self._numbers), address, port, cut, transport)
        self.totals.flows[flow.number] = flow
        self.totals.connections += 1
        return flow

    def close(self, flow: Flow) -> None:
        """The connection is over; what it carried is told if it was let through."""
        if self.totals.flows.pop(flow.number, None) is None or flow.decided is None or not flow.decided.allowed:
            return
        reason = "cut: the policy changed" if flow.was_cut == "policy" else flow.was_cut or "ended"
        self.record(flow, Decision(flow.decided.outcome, flow.decided.rule, reason), end=True)

    def carried(self, flow: Flow, sent: int, received: int) -> None:
        """Counts, and cuts everything once the limit of bytes is passed."""
        flow.sent += sent
        flow.received += received
        self.counted(sent, received)

    def counted(self, sent: int, received: int) -> None:
        """The same for what belongs to no connection of the guest's own."""
        self.totals.sent += sent
        self.totals.received += received
        if self.used_up:
            for one in list(self.totals.flows.values()):
                one.was_cut = "cut: the limit of bytes is used up"
                one.cut()

    @property
    def used_up(self) -> bool:
        most = self.policy.source.limits.total_mb * _MIB
        return 0 < most <= self.totals.sent + self.totals.received

    def over_limit(self) -> Decision | None:
        """Whether another connection is refused because of a limit; the new one is among those counted."""
        if self.used_up:
            return Decision(Outcome.DENY, "limit", "the limit of bytes is used up")
        most = self.policy.source.limits.connections or USUAL_CONNECTIONS
        if len(self.totals.flows) > min(most, MOST_CONNECTIONS):
            return Decision(Outcome.DENY, "limit", "too many connections are open")
        return None

    def names_of(self, address: Address) -> list[str]:
        return self.pins.names_of(address, self.shared.clock.monotonic())

    def pinned(self, name: str, address: Address) -> bool:
        return self.pins.has(name, address, self.shared.clock.monotonic())

    def judge(self, flow: Flow) -> Decision:
        """On a connection as far as it is known; may be asked again at any time."""
        if flow.transport is Transport.UDP:
            return self.judge_datagram(flow.address, flow.port)
        names = self.names_of(flow.address)
        if flow.claim is None:
            decision = self.policy.decide_address(flow.address, flow.port, Transport.TCP, names)
        else:
            decision = self.policy.decide_connection(
                flow.address, flow.port, Transport.TCP, flow.claim, names, bound=flow.bound
            )
        return self._for_secrets(flow, decision) if self._grants else decision

    def judge_datagram(self, address: Address | None, port: int, names: Collection[str] | None = None) -> Decision:
        """On datagrams to an address (None: a public one). `names`: those that it has; left out, as they are known."""
        if address is not None and (peer := self.peer(address)) is not None:
            return group_decision(self.shared.doors, peer)
        if names is None:
            names = [] if address is None else self.names_of(address)
        decision = self.policy.decide_datagram(address, port, names)
        if decision.allowed and self.shared.dialer.proxy is not None:
            return Decision(Outcome.DENY, "udp", "this host reaches others by a proxy only, which carries no UDP")
        return decision

    def _for_secrets(self, flow: Flow, decision: Decision) -> Decision:
        """A connection that may be one to a host of a secret is not carried unread."""
        claim = flow.claim
        if claim is None and decision.allowed:
            outcome = Outcome.PEEK if flow.port in SPEAK_FIRST else Outcome.WATCH
            return Decision(outcome, decision.rule, decision.reason)
        if claim is not None and decision.allowed:
            known = claim.kind is ClaimKind.HTTP2 or (claim.name is not None and self.reads_http(claim.name, flow.port))
            return Decision(
                decision.outcome, decision.rule, decision.reason, known or decision.reads_http, decision.by_name
            )
        return decision

    def still(self, flow: Flow) -> bool:
        """Whether a connection that is open may go on in the way it goes."""
        if flow.peer is not None:
            now = self.peer(flow.address)
            return now is not None and now.sandbox == flow.peer.sandbox
        decision = self.judge(flow)
        if decision.outcome in {Outcome.PEEK, Outcome.WATCH}:
            # It is carried unread: only what needs no name holds for it.
            names = self.names_of(flow.address)
            decision = self.policy.decide_connection(flow.address, flow.port, Transport.TCP, RAW, names)
        return decision.allowed and (flow.engine or not decision.reads_http)

    # ------------------------------------------------------------------ log

    def record(self, flow: Flow, decision: Decision, *, end: bool = False) -> None:
        claim = flow.claim
        name = claim.name if claim is not None and claim.name else ",".join(self.names_of(flow.address)[:3])
        if flow.peer is not None:
            name = flow.peer.name or flow.peer.sandbox
        self.log.add(
            LogEntry(
                seq=0,
                at=0.0,
                kind=flow.transport.value,
                protocol=flow.transport.value,
                verdict="deny" if decision.outcome is Outcome.DENY else "allow",
                rule=decision.rule,
                reason=decision.reason,
                name=name,
                address=str(flow.address),
                port=flow.port,
                connection=flow.number,
                end=end,
                bytes_sent=flow.sent if end else 0,
                bytes_received=flow.received if end else 0,
            )
        )
        if self.policy.source.learn and not end and flow.peer is None:
            first = claim.name if claim is not None and claim.name else next(iter(self.names_of(flow.address)), "")
            falls_back = flow.transport is Transport.UDP and flow.port == _QUIC and not decision.allowed
            if not falls_back:  # what works without is no part of a minimal policy
                self.learner.connected(first, str(flow.address), flow.port, flow.transport)

    def record_name(self, name: str, decision: Decision) -> None:
        verdict = "allow" if decision.allowed else "deny"
        self.log.add(LogEntry(0, 0.0, "dns", verdict, decision.rule, decision.reason, name=name, protocol="udp"))
        if self.policy.source.learn and decision.rule != "group":
            self.learner.asked(canonical_name(name) or "")

    def stats(self) -> dict[str, Any]:
        totals = self.totals
        return {
            "bytes_sent": totals.sent,
            "bytes_received": totals.received,
            "connections": totals.connections,
            "open": len(totals.flows),
        }
