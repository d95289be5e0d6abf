"""What a sandbox may reach: the policy as data. Evaluation is in `policy.py`; nothing here does I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

#: The same in every guest, so that a snapshot fits into any slot: address of the guest, of its gateway (which is also
#: its resolver), and both hardware addresses.
GUEST_IP4: Final = "192.168.127.2"
GATEWAY_IP4: Final = "192.168.127.1"
PREFIX_IP4: Final = 30
GUEST_IP6: Final = "fd00:c10c:e::2"
GATEWAY_IP6: Final = "fd00:c10c:e::1"
PREFIX_IP6: Final = 126
GUEST_MAC: Final = "02:c1:0c:00:00:02"
GATEWAY_MAC: Final = "02:c1:0c:00:00:01"
TAP: Final = "tap0"
#: Where members of a group see each other. Of the networks for benchmarks (RFC 2544), which nobody has: on no wire, and
#: never dialled.
GROUP_NETWORK4: Final = "198.19.0.0/16"
#: Ports of the slot's own sockets; everything the guest sends is redirected to them.
TCP_PORT: Final = 5301
DNS_PORT: Final = 5300
UDP_PORT: Final = 5302
#: Datagrams of any destination carry this mark inside a slot, and are routed by this table.
UDP_MARK: Final = 1
UDP_TABLE: Final = 100

MAX_RULES: Final = 2000


@dataclass(frozen=True, slots=True)
class GuestNetwork:
    """Addresses of the guest's only network card, with the length of their prefixes, and who is at its other end."""

    ip4: str
    gateway4: str
    ip6: str
    gateway6: str
    resolver: str


GUEST_NETWORK: Final = GuestNetwork(
    ip4=f"{GUEST_IP4}/{PREFIX_IP4}",
    gateway4=GATEWAY_IP4,
    ip6=f"{GUEST_IP6}/{PREFIX_IP6}",
    gateway6=GATEWAY_IP6,
    resolver=GATEWAY_IP4,
)


class NetworkMode(StrEnum):
    NONE = "none"  # nothing, names included
    ALLOW_LIST = "allow-list"  # what a rule allows
    OPEN = "open"  # every public address, unless a rule denies it


class RuleAction(StrEnum):
    ALLOW = "allow"
    DENY = "deny"


class Transport(StrEnum):
    TCP = "tcp"
    UDP = "udp"


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a policy; the first that matches decides.

    `domain`: an exact name, `*.name` (every name below it, not itself), or None; lower case, without a final dot.
    `cidr`: a network in canonical form, or None. With neither it matches every destination. `ports`: inclusive ranges;
    empty: with a domain 80 and 443, otherwise all. `protocol` None: TCP for what allows, both for what denies.
    `methods` (upper case) and `paths` (exact, or a prefix that ends in `*`) match single HTTP requests; a rule that has
    them needs HTTP that can be read.
    """

    id: str
    action: RuleAction
    domain: str | None = None
    cidr: str | None = None
    ports: tuple[tuple[int, int], ...] = ()
    protocol: Transport | None = None
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @property
    def reads_http(self) -> bool:
        return bool(self.methods or self.paths)


@dataclass(frozen=True, slots=True)
class NetworkLimits:
    """0: none. `bandwidth_kbps`: kilobits per second, each direction; `connections`: open at once; `total_mb`: MiB in
    both directions over the life of the policy's sandbox."""

    bandwidth_kbps: int = 0
    connections: int = 0
    total_mb: int = 0


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """`learn`: remember what was asked for, so that a minimal policy can be proposed."""

    mode: NetworkMode = NetworkMode.OPEN
    rules: tuple[Rule, ...] = ()
    limits: NetworkLimits = field(default_factory=NetworkLimits)
    learn: bool = False


class SecretPlace(StrEnum):
    HEADER = "header"
    QUERY = "query"
    BODY = "body"


@dataclass(frozen=True, slots=True)
class SecretGrant:
    """A secret of the workspace that a sandbox may use without knowing it.

    `secret`: its name in the workspace. `placeholder`: what the guest has instead (`env`: in which variable; None: in
    none). `hosts`: exact names or `*.name`, where the value is put in; `methods`, `paths` narrow that as in `Rule`.
    `headers` (lower case; empty: any header) and `places` tell where in the request. `pass_hosts`: where the
    placeholder itself may go.
    """

    secret: str
    placeholder: str
    hosts: tuple[str, ...]
    env: str | None = None
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    places: tuple[SecretPlace, ...] = (SecretPlace.HEADER,)
    pass_hosts: tuple[str, ...] = ()
