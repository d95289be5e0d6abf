"""The platform's resolver for one sandbox: policy first, then the host's resolvers; answers are cleaned, kept for a
while and pinned."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final

import dns.exception
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from cloche_server.core.addresses import Address
from cloche_server.core.policy import Decision, Outcome
from cloche_server.host.addresses import has_route
from cloche_server.netd.bucket import Bucket
from cloche_server.netd.upstream import Upstream, UpstreamFailed

if TYPE_CHECKING:
    from cloche_server.netd.session import Session

A: Final = dns.rdatatype.A
AAAA: Final = dns.rdatatype.AAAA
CNAME: Final = dns.rdatatype.CNAME
#: Asked for only where a rule names the host exactly, or the mode is open: they can carry anything.
OTHER_KINDS: Final = frozenset(
    {
        dns.rdatatype.TXT,
        dns.rdatatype.MX,
        dns.rdatatype.SRV,
        dns.rdatatype.NS,
        dns.rdatatype.SOA,
        dns.rdatatype.CAA,
        dns.rdatatype.PTR,
        dns.rdatatype.NAPTR,
        dns.rdatatype.TLSA,
        dns.rdatatype.CNAME,
    }
)
SHORTEST_TTL: Final = 5
LONGEST_TTL: Final = 300
_MAX_CHAIN: Final = 8
_MAX_RECORDS: Final = 64
_KEPT: Final = 1024
#: Questions of one sandbox that go on to the host's resolvers: per second, and under way at once. A name below a
#: wildcard can carry bytes out, so this bounds how many.
RATE: Final = 50
AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class Found:
    """`chain`: aliases from the name asked for to the one that has the records. `until`: monotonic seconds."""

    rcode: dns.rcode.Rcode
    chain: tuple[tuple[dns.name.Name, dns.name.Name], ...] = ()
    addresses: tuple[Address, ...] = ()
    records: tuple[dns.rrset.RRset, ...] = ()
    ttl: int = SHORTEST_TTL
    until: float = 0.0
    stripped: int = 0


class Busy(Exception):
    """The sandbox asks for more names than it may."""


class Lookups:
    """One for each sandbox, so that no sandbox can tell from times what another has asked for."""

    def __init__(self, session: Session, upstream: Upstream) -> None:
        self._session = session
        self._upstream = upstream
        self._kept: OrderedDict[tuple[str, int], Found] = OrderedDict()
        # A question costs 1024 of the bucket's units.
        self._rate = Bucket(RATE * 1024, self._now())
        self._under_way = 0

    def _now(self) -> float:
        return self._session.shared.clock.monotonic()

    async def addresses(self, name: str) -> list[Address]:
        """Addresses of a canonical name that may be reached, v4 and v6; empty when there are none, or when policy does
        not permit the name. What is found is pinned."""
        if not self._session.policy.decide_name(name).allowed:
            return []
        outcomes = await asyncio.gather(self.find(name, A), self.find(name, AAAA), return_exceptions=True)
        found: list[Address] = []
        for outcome in outcomes:
            if isinstance(outcome, Found):
                found.extend(outcome.addresses)
            elif not isinstance(outcome, (UpstreamFailed, Busy)):
                raise outcome
        return found

    async def find(self, name: str, kind: dns.rdatatype.RdataType) -> Found:
        """For a name that policy permits. Raises UpstreamFailed, Busy."""
        key = (name, int(kind))
        kept = self._kept.get(key)
        if kept is None or kept.until <= self._now():
            kept = await self._fresh(name, kind)
            self._kept[key] = kept
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._judged(name, kept)

    def _judged(self, name: str, found: Found) -> Found:
        """Only the addresses that may stand in an answer now; they are pinned."""
        policy = self._session.policy
        addresses = tuple(one for one in found.addresses if policy.permits_answer(name, one))
        if addresses:
            self._session.pins.add(name, addresses, found.ttl, self._now())
        stripped = len(found.addresses) - len(addresses)
        return Found(found.rcode, found.chain, addresses, found.records, found.ttl, found.until, stripped)

    async def _fresh(self, name: str, kind: dns.rdatatype.RdataType) -> Found:
        if self._under_way >= AT_ONCE or self._rate.take(1024, self._now()) < 1024:
            raise Busy
        self._under_way += 1
        try:
            return await self._follow(dns.name.from_text(name), kind)
        finally:
            self._under_way -= 1

    async def _follow(self, name: dns.name.Name, kind: dns.rdatatype.RdataType) -> Found:
        chain: list[tuple[dns.name.Name, dns.name.Name]] = []
        ttl = LONGEST_TTL
        for _ in range(_MAX_CHAIN):
            answer = await self._upstream.ask(name, kind)
            sets = answer.answer[:_MAX_RECORDS]
            name, ttl, complete = _walk_aliases(sets, name, kind, chain, ttl)
            if complete or answer.rcode() != dns.rcode.NOERROR or not _alias_ended_outside(sets, name, chain):
                return self._made(answer, name, kind, chain, ttl)
        raise UpstreamFailed("the name has too many aliases")

    def _made(
        self,
        answer: dns.message.Message,
        name: dns.name.Name,
        kind: dns.rdatatype.RdataType,
        chain: Sequence[tuple[dns.name.Name, dns.name.Name]],
        ttl: int,
    ) -> Found:
        addresses: list[Address] = []
        records: list[dns.rrset.RRset] = []
        for rrset in answer.answer[:_MAX_RECORDS]:
            if rrset.name != name or rrset.rdtype != kind or rrset.rdclass != dns.rdataclass.IN:
                continue
            ttl = min(ttl, rrset.ttl)
            if kind in {A, AAAA}:
                addresses.extend(ip_address(rdata.address) for rdata in list(rrset)[:_MAX_RECORDS])
            else:
                records.append(rrset)
        if kind == AAAA:
            proxied = self._session.shared.dialer.proxy is not None
            usable = [one for one in addresses if isinstance(one, IPv6Address) and one.ipv4_mapped is None]
            addresses = [] if proxied else [one for one in usable if has_route(one)]
        ttl = max(SHORTEST_TTL, min(ttl, LONGEST_TTL)) if addresses or records else SHORTEST_TTL
        until = self._now() + ttl
        return Found(answer.rcode(), tuple(chain), tuple(addresses), tuple(records), ttl, until)

    def permits_kind(self, name: str, kind: dns.rdatatype.RdataType) -> Decision | None:
        """A refusal for a kind of record that is not asked for under this policy, or None."""
        if kind in {A, AAAA}:
            return None
        if kind in OTHER_KINDS and self._session.policy.permits_records(name):
            return None
        return Decision(Outcome.DENY, "default", "records other than addresses need a rule that names the host exactly")


def _walk_aliases(
    sets: Sequence[dns.rrset.RRset],
    name: dns.name.Name,
    kind: dns.rdatatype.RdataType,
    chain: list[tuple[dns.name.Name, dns.name.Name]],
    ttl: int,
) -> tuple[dns.name.Name, int, bool]:
    """Follows the aliases that are in an answer. Whether the last name has records in it comes last."""
    for _ in range(_MAX_CHAIN):
        if kind != CNAME and len(chain) < _MAX_CHAIN:
            alias = next((one for one in sets if one.name == name and one.rdtype == CNAME), None)
            if alias is not None:
                target = next(iter(alias)).target
                chain.append((name, target))
                ttl = min(ttl, alias.ttl)
                name = target
                continue
        break
    return name, ttl, any(one.name == name and one.rdtype == kind for one in sets)


def _alias_ended_outside(
    sets: Sequence[dns.rrset.RRset], name: dns.name.Name, chain: Sequence[tuple[dns.name.Name, dns.name.Name]]
) -> bool:
    """Whether the answer stopped at an alias, so that its target has to be asked for."""
    return any(one.rdtype == CNAME for one in sets) and bool(chain) and chain[-1][1] == name
