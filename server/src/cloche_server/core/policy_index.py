"""The rules of a policy, found by name, address and port instead of one after another. Pure.

`candidates` gives what may match in the order of the policy, so that the first match still decides; how many rules
there are beside them does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Final

from cloche_server.core.addresses import Address, AddressClass, Network, embedded, opens
from cloche_server.core.names import parents
from cloche_server.core.network import Rule, RuleAction, Transport

#: What an allow rule with a domain and without ports opens.
WEB_PORTS: Final = ((80, 80), (443, 443))
_KEPT_PORTS: Final = 256
_END: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Place:
    """An address that is judged: itself, the one it carries (or itself), and what it is. `address` None: some public
    address that is not known yet."""

    address: Address | None
    judged: Address | None
    kind: AddressClass


@dataclass(frozen=True, slots=True)
class Line:
    """A rule at its place in the policy, ready for comparing."""

    order: int
    rule: Rule
    network: Network | None
    spans: tuple[tuple[int, int], ...]  # empty: every port
    transport: Transport | None

    @property
    def allows(self) -> bool:
        return self.rule.action is RuleAction.ALLOW

    @property
    def by_name(self) -> bool:
        return self.rule.domain is not None

    @property
    def explicit_ports(self) -> bool:
        return bool(self.rule.ports)

    def applies(self, port: int, transport: Transport) -> bool:
        if self.transport is not None and self.transport is not transport:
            return False
        return not self.spans or any(low <= port <= high for low, high in self.spans)

    def covers(self, place: Place) -> bool:
        """Whether the rule may speak of an address: it lies in the rule's network, if it has one, and an allow rule
        opens what is not public only by a network."""
        address = place.judged
        if self.network is not None and not self._within(self.network, place):
            return False
        if not self.allows or place.kind is AddressClass.PUBLIC:
            return True
        return self.network is not None and address is not None and opens(self.network, address, place.kind)

    def _within(self, network: Network, place: Place) -> bool:
        if place.judged is not None and _contains(network, place.judged):
            return True
        if place.address is None or place.address is place.judged:
            return False
        # The form around a carried address counts as well, but does not open what it carries.
        return _contains(network, place.address) and (not self.allows or place.kind is AddressClass.PUBLIC)


def _contains(network: Network, address: Address) -> bool:
    return network.version == address.version and address in network


def place_of(address: Address | None, kind: AddressClass) -> Place:
    inner = None if address is None else embedded(address)
    return Place(address, inner if inner is not None else address, kind)


def _line(order: int, rule: Rule) -> Line:
    network = None if rule.cidr is None else ip_network(rule.cidr)
    spans = rule.ports
    transport = rule.protocol
    if rule.domain is not None and not spans and rule.action is RuleAction.ALLOW:
        spans = WEB_PORTS
        transport = transport or Transport.TCP
    return Line(order, rule, network, spans, transport)


@dataclass(frozen=True, slots=True)
class Named:
    """Whether there are rules by name that allow, deny, or speak of single requests."""

    allow: bool
    deny: bool
    reads: bool

    @property
    def any(self) -> bool:
        return self.allow or self.deny


@dataclass(slots=True)
class _Summary:
    """Of the rules with a domain that apply to one port: where in the policy the first of each kind stands."""

    allow: int = _END
    deny: int = _END
    reads_allow: int = _END
    reads_deny: int = _END
    with_network: list[Line] = field(default_factory=list)
    #: Exact names that allow rules open and whose ports they state.
    stated: list[str] = field(default_factory=list)


class RuleIndex:
    """Built once for each policy; `candidates` costs a few look-ups."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._exact: dict[str, list[Line]] = {}
        self._below: dict[str, list[Line]] = {}
        self._networks: dict[tuple[int, int], dict[int, list[Line]]] = {}
        self._everywhere: list[Line] = []
        self._named: list[Line] = []
        self._named_by_port: dict[tuple[int, Transport], _Summary] = {}
        for order, rule in enumerate(rules):
            self._add(_line(order, rule))

    def _add(self, line: Line) -> None:
        domain = line.rule.domain
        if domain is not None:
            self._named.append(line)
            table = self._below if domain.startswith("*.") else self._exact
            table.setdefault(domain.removeprefix("*."), []).append(line)
        elif line.network is not None:
            key = (line.network.version, line.network.prefixlen)
            start = int(line.network.network_address)
            self._networks.setdefault(key, {}).setdefault(start, []).append(line)
        else:
            self._everywhere.append(line)

    @property
    def has_names(self) -> bool:
        return bool(self._named)

    def unnamed(self, place: Place) -> list[Line]:
        """Rules without a domain that may match an address, in order."""
        found = list(self._everywhere)
        for address in {one for one in (place.judged, place.address) if one is not None}:
            bits = address.max_prefixlen
            for (version, length), table in self._networks.items():
                if version == address.version:
                    start = int(address) >> (bits - length) << (bits - length)
                    found.extend(table.get(start, ()))
        return sorted((line for line in found if line.covers(place)), key=_order)

    def of_names(self, names: Collection[str]) -> list[Line]:
        """Rules with a domain that one of these canonical names matches, in order."""
        found: dict[int, Line] = {}
        for name in names:
            lines = list(self._exact.get(name, ()))
            for parent in parents(name):
                lines.extend(self._below.get(parent, ()))
            found.update((line.order, line) for line in lines)
        return [found[order] for order in sorted(found)]

    def candidates(self, names: Collection[str], place: Place) -> list[Line]:
        """Everything that may match, in order."""
        named = [line for line in self.of_names(names) if line.covers(place)]
        return sorted([*named, *self.unnamed(place)], key=_order)

    def all_without_domain(self) -> list[Line]:
        """Rules without domain and network, in order."""
        return list(self._everywhere)

    def networks(self) -> list[Line]:
        return [line for table in self._networks.values() for lines in table.values() for line in lines]

    def named_before(self, order: int | None, place: Place, port: int, transport: Transport) -> Named:
        """What rules with some domain could say about a port at an address, of those before a place in the policy
        (None: of all)."""
        summary = self._of_port(port, transport)
        before = _END if order is None else order
        public = place.kind is AddressClass.PUBLIC
        near = [line for line in summary.with_network if line.order < before and line.covers(place)]
        return Named(
            allow=(public and summary.allow < before) or any(line.allows for line in near),
            deny=summary.deny < before or any(not line.allows for line in near),
            reads=summary.reads_deny < before
            or (public and summary.reads_allow < before)
            or any(line.rule.reads_http for line in near),
        )

    def _of_port(self, port: int, transport: Transport) -> _Summary:
        key = (port, transport)
        summary = self._named_by_port.get(key)
        if summary is None:
            if len(self._named_by_port) >= _KEPT_PORTS:
                self._named_by_port.clear()
            summary = _summary(line for line in self._named if line.applies(port, transport))
            self._named_by_port[key] = summary
        return summary

    def stated_names(self, port: int, transport: Transport) -> list[str]:
        """Exact names that allow rules open on a port that they state, in order."""
        return self._of_port(port, transport).stated


def _summary(lines: Iterable[Line]) -> _Summary:
    made = _Summary()
    for line in lines:
        domain = line.rule.domain or "*."
        if line.allows and line.explicit_ports and not domain.startswith("*.") and domain not in made.stated[-1:]:
            made.stated.append(domain)
        if line.network is not None:
            made.with_network.append(line)
            continue
        if line.allows:
            made.allow = min(made.allow, line.order)
        else:
            made.deny = min(made.deny, line.order)
        if line.rule.reads_http and line.allows:
            made.reads_allow = min(made.reads_allow, line.order)
        elif line.rule.reads_http:
            made.reads_deny = min(made.reads_deny, line.order)
    return made


def _order(line: Line) -> int:
    return line.order
