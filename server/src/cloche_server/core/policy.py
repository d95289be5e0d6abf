"""Verdicts of a policy about names, addresses, connections and single HTTP requests. Pure; `docs/network.md` has the
rules in words.

A connection is judged in up to three steps. `decide_address` knows only where it goes; it decides alone where it can,
because a server that speaks first would wait for ever otherwise. `decide_connection` knows what the first bytes claim.
`decide_request` judges each request where HTTP is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cloche_server.core.addresses import NEVER, Address, AddressClass, Network, classify, parse_address
from cloche_server.core.names import canonical_name
from cloche_server.core.network import NetworkMode, NetworkPolicy, Rule, RuleAction, Transport
from cloche_server.core.policy_index import Line, Named, Place, RuleIndex, place_of
from cloche_server.core.policy_paths import path_matches


class Outcome(StrEnum):
    ALLOW = "allow"
    DENY = "deny"
    PEEK = "peek"  # the first bytes decide; nothing may be sent anywhere before
    WATCH = "watch"  # allowed, unless the guest speaks first and claims a name that is not


class ClaimKind(StrEnum):
    RAW = "raw"  # neither TLS nor HTTP, or nothing at all
    TLS = "tls"
    HTTP = "http"
    HTTP2 = "http2"  # with prior knowledge: names come later, one for each request


@dataclass(frozen=True, slots=True)
class Claim:
    """What the first bytes of a guest say. `problem`: a sentence on what is wrong with them."""

    kind: ClaimKind
    name: str | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """`rule`: id of a rule, or a word. `reads_http`: allowed only with its requests read one by one. `by_name`: the
    claimed name decided, so the address must be one that the platform's resolver gives for it."""

    outcome: Outcome
    rule: str
    reason: str
    reads_http: bool = False
    by_name: bool = False

    @property
    def allowed(self) -> bool:
        return self.outcome is Outcome.ALLOW


_WEB: Final = frozenset({80, 443})
_DNS: Final = 53
RAW: Final = Claim(ClaimKind.RAW)


def _deny(rule: str, reason: str) -> Decision:
    return Decision(Outcome.DENY, rule, reason)


class Policy:
    """A policy made ready. `host`: the host's own addresses; `never`: networks that the operator lets no rule open."""

    def __init__(self, policy: NetworkPolicy, host: Collection[Address] = (), never: Collection[Network] = ()) -> None:
        self.source = policy
        self._open = policy.mode is NetworkMode.OPEN
        self._none = policy.mode is NetworkMode.NONE
        self._index = RuleIndex(policy.rules)
        self._udp = tuple(rule for rule in policy.rules if _opens_udp(rule))
        self._host = host
        self._never = tuple(never)

    # ------------------------------------------------------------------ names

    def decide_name(self, name: str) -> Decision:
        """Whether a canonical name may be asked for. The ports do not matter: a rule for one of them is enough, and
        only a deny rule for all of them forbids it."""
        if self._none:
            return self._by_mode()
        lines = sorted([*self._index.of_names((name,)), *self._index.all_without_domain()], key=lambda line: line.order)
        for line in lines:
            if line.allows:
                return self._by_rule(line, by_name=True)
            if not line.spans and line.transport is None and line.network is None and not line.rule.reads_http:
                return self._by_rule(line)
        return self._default()

    def permits_answer(self, name: str, address: Address) -> bool:
        """Whether an address may stand in an answer for a name: a public one, or one that a network of a rule opens."""
        place = self._place(address)
        if self._is_never(place):
            return False
        if place.kind is AddressClass.PUBLIC:
            return True
        return any(line.allows for line in self._index.candidates((name,), place))

    def permits_records(self, name: str) -> bool:
        """Whether records other than addresses may be asked for: everywhere in mode open, else where a rule allows
        exactly this name."""
        return self._open or any(line.allows and line.rule.domain == name for line in self._index.of_names((name,)))

    # ------------------------------------------------------------------ addresses

    def decide_address(
        self, address: Address, port: int, transport: Transport = Transport.TCP, names: Collection[str] = ()
    ) -> Decision:
        """Before any byte was read. `names`: those that the resolver has given this address for."""
        if transport is Transport.UDP:
            return self.decide_datagram(address, port, names)
        place = self._place(address)
        refused = self._refused(place)
        if refused is not None:
            return refused
        plain, read = self._first_unnamed(place, port, transport)
        named = self._named_before(plain, place, port, transport)
        decided = self._settle(plain, place)
        differs = named.reads or (named.deny if decided.allowed else named.allow)
        if not read and not differs:
            return decided
        if port in _WEB or read:
            return Decision(Outcome.PEEK, decided.rule, "the first bytes decide")
        raw = self.decide_connection(address, port, transport, RAW, names)
        if raw.allowed and not raw.reads_http:
            return Decision(Outcome.WATCH, raw.rule, raw.reason)
        if named.allow:
            return Decision(Outcome.PEEK, raw.rule, "the first bytes decide")
        return raw

    def _first_unnamed(self, place: Place, port: int, transport: Transport) -> tuple[Line | None, bool]:
        """The first rule without a domain that decides, and whether one before it speaks of single requests."""
        read = False
        for line in self._index.unnamed(place):
            if line.applies(port, transport):
                if not line.rule.reads_http:
                    return line, read
                read = True
        return None, read

    def _named_before(self, plain: Line | None, place: Place, port: int, transport: Transport) -> Named:
        return self._index.named_before(None if plain is None else plain.order, place, port, transport)

    def _settle(self, line: Line | None, place: Place) -> Decision:
        if line is not None:
            return self._by_rule(line)
        if place.kind is not AddressClass.PUBLIC:
            return _private(place.kind)
        return self._default()

    # ------------------------------------------------------------------ connections

    def decide_connection(
        self,
        address: Address | None,
        port: int,
        transport: Transport = Transport.TCP,
        claim: Claim = RAW,
        names: Collection[str] = (),
        *,
        bound: bool = True,
    ) -> Decision:
        """With what the first bytes claim. `names`: those that the resolver has given this address for; `bound`:
        whether the claimed name is one of them, or was found to have the address just now. Ask first with True, and
        again with False when the decision is `by_name` and that turns out untrue. `address` None: a public one."""
        if transport is Transport.UDP:
            return self.decide_datagram(address, port, names if claim.name is None else (claim.name,))
        place = self._place(address)
        refused = self._refused(place)
        if refused is not None:
            return refused
        plain, _ = self._first_unnamed(place, port, transport)
        named = self._named_before(plain, place, port, transport)
        if named.any and not self._open:
            wrong = self._wrong_claim(claim, named, plain)
            if wrong is not None:
                return wrong
        if claim.kind is ClaimKind.HTTP2 and (self.reads_http_at(place, port) or named.any):
            return Decision(Outcome.ALLOW, "http", "each request is judged", reads_http=True)
        considered = names if claim.name is None else (claim.name,)
        decision = self._walk(considered, place, port, transport, claim, bound)
        if decision.allowed and claim.kind is ClaimKind.HTTP and (decision.by_name or named.any):
            return Decision(Outcome.ALLOW, decision.rule, decision.reason, reads_http=True, by_name=decision.by_name)
        return decision

    def _wrong_claim(self, claim: Claim, named: Named, plain: Line | None) -> Decision | None:
        """What is refused under an allow-list where a name has to decide."""
        if plain is not None and plain.allows and not named.deny:
            return None  # allowed by its address, whatever the name is
        if claim.problem:
            return _deny("no-name", claim.problem)
        if claim.kind is ClaimKind.TLS and claim.name is None:
            return _deny("no-name", "TLS without a server name (SNI) cannot be checked against rules by domain")
        if claim.kind is ClaimKind.HTTP and claim.name is None:
            return _deny("no-name", "the request names no host")
        return None

    def _walk(
        self, names: Collection[str], place: Place, port: int, transport: Transport, claim: Claim, bound: bool
    ) -> Decision:
        maybe: Line | None = None
        reads = False
        unbound: Line | None = None
        for line in self._index.candidates(names, place):
            if not line.applies(port, transport):
                continue
            if line.by_name and line.allows:
                if claim.name is not None and not bound:
                    unbound = unbound or line
                    continue
                if claim.kind is ClaimKind.RAW and not line.explicit_ports:
                    continue
            if line.rule.reads_http:
                if claim.kind is ClaimKind.RAW:
                    continue  # speaks of HTTP, which this is not
                if claim.kind is ClaimKind.TLS and claim.name is None:
                    return _deny("unreadable", "a rule speaks of HTTP requests, and TLS without a name cannot be read")
                reads = True
                maybe = maybe or (line if line.allows else None)
                continue
            if line.allows or maybe is None:
                return self._by_rule(line, reads_http=reads and line.allows, by_name=line.by_name)
            break
        return self._end(maybe, reads, unbound, place)

    def _end(self, maybe: Line | None, reads: bool, unbound: Line | None, place: Place) -> Decision:
        """No rule decided the whole connection."""
        if maybe is not None:
            return self._by_rule(maybe, reads_http=True, by_name=maybe.by_name)
        if place.kind is not AddressClass.PUBLIC:
            return _private(place.kind)
        if self._open:
            return Decision(Outcome.ALLOW, "default", "open to public addresses", reads_http=reads)
        if unbound is not None:
            return _deny("not-resolved", "the claimed name does not have this address")
        return self._default()

    # ------------------------------------------------------------------ datagrams

    @property
    def opens_udp(self) -> bool:
        """Whether a rule carries datagrams anywhere. Where none does, nothing has to look at them."""
        return not self._none and bool(self._udp)

    def names_for_datagrams(self, port: int) -> list[str]:
        """Exact names that rules open for UDP on a port."""
        names = [
            rule.domain
            for rule in self._udp
            if rule.domain is not None and any(low <= port <= high for low, high in rule.ports)
        ]
        return list(dict.fromkeys(name for name in names if not name.startswith("*.")))

    def decide_datagram(self, address: Address | None, port: int, names: Collection[str] = ()) -> Decision:
        """On datagrams to an address. Nothing in them is read, so a rule by name speaks of the addresses that the
        resolver has given for it (`names`). Only an allow rule that says UDP opens; the mode never does."""
        if self._none:
            return self._by_mode()
        if port == _DNS:
            return _deny("udp", "whatever is sent to UDP port 53 is answered by the platform's resolver, for names")
        place = self._place(address)
        if self._is_never(place):
            return _private(place.kind)
        for line in self._index.candidates(names, place):
            if not line.applies(port, Transport.UDP) or line.rule.reads_http:
                continue
            if not line.allows or _opens_udp(line.rule):
                return self._by_rule(line, by_name=line.by_name)
        if place.kind is not AddressClass.PUBLIC:
            return _private(place.kind)
        if any(rule.domain is not None and any(low <= port <= high for low, high in rule.ports) for rule in self._udp):
            return _deny("not-resolved", "no name that a rule opens for UDP on this port was resolved to this address")
        return _deny("udp", "UDP is carried only where an allow rule says so; programs fall back to TCP where they can")

    # ------------------------------------------------------------------ requests

    def decide_request(
        self, address: Address | None, port: int, host: str, method: str, path: str, *, tls_name: str | None = None
    ) -> Decision:
        """On one HTTP request. `host`: as it stands in the request, a port included; `tls_name`: the name of the TLS
        connection that it came in, which it may not leave."""
        name, stated = _split_host(host)
        if name is None or stated not in {None, port}:
            return _deny("no-name", "the request does not name a host and port that can be checked")
        literal = _literal(name)
        if tls_name is not None and (literal is not None or name != tls_name):
            return _deny("name-mismatch", "the request is for another host than the TLS connection it came in")
        if literal is not None and literal != address:
            return _deny("name-mismatch", "the request is for another address than the connection it came in")
        place = self._place(address)
        refused = self._refused(place)
        if refused is not None:
            return refused
        for line in self._index.candidates(() if literal is not None else (name,), place):
            if line.applies(port, Transport.TCP) and _request_matches(line, method, path):
                return self._by_rule(line, by_name=line.by_name)
        return self._settle(None, place)

    def reads_http(self, name: str, port: int) -> bool:
        """Whether a rule speaks of single requests to a name, at whatever address it is."""
        lines = [*self._index.of_names((name,)), *self._index.all_without_domain(), *self._index.networks()]
        return any(line.rule.reads_http and line.applies(port, Transport.TCP) for line in lines)

    def reads_http_at(self, place: Place, port: int) -> bool:
        lines = self._index.unnamed(place)
        return any(line.rule.reads_http and line.applies(port, Transport.TCP) for line in lines)

    def names_for(self, port: int) -> list[str]:
        """Exact names that allow rules open on a port that they state."""
        return self._index.stated_names(port, Transport.TCP)

    # ------------------------------------------------------------------ sentences

    def _place(self, address: Address | None) -> Place:
        return place_of(address, AddressClass.PUBLIC if address is None else classify(address, self._host))

    def _is_never(self, place: Place) -> bool:
        judged = place.judged
        return place.kind in NEVER or (
            judged is not None and any(judged.version == one.version and judged in one for one in self._never)
        )

    def _refused(self, place: Place) -> Decision | None:
        if self._none:
            return self._by_mode()
        if self._is_never(place):
            return _private(place.kind)
        return None

    def _by_mode(self) -> Decision:
        return _deny("mode", "the sandbox has no network (mode none)")

    def _default(self) -> Decision:
        if self._open:
            return Decision(Outcome.ALLOW, "default", "open to public addresses")
        if self._none:
            return self._by_mode()
        return _deny("default", "no rule of the allow-list matches")

    @staticmethod
    def _by_rule(line: Line, *, reads_http: bool = False, by_name: bool = False) -> Decision:
        rule = line.rule
        if line.allows:
            return Decision(Outcome.ALLOW, rule.id, f"allowed by rule {rule.id}", reads_http, by_name)
        return _deny(rule.id, f"denied by rule {rule.id}")


def _opens_udp(rule: Rule) -> bool:
    return rule.action is RuleAction.ALLOW and rule.protocol is Transport.UDP


def _private(kind: AddressClass) -> Decision:
    if kind is AddressClass.GROUP:
        return _deny("group", "no member of a network group that this sandbox is in has the address")
    return _deny("private-address", f"the address is not public ({kind.value}), and no rule opens its network")


def _request_matches(line: Line, method: str, path: str) -> bool:
    rule = line.rule
    if rule.methods and method.upper() not in rule.methods:
        return False
    return not rule.paths or path_matches(rule.paths, path, strict=line.allows)


def _split_host(host: str) -> tuple[str | None, int | None]:
    """Name or literal in canonical form, and the port that is stated."""
    port: int | None = None
    rest, colon, digits = host.rpartition(":")
    if colon and not digits.endswith("]") and "]" not in digits:
        if not digits.isascii() or not digits.isdigit() or len(digits) > 5:
            return None, None
        host, port = rest, int(digits)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    address = _literal(host)
    return (str(address) if address is not None else canonical_name(host)), port


def _literal(text: str) -> Address | None:
    try:
        return parse_address(text)
    except ValueError:
        return None
