"""What kind of place an IP address is. Pure: values in, values out.

An address that carries another one (IPv4-mapped, 6to4, NAT64, Teredo) is judged by what it carries, because that is
where its packets come out. What is not known to be public is not public.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

from cloche_server.core.network import GATEWAY_IP4, GATEWAY_IP6, GROUP_NETWORK4, PREFIX_IP4, PREFIX_IP6

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class AddressClass(StrEnum):
    PUBLIC = "public"
    PRIVATE = "private"  # RFC 1918, shared (CGNAT), unique local
    LOOPBACK = "loopback"
    LINK_LOCAL = "link-local"
    METADATA = "metadata"  # where clouds hand credentials to machines
    MULTICAST = "multicast"
    BROADCAST = "broadcast"
    DOCUMENTATION = "documentation"
    RESERVED = "reserved"
    SLOT = "slot"  # the link between a guest and its gateway
    HOST = "host"  # an address of this host itself
    GROUP = "group"  # where members of a network group see each other


#: Reached only by an allow rule whose network lies inside the range (or, for the host, is the address).
GUARDED: Final = frozenset(
    {AddressClass.LOOPBACK, AddressClass.LINK_LOCAL, AddressClass.METADATA, AddressClass.HOST},
)
#: Never reached, whatever a rule says.
NEVER: Final = frozenset({AddressClass.SLOT, AddressClass.MULTICAST, AddressClass.BROADCAST, AddressClass.GROUP})

_METADATA: Final = frozenset(
    ip_address(one)
    for one in (
        "169.254.169.254",  # AWS, Google, Azure, OpenStack, DigitalOcean, Oracle, Hetzner
        "169.254.169.253",  # AWS: resolver of the network
        "169.254.169.123",  # AWS: time
        "169.254.170.2",  # AWS: credentials of containers
        "169.254.170.23",  # AWS: credentials of pods
        "169.254.0.23",  # Tencent
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle Cloud at Customer
        "168.63.129.16",  # Azure: the host of the machine
        "fd00:ec2::254",
        "fd00:ec2::253",
        "fd00:ec2::23",
        "fd20:ce::254",  # Google
        "fd00:42::42",  # Scaleway
    )
)
_SLOT: Final[tuple[Network, ...]] = (
    IPv4Network(f"{GATEWAY_IP4}/{PREFIX_IP4}", strict=False),
    IPv6Network(f"{GATEWAY_IP6}/{PREFIX_IP6}", strict=False),
)
_V4: Final = tuple(
    (IPv4Network(network), kind)
    for network, kind in (
        ("255.255.255.255/32", AddressClass.BROADCAST),
        ("0.0.0.0/32", AddressClass.LOOPBACK),  # who sends there reaches itself
        ("0.0.0.0/8", AddressClass.RESERVED),
        ("10.0.0.0/8", AddressClass.PRIVATE),
        ("100.64.0.0/10", AddressClass.PRIVATE),
        ("127.0.0.0/8", AddressClass.LOOPBACK),
        ("169.254.0.0/16", AddressClass.LINK_LOCAL),
        ("172.16.0.0/12", AddressClass.PRIVATE),
        ("192.0.0.0/24", AddressClass.RESERVED),
        ("192.0.2.0/24", AddressClass.DOCUMENTATION),
        ("192.88.99.0/24", AddressClass.RESERVED),
        ("192.168.0.0/16", AddressClass.PRIVATE),
        (GROUP_NETWORK4, AddressClass.GROUP),
        ("198.18.0.0/15", AddressClass.RESERVED),
        ("198.51.100.0/24", AddressClass.DOCUMENTATION),
        ("203.0.113.0/24", AddressClass.DOCUMENTATION),
        ("224.0.0.0/4", AddressClass.MULTICAST),
        ("240.0.0.0/4", AddressClass.RESERVED),
    )
)
_V6: Final = tuple(
    (IPv6Network(network), kind)
    for network, kind in (
        ("::/127", AddressClass.LOOPBACK),
        ("64:ff9b:1::/48", AddressClass.PRIVATE),
        ("fc00::/7", AddressClass.PRIVATE),
        ("fec0::/10", AddressClass.PRIVATE),
        ("fe80::/10", AddressClass.LINK_LOCAL),
        ("ff00::/8", AddressClass.MULTICAST),
        ("2001:db8::/32", AddressClass.DOCUMENTATION),
        ("3fff::/20", AddressClass.DOCUMENTATION),
        ("2001::/23", AddressClass.RESERVED),
        ("5f00::/16", AddressClass.RESERVED),
    )
)
_GLOBAL_V6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
#: The range that a rule has to lie in, for what is guarded as a range.
_RANGES: Final[dict[AddressClass, tuple[Network, ...]]] = {
    AddressClass.LOOPBACK: (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128")),
    AddressClass.LINK_LOCAL: (IPv4Network("169.254.0.0/16"), IPv6Network("fe80::/10")),
}


def parse_address(text: str) -> Address:
    """An address as sockets write it: a zone (`%tap0`) is dropped, IPv4-mapped becomes IPv4. Decimal, octal and other
    short forms are no addresses. Raises ValueError."""
    if len(text) > 64:
        raise ValueError("too long for an address")
    found = ip_address(text.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


def embedded(address: Address) -> IPv4Address | None:
    """The IPv4 address at which packets to an IPv6 address come out, for the forms that say so."""
    if isinstance(address, IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return None


def classify(address: Address, host: Collection[Address] = ()) -> AddressClass:
    """`host`: the host's own addresses."""
    if address in _METADATA:
        return AddressClass.METADATA
    if any(address in network for network in _SLOT if network.version == address.version):
        return AddressClass.SLOT
    if isinstance(address, IPv6Address):
        inner = embedded(address)
        if inner is not None:
            return _classify_carried(address, inner, host)
    kind = _by_table(address)
    if address in host and kind not in {AddressClass.LOOPBACK, AddressClass.GROUP}:
        return AddressClass.HOST
    return kind


def _classify_carried(address: IPv6Address, inner: IPv4Address, host: Collection[Address]) -> AddressClass:
    if address in host:
        return AddressClass.HOST
    if address.teredo is not None:
        relay = classify(address.teredo[0], host)
        if relay is not AddressClass.PUBLIC:
            return relay
    return classify(inner, host)


@lru_cache(maxsize=4096)
def _by_table(address: Address) -> AddressClass:
    if isinstance(address, IPv4Address):
        for network4, kind in _V4:
            if address in network4:
                return kind
        return AddressClass.PUBLIC
    for network6, kind in _V6:
        if address in network6:
            return kind
    return AddressClass.PUBLIC if address in _GLOBAL_V6 else AddressClass.RESERVED


def opens(network: Network, address: Address, kind: AddressClass) -> bool:
    """Whether an allow rule for `network`, which covers `address`, is explicit enough for an address of this kind."""
    if kind in NEVER:
        return False
    if kind not in GUARDED:
        return True
    if kind in _RANGES:
        return any(_inside(network, wide) for wide in _RANGES[kind])
    return network.num_addresses == 1


def _inside(network: Network, wide: Network) -> bool:
    if isinstance(network, IPv4Network) and isinstance(wide, IPv4Network):
        return network.subnet_of(wide)
    if isinstance(network, IPv6Network) and isinstance(wide, IPv6Network):
        return network.subnet_of(wide)
    return False
